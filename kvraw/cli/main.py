"""The `kvraw` command: arguments, output and exit code. What the commands do is in `doctor` and `demo`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from kvraw import __version__, config
from kvraw.cli.models import MODELS
from kvraw.errors import KvrawError

__all__ = ["main"]

Result = tuple[dict[str, Any], list[tuple[str, str]]]  # the JSON document with its "ok", and the rows of the text form


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, is {value}")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, is {value}")
    return value


def _doctor(options: argparse.Namespace) -> Result:
    from kvraw.cli import doctor

    report = doctor.examine()
    return report, doctor.rows(report)


def _demo(options: argparse.Namespace) -> Result:
    from kvraw.cli import demo

    report = demo.run(MODELS[options.model], options.mib, options.engine, options.device, options.seed)
    return report, demo.rows(report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvraw", description="Moves KV-cache blocks between GPU and host memory.")
    parser.add_argument("--version", action="version", version=f"kvraw {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    doctor = commands.add_parser("doctor", help="what of kvraw can run on this machine, and what stands in the way")
    doctor.set_defaults(run=_doctor)

    demo = commands.add_parser("demo", help="store a model's KV-cache blocks, wipe them, load them, compare every byte")
    demo.add_argument("--model", choices=list(MODELS), default="llama-3.1-8b", help="default: %(default)s")
    demo.add_argument("--mib", type=_positive, default=128, help="MiB to move each way (default: %(default)s)")
    engines = list(config.ENGINES)
    demo.add_argument("--engine", choices=engines, help="default: KVRAW_ENGINE, else auto")
    demo.add_argument("--device", type=_natural, help="the GPU that holds the cache (default: 0, where there is one)")
    demo.add_argument("--seed", type=_natural, default=0, help="of the cache's bytes and the block ids (default: 0)")
    demo.set_defaults(run=_demo)

    for command in (doctor, demo):
        command.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _show(rows: list[tuple[str, str]]) -> None:
    """Print two columns: with rich on a terminal where it is installed, so that long text wraps in its column."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table("", "", box=None, show_header=False, pad_edge=False)
            for name, text in rows:
                table.add_row(name, text)
            Console(markup=False, highlight=False).print(table)
            return
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:{width}}  {text}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 all is well, 1 something is not, 2 wrong arguments."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as end:  # argparse's way to end, after --help and --version too
        return int(end.code or 0)
    try:
        report, rows = options.run(options)
    except (KvrawError, MemoryError, ValueError) as error:  # what options, environment and machine can bring about
        if options.json:
            print(json.dumps({"ok": False, "error": str(error)}, indent=1))
        else:
            print(f"kvraw {options.command}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        _show(rows)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
