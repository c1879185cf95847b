"""`kvraw bench`: the measurements of `kvraw.bench` as text, as a JSON document and as a picture."""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from kvraw.bench.matmul import require_torch
from kvraw.bench.plot import draw, require_figure, size_text
from kvraw.bench.report import PARTS, Options
from kvraw.bench.report import run as measure
from kvraw.bench.shapes import SHAPES, Shape
from kvraw.cli.files import require_writable
from kvraw.cli.models import MODELS
from kvraw.cli.neighbour import neighbour
from kvraw.cli.progress import progress
from kvraw.cli.truth import CHUNK_TOKENS
from kvraw.errors import BoundsError, LayoutError
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver, driver_or_none

__all__ = ["rows", "run"]

Rows = list[tuple[str, str]]


def _device(options: argparse.Namespace) -> int | None:
    if options.cpu:
        if options.device is not None:
            raise BoundsError(f"device is {options.device}, but --cpu asks for host memory")
        return None
    if options.device is None and driver_or_none() is None:
        return None
    driver()
    device = int(options.device or 0)
    with DeviceScope(device):  # tells of a device that is not there
        return device


def _require_a_run(options: argparse.Namespace) -> None:
    model = _model(options.model)
    shapes = [model] if model else [SHAPES[run] for run in options.runs or SHAPES]
    if not any(shape.within(int(options.mib * 2**20)) for shape in shapes):
        least = next(n for n in range(64) if any(shape.within(1 << n) for shape in shapes))
        raise BoundsError(f"--mib is {options.mib:g}, must be at least {2.0 ** (least - 20):g} for these run sizes")


def _options(options: argparse.Namespace) -> Options:
    default = ["threads"] if options.beside else PARTS
    parts = default if options.only is None else options.only.split(",")
    for name in parts:
        if name not in PARTS:
            raise LayoutError(f"part {name!r} is unknown; there are {', '.join(PARTS)}")
    for run in options.runs or ():
        if run not in SHAPES:
            raise LayoutError(f"run size {run} is unknown; there are {', '.join(map(str, SHAPES))}")
    if options.plot and "runs" not in parts:
        raise LayoutError("--plot draws the part runs, which --only leaves out")
    if options.matmul and not options.sustained:
        raise LayoutError("--matmul goes with --sustained SECONDS")
    device = _device(options)
    if "runs" in parts:
        _require_a_run(options)
    # What is missing is told ahead of measuring.
    for name in (options.json, options.plot):
        if name not in (None, "-"):
            require_writable(Path(name))
    if options.plot:
        require_figure()
    if options.matmul:
        require_torch(device)
    return Options(
        device=device,
        mib=options.mib,
        model=options.model,
        runs=options.runs,
        parts=parts,
        sustained=options.sustained,
        matmul=options.matmul,
        beside=options.beside,
        quick=options.quick,
    )


def _model(name: str | None) -> Shape | None:
    if name is None:
        return None
    model = MODELS[name]
    return Shape(f"{name} on one rank", model.format, model.geometry(1), CHUNK_TOKENS)


def run(options: argparse.Namespace) -> tuple[dict[str, Any], Rows]:
    """Measure, write the files that were asked for, and return the report with its text.

    Raises
    ------
    KvrawError, OSError, ValueError
        An option does not fit, a file cannot be written, or what an option needs is not installed.
    """
    what = _options(options)
    with neighbour(options.neighbour, "idle"), progress("measuring") as tick:
        report = measure(what, _model(what.model), tick)
    if not any(report[part] for part in what.parts):
        needs = f"parts may need a GPU, --sustained, or --mib above {what.mib:g}"
        raise BoundsError(f"--only {','.join(what.parts)} measures nothing here: {needs}")
    if options.json and options.json != "-":
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        draw(report, options.plot)
    return report, rows(report)


def _share(row: dict[str, Any]) -> str:
    return f"{row['gb_per_s']:.1f}" + ("" if row["ratio"] is None else f" ({row['ratio']:.3f})")


def _engines(found: list[dict[str, Any]]) -> str:
    return "  ".join(f"{r['engine']}{'=' + r['chosen'] if r['engine'] == 'auto' else ''} {_share(r)}" for r in found)


def _bandwidth(report: dict[str, Any]) -> Rows:
    out: Rows = []
    for (run_bytes, way), group in groupby(report["runs"] or (), key=lambda r: (r["run_bytes"], r["direction"])):
        out.append((f"{way} {size_text(run_bytes)}", _engines(list(group))))
    for r in report["neighbours"] or ():
        out.append((f"copy {r['direction']}", f"{_share(r)}, {r['in_a_row']} block(s) of {r['run_bytes']} B in a row"))
    for r in report["both"] or ():
        out.append(("both at once", f"{size_text(r['run_bytes'])}: {r['engine']} {_share(r)}"))
    for r in report["device"] or ():
        out.append((f"D2D {r['direction']}", f"{size_text(r['run_bytes'])}, {r['shape']}: {_share(r)}"))
    return out


def _times(report: dict[str, Any]) -> Rows:
    out: Rows = []
    by_bytes = groupby(report["bytes"] or (), key=lambda r: (r["run_bytes"], r["direction"], r["bytes"]))
    for (run_bytes, way, nbytes), group in by_bytes:
        text = "  ".join(
            f"{r['engine']}{'=' + r['chosen'] if r['engine'] == 'auto' else ''} {r['microseconds']:.0f}"
            + ("" if r["predicted_microseconds"] is None else f" (model {r['predicted_microseconds']:.0f})")
            for r in group
        )
        out.append((f"{way} {size_text(nbytes)}", f"{text} us from call to done, runs of {size_text(run_bytes)}"))
    for r in report["host"] or ():
        text = f"{r['in_a_row_microseconds']:.1f} us in a row, {r['microseconds']:.1f} us after a pause, "
        text += f"{r['first_microseconds']:.0f} us first"
        shape = f"{r['chunks']} chunks, {r['blocks']} blocks, {r['layers']} layers"
        out.append((f"host {r['direction']}", f"{r['engine']}: {text}; {shape}"))
    if report["driver"]:
        calls = ", ".join(f"{r['call']} {r['microseconds']:.1f}" for r in report["driver"])
        out.append(("driver calls", f"us on the host: {calls}"))
    for r in report["latency"] or ():
        text = f"{r['engine']} {r['microseconds']:.1f} us from call to done, {size_text(r['bytes'])}, {r['runs']} runs"
        out.append((f"1 block {r['direction']}", text))
    for r in report["checks"] or ():
        text = f"{r['cost_percent']:+.2f} % of {r['unchecked_microseconds']:.0f} us"
        out.append((f"checks {r['direction']}", f"ids on the {r['ids']}: {text}"))
    if (b := report["batch"]) and b["ratio"] is not None:
        text = f"{b['nanoseconds']:.0f} ns per descriptor, {b['ratio']:.3f} of the bare driver call's"
        out.append(("memcpy_batch", f"{text}; {b['descriptors']} of {b['bytes_each']} B"))
    for r in report["cold"] or ():
        first = (
            r["error"] or f"{r['first_milliseconds']:.0f} ms to the first block, {r['second_milliseconds']:.1f} again"
        )
        out.append(("cold start", f"{r['engine']}: {first}"))
    for r in report["threads"] or ():
        text = f"{r['gb_per_s']:.1f} GB/s beside a counting thread, {r['alone_gb_per_s']:.1f} alone, "
        text += f"{r['in_flight']} in flight; enqueue p50 {r['enqueue_p50_microseconds']:.0f}, "
        text += f"p99 {r['enqueue_p99_microseconds']:.0f} us; the thread at {r['thread_ratio']:.2f}"
        out.append((f"threads {r['direction']}", f"{r['engine']}: {text}"))
    for r in report["sustained"] or ():
        text = f"p50 {r['p50_microseconds']:.0f}, p99 {r['p99_microseconds']:.0f} us, {r['gb_per_s']:.1f} GB/s"
        if r["matmul"]:
            m = r["matmul"]
            text += f"; beside a matmul p50 {m['p50_microseconds']:.0f}, p99 {m['p99_microseconds']:.0f} us, "
            text += f"{m['gb_per_s']:.1f} GB/s, costs it {m['cost_percent']:.1f} %"
        out.append((f"sustained {r['direction']}", f"{r['engine']}: {text}"))
    return out


def rows(report: dict[str, Any]) -> Rows:
    """The report as text; ratios, in brackets, are to the ceiling of the same run."""
    machine, top = report["machine"], report["ceilings"]
    name = machine["name"] + (f", driver {machine['driver']}" if machine["driver"] else "")
    ceiling = "  ".join(f"{way} {rate:.1f}" for way, rate in top.items() if rate is not None)
    out = [("machine", name), ("ceilings", f"{ceiling} GB/s, bytes counted once")]
    if machine["profile"]:
        out.append(("planner", machine["profile"]))
    return [*out, *_bandwidth(report), *_times(report)]
