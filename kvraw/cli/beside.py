"""`kvraw bench --beside decode`: rows as they come, a JSON document and a picture."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import kvraw
from kvraw.bench.beside.arrivals import behind_stores, first_calls
from kvraw.bench.beside.decode import DECODERS, DecodeLoop
from kvraw.bench.beside.ground import Ground
from kvraw.bench.beside.peers import peers
from kvraw.bench.beside.rows import ENGINES, Selection, measure, select
from kvraw.bench.matmul import require_torch
from kvraw.bench.plot import draw_beside, require_figure, size_text
from kvraw.cli.files import require_writable
from kvraw.cli.neighbour import neighbour
from kvraw.cli.progress import progress
from kvraw.errors import BoundsError, LayoutError
from kvraw.runtime.driver import driver

__all__ = ["HEADER", "line", "rows", "run"]

DEVICE_BYTES, HOST_BYTES = 512 << 20, 256 << 20
MODEL = "llama-3.1-8b"
HEADER = (
    f"{'door':20} {'by':10} {'way':5} {'bytes':>8} {'rows':>7} {'deep':>4} {'GB/s':>6} "
    f"{'p50 %':>7} {'p99 %':>7} {'host us':>8}  alone ms"
)


def line(row: dict[str, Any]) -> str:
    """A row of the table; of both directions at once GB/s is the slower one's."""
    head = f"{row['door']:20} {row['engine']:10} {row['way']:5} {size_text(row['bytes']):>8} "
    head += f"{size_text(row['row_bytes']):>7} {row['in_flight']:4} "
    if row["error"]:
        return head + f"error: {row['error']}"
    alone = sum(row["alone_p50_milliseconds"]) / len(row["alone_p50_milliseconds"])
    text = f"{row['gb_per_s']:6.1f} {row['p50_percent']:+7.1f} {row['p99_percent']:+7.1f} "
    text += f"{row['host_p50_microseconds']:8.0f}  {alone:.3f}"
    if row["chosen"] and row["engine"] == "auto":
        text += f"  {row['chosen']}"
    if row["starved"]:
        text += f"  (host late for {row['starved']} of {row['starved'] + row['steps']} steps)"
    return head + text


def _late(report: dict[str, Any]) -> list[str]:
    out = []
    for r in report["queue"] or ():
        out.append(
            f"a load of {size_text(r['bytes'])} behind {size_text(r['queued_bytes'])} of stores, {r['engine']}: waits "
            f"{r['waits_milliseconds']:.2f} ms; done after {r['behind_milliseconds']:.2f}, alone "
            f"{r['alone_milliseconds']:.2f}; {size_text(r['stores_left_bytes'])} of stores were left"
        )
    for r in report["first"] or ():
        if r["error"]:
            out.append(f"first call beside a busy GPU: {r['error']}")
            continue
        out.append(
            f"first call beside a busy GPU, {r['door']} {r['way']}: enqueued in {r['first_milliseconds']:.2f} ms, the "
            f"second in {r['second_milliseconds']:.2f}; another thread's longest copy "
            f"{r['longest_copy_milliseconds']:.2f} ms, else {r['copy_milliseconds']:.2f}"
        )
    return out


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What is printed behind the table."""
    machine, decode = report["machine"], report["decode"]
    out = [("machine", f"{machine['name']}, driver {machine['driver']}")]
    if decode:
        text = f"{decode['model']}, batch {decode['batch']}, bf16: a step alone {decode['p50_milliseconds']:.3f} ms, "
        out.append(("decode", text + f"{decode['tb_per_s']:.2f} TB/s of weights"))
    return [*out, *(("", text) for text in _late(report))]


def _require(options: argparse.Namespace) -> tuple[int, Selection]:
    """What is missing or does not fit is reported ahead of measuring."""
    if options.cpu:
        raise BoundsError("--beside decode needs a GPU, --cpu asks for host memory")
    model = options.model or MODEL
    if model not in DECODERS:
        raise LayoutError(f"--model {model} has no decode loop; there are {', '.join(DECODERS)}")
    for size in options.sizes or ():
        if not 1 <= size <= HOST_BYTES >> 20:
            raise BoundsError(f"--sizes {size} is out of bounds, must be in [1, {HOST_BYTES >> 20}] MiB")
    for depth in options.depth:
        if not 1 <= depth <= 32:
            raise BoundsError(f"--depth {depth} is out of bounds, must be in [1, 32]")
    chosen = Selection(options.doors, options.engines, options.ways, options.sizes, options.rows, options.depth)
    select(chosen)
    for name in (options.json, options.plot):
        if name not in (None, "-"):
            require_writable(Path(name))
    if options.plot:
        require_figure()
    driver()
    device = int(options.device or 0)
    require_torch(device, "--beside decode")
    return device, chosen


def _modules(options: argparse.Namespace) -> dict[str, Any]:
    try:
        return peers(options.lmcache, options.sglang)
    except ImportError as error:
        raise ValueError(f"the module beside cannot be loaded: {error}") from None


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Measure, print each row as it comes, and return the report with what is printed behind them.

    Raises
    ------
    KvrawError, OSError, ValueError
        An option does not fit, or what is needed is missing.
    """
    began = time.perf_counter()
    device, chosen = _require(options)
    modules = _modules(options)
    report: dict[str, Any] = {
        "ok": True,
        "machine": {"device": device, "kvraw": kvraw.__version__, "name": driver().device_name(device)},
        "options": {
            "neighbour": options.neighbour,
            "seconds": options.seconds,
            "rounds": options.rounds,
            "peers": sorted(modules),
        },
        "decode": None,
        "rows": None,
        "queue": None,
        "first": None,
    }
    report["machine"]["driver"] = driver().version()
    quiet, late = options.json == "-", options.queue or options.first
    with neighbour(options.neighbour, "busy") as made_for, progress("measuring") as tick:
        report["options"]["neighbour"] = made_for
        torch = require_torch(device, "--beside decode")
        tick("getting ready")
        if options.first:
            report["first"] = first_calls(device)
        kvraw.warm_up(device=device)
        ground = Ground(torch, device, DEVICE_BYTES, HOST_BYTES)
        try:
            if options.queue:
                report["queue"] = behind_stores(ground, options.engines or ENGINES, tick)
            if not late or options.doors:
                model = options.model or MODEL
                loop = DecodeLoop(device, DECODERS[model], options.batch)
                alone = loop.steps(0.3)
                report["decode"] = {
                    "model": model,
                    "batch": options.batch,
                    "p50_milliseconds": alone.p50,
                    "p99_milliseconds": alone.p99,
                    "tb_per_s": DECODERS[model].weight_bytes / alone.p50 / 1e9,
                }
                if not quiet:
                    print(HEADER, flush=True)
                report["rows"] = []
                wanted, pace = select(chosen, sorted(modules)), (options.seconds, options.rounds)
                for row in measure(loop, ground, wanted, modules, *pace, tick):
                    report["rows"].append(row)
                    if not quiet:
                        print(line(row), flush=True)
                report["ok"] = any(not row["error"] for row in report["rows"])
        finally:
            ground.close()
    report["ok"] = report["ok"] and not any(row["error"] for row in report["first"] or ())
    report["seconds"] = time.perf_counter() - began
    if options.json and not quiet:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    if options.plot and report["rows"]:
        draw_beside(report, options.plot)
    sys.stdout.flush()
    return report, rows(report)
