"""The `kvraw` command: arguments, output and exit code. What the commands do is in modules of their names."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from kvraw import __version__, config
from kvraw.cli.models import MODELS
from kvraw.errors import KvrawError

__all__ = ["main"]

Result = tuple[dict[str, Any], list[tuple[str, str]]]  # the JSON document with its "ok", and the rows of the text form


_MOST_MIB = 1 << 20


def _integer(text: str, least: int, most: float, bounds: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"must be {bounds}, is {text}")
    return value


def _positive(text: str) -> int:
    return _integer(text, 1, math.inf, "a positive integer")


def _natural(text: str) -> int:
    return _integer(text, 0, math.inf, "an integer >= 0")


def _whole_mib(text: str) -> int:
    return _integer(text, 1, _MOST_MIB, f"a positive integer, at most {_MOST_MIB}")


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _doctor(options: argparse.Namespace) -> Result:
    if options.engines:
        from kvraw.cli import engines

        found = engines.examine()
        return found, engines.rows(found)
    from kvraw.cli import doctor

    report = doctor.examine()
    return report, doctor.rows(report)


def _demo(options: argparse.Namespace) -> Result:
    from kvraw.cli import demo

    report = demo.run(MODELS[options.model], options.mib, options.engine, options.device, options.seed)
    return report, demo.rows(report)


def _bench(options: argparse.Namespace) -> Result:
    if options.beside == "decode":
        from kvraw.cli import beside

        return beside.run(options)
    from kvraw.cli import bench

    return bench.run(options)


def _calibrate(options: argparse.Namespace) -> Result:
    from kvraw.cli import calibrate

    report = calibrate.run(options.device)
    return report, calibrate.rows(report)


def _serve(options: argparse.Namespace) -> Result:
    from kvraw.cli import serve

    return serve.run(options)


def _top(options: argparse.Namespace) -> Result:
    from kvraw.cli import top

    return top.run(options)


def _mib(text: str) -> float:
    value = _real(text)
    if not 0 < value <= _MOST_MIB:
        raise argparse.ArgumentTypeError(f"must be a number above 0, at most {_MOST_MIB}, is {text}")
    return value


def _seconds(text: str) -> float:
    value = _real(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, is {text}")
    return value


def _limit(text: str) -> float:
    value = _real(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, is {text}")
    return value


def _run_sizes(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def _add_bench(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--model", choices=list(MODELS), help="the cache of a model, not one for each run size")
    bench.add_argument("--mib", type=_mib, default=64, help="MiB of a call (default: %(default)s)")
    bench.add_argument("--runs", type=_run_sizes, metavar="BYTES,...", help="only these run sizes")
    bench.add_argument("--only", metavar="PART,...", help="only these parts of the measurement, see the JSON document")
    bench.add_argument("--device", type=_natural, help="the GPU (default: 0, where there is one)")
    bench.add_argument("--cpu", action="store_true", help="the CPU engine, even where there is a GPU")
    bench.add_argument(
        "--sustained", type=_seconds, default=0.0, metavar="SECONDS", help="call after call, each engine"
    )
    bench.add_argument(
        "--beside",
        choices=("threads", "decode"),
        help="beside a Python thread that counts in a loop, or a decode loop on the GPU, and nothing else",
    )
    bench.add_argument("--matmul", action="store_true", help="with --sustained: what each engine costs a bf16 matmul")
    bench.add_argument("--quick", action="store_true", help="measure everything once: to try it out, not to quote")
    bench.add_argument("--plot", metavar="FILE", help="draw bandwidth over run size (needs matplotlib)")
    bench.add_argument("--json", metavar="FILE", help="write one JSON document; - prints it")
    text = "sets KVRAW_NEIGHBOUR; without both busy beside a decode, else idle"
    bench.add_argument("--neighbour", choices=config.NEIGHBOURS, help=text)
    beside = bench.add_argument_group("beside a decode loop (--beside decode; needs a GPU and torch)")
    beside.add_argument("--doors", type=_names, metavar="NAME,...", help="what is called: plan, lmcache, sglang, ...")
    beside.add_argument("--engines", type=_names, metavar="NAME,...", help="of plans; 'kernel x2': two thread blocks")
    beside.add_argument("--ways", type=_names, metavar="WAY,...", help="store, load, both (at once)")
    beside.add_argument("--sizes", type=_run_sizes, metavar="MIB,...", help="MiB of a transfer (1 to 256)")
    beside.add_argument("--rows", type=_run_sizes, metavar="BYTES,...", help="run sizes: 256, 2048, 32768, 2097152")
    beside.add_argument("--depth", type=_run_sizes, default=[1], metavar="N,...", help="transfers under way at once")
    beside.add_argument("--seconds", type=_seconds, default=0.45, help="of decode steps, a row (default: %(default)s)")
    beside.add_argument("--rounds", type=_positive, default=1, help="of each row, whose medians count (default: 1)")
    beside.add_argument("--batch", type=_positive, default=32, help="of the decode (default: %(default)s)")
    beside.add_argument("--lmcache", metavar="PATH", help="LMCache's compiled module (default: the installed one)")
    beside.add_argument("--sglang", metavar="MODULE", help="SGLang's operations (default: sgl_kernel.kvcacheio)")
    beside.add_argument("--queue", action="store_true", help="a load that arrives behind 2 GiB of stores")
    beside.add_argument("--first", action="store_true", help="first calls beside a GPU that is busy for 1.5 s")


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--mib", type=_whole_mib, default=1024, help="MiB of the pool (default: %(default)s)")
    serve.add_argument(
        "--endpoint", metavar="URL", help="ipc:///path or tcp://address:port (default: a socket of yours)"
    )
    serve.add_argument("--metrics", metavar="HOST:PORT", help="where Prometheus finds the counts")
    serve.add_argument("--curve-key", metavar="FILE", help="the server's secret key; needed beyond this machine")
    serve.add_argument("--curve-clients", metavar="FOLDER", help="public keys (*.key) of those who may connect")
    serve.add_argument("--write-limit", type=_limit, default=60.0, metavar="S", help="seconds a store may take")
    serve.add_argument("--read-limit", type=_limit, default=60.0, metavar="S", help="seconds a retrieve may take")
    serve.add_argument(
        "--liveness", type=_limit, default=10.0, metavar="S", help="silence after which a worker is dead"
    )
    serve.add_argument("--drain", type=_seconds, default=10.0, metavar="S", help="that the end waits for transfers")
    serve.add_argument("--message-mib", type=_whole_mib, default=256, help="most MiB of a chunk that comes by message")
    serve.add_argument("--disk", metavar="FOLDER", help="keeps chunks beyond the pool, and beyond the server's end")
    serve.add_argument("--disk-mib", type=_whole_mib, default=16384, help="MiB there (default: %(default)s)")
    serve.add_argument("--name", help="of the segment in /dev/shm (default: one that nobody else has)")
    serve.add_argument("--json", action="store_true", help="at the end print one JSON document")


def _add_top(top: argparse.ArgumentParser) -> None:
    top.add_argument("--endpoint", metavar="URL", help="of the server (default: that of one that was given none)")
    top.add_argument("--interval", type=_limit, default=1.0, metavar="S", help="between looks (default: %(default)s)")
    top.add_argument("--count", type=_natural, metavar="N", help="looks; 0: until Ctrl-C (default on a terminal)")
    top.add_argument("--timeout", type=_limit, default=5.0, metavar="S", help="to wait for an answer")
    top.add_argument("--curve-key", metavar="FILE", help="a client's secret key")
    top.add_argument("--curve-server", metavar="FILE", help="the server's public key")
    top.add_argument("--json", action="store_true", help="print the last look as one JSON document")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvraw", description="Moves KV-cache blocks between GPU and host memory.")
    parser.add_argument("--version", action="version", version=f"kvraw {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    doctor = commands.add_parser("doctor", help="what of kvraw can run on this machine, and what stands in the way")
    doctor.add_argument("--engines", action="store_true", help="find LMCache, SGLang and vLLM, and try kvraw in them")
    doctor.set_defaults(run=_doctor)

    demo = commands.add_parser("demo", help="store a model's KV-cache blocks, wipe them, load them, compare every byte")
    demo.add_argument("--model", choices=list(MODELS), default="llama-3.1-8b", help="default: %(default)s")
    demo.add_argument("--mib", type=_whole_mib, default=128, help="MiB to move each way (default: %(default)s)")
    engines = list(config.ENGINES)
    demo.add_argument("--engine", choices=engines, help="default: KVRAW_ENGINE, else auto")
    demo.add_argument("--device", type=_natural, help="the GPU that holds the cache (default: 0, where there is one)")
    demo.add_argument("--seed", type=_natural, default=0, help="of the cache's bytes and the block ids (default: 0)")
    demo.set_defaults(run=_demo)

    calibrate = commands.add_parser("calibrate", help="measure this GPU for the planner, once; takes some seconds")
    calibrate.add_argument("--device", type=_natural, default=0, help="the GPU (default: %(default)s)")
    calibrate.set_defaults(run=_calibrate)

    bench = commands.add_parser("bench", help="measure every engine against the ceilings of this machine")
    _add_bench(bench)
    bench.set_defaults(run=_bench)

    serve = commands.add_parser("serve", help="hold KV chunks in shared memory for the workers of this machine")
    _add_serve(serve)
    serve.set_defaults(run=_serve)

    top = commands.add_parser("top", help="what a cache server holds and does: hit rate, bytes, locks, workers")
    _add_top(top)
    top.set_defaults(run=_top)

    for command in (doctor, demo, calibrate):
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
    printed = options.json is True or options.json == "-"  # bench's --json may also name a file
    try:
        report, rows = options.run(options)
    except (KvrawError, MemoryError, OSError, ValueError) as error:  # what options, environment and machine bring about
        if printed:
            print(json.dumps({"ok": False, "error": str(error)}, indent=1))
        else:
            print(f"kvraw {options.command}: {error}", file=sys.stderr)
        return 1
    try:
        if printed:
            print(json.dumps(report, indent=1))
        else:
            _show(rows)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left of the output would fail again at exit
        if not isinstance(error, BrokenPipeError):
            print(f"kvraw {options.command}: the output cannot be written: {error}", file=sys.stderr)
        return 1
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
