"""Everything that is measured, in one document."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import kvraw
from kvraw.bench import bandwidth, ceilings, latency
from kvraw.bench.cold import cold_start
from kvraw.bench.shapes import BLOCKS, DEVICE_SHAPES, SHAPES, Shape
from kvraw.bench.sustained import sustain
from kvraw.bench.threads import beside_threads
from kvraw.copying import cpu
from kvraw.copying.planner import profile_for
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.timing import QUICK, Pace

__all__ = ["PARTS", "Options", "run"]

PARTS = (
    *("runs", "neighbours", "bytes", "both", "device", "host", "driver", "latency", "checks", "batch", "cold"),
    *("sustained", "threads"),
)
_BESIDE_SECONDS = 1.5  # of each measurement beside a thread
_GPU_ONLY = {"neighbours", "both", "device", "driver", "batch"}
CEILING_BYTES = 512 << 20  # of the large copies; never more than eight times what a call moves
DEVICE_BYTES = 1 << 30  # between device memory: several times the L2 cache


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a measurement.

    Attributes
    ----------
    device : int or None
        The GPU; None: the CPU engine in host memory.
    mib : float
        MiB that a call moves.
    model : str or None
        Name of the model whose cache it is.
    runs : sequence of int or None
        Only these run sizes.
    parts : sequence of str
        Of `PARTS`.
    sustained : float
        Seconds per engine and direction of the sustained calls; 0: none.
    matmul : bool
        With a matrix product beside the sustained calls.
    beside : str or None
        "threads": beside a Python thread that counts, and only if asked.
    quick : bool
        Each measurement once: to try it out, not to quote.
    """

    device: int | None
    mib: float = 64
    model: str | None = None
    runs: Sequence[int] | None = None
    parts: Sequence[str] = PARTS
    sustained: float = 0.0
    matmul: bool = False
    beside: str | None = None
    quick: bool = False


def _machine(device: int | None) -> dict[str, Any]:
    out: dict[str, Any] = {"device": device, "kvraw": kvraw.__version__, "python": platform.python_version()}
    if device is None:
        return out | {"name": f"{platform.machine()}, {cpu.threads()} threads", "driver": None, "profile": None}
    d = driver()
    return out | {"name": d.device_name(device), "driver": d.version(), "profile": profile_for(device).source}


def run(options: Options, model: Shape | None, tick: Callable[[str], None]) -> dict[str, Any]:
    """Measure; `tick` is told what comes next. Parts that were not asked for, or need a GPU, are None.

    Parameters
    ----------
    options : Options
        What to measure.
    model : Shape, optional
        The model's cache: measured instead of a shape for each run size.
    tick : callable
        Called ahead of each step.
    """
    device, pace = options.device, QUICK if options.quick else Pace()
    nbytes = max(1, int(options.mib * (1 << 20)))
    shapes = [model] if model else [s for run, s in SHAPES.items() if not options.runs or run in options.runs]
    # A serving engine's thread has its context current; so has this one.
    with ExitStack() as stack:
        if device is not None:
            stack.enter_context(DeviceScope(device))
        return _run(options, model, shapes, nbytes, pace, tick)


def _run(
    options: Options, model: Shape | None, shapes: Sequence[Shape], nbytes: int, pace: Pace, tick: Callable[[str], None]
) -> dict[str, Any]:
    device, blocks = options.device, model or BLOCKS
    small = [model] if model else [SHAPES[256], BLOCKS]
    tick("ceilings")
    top = ceilings.measure(device, min(CEILING_BYTES, 8 * nbytes), pace)
    between = min(max(nbytes, DEVICE_BYTES), 16 * nbytes)
    parts: dict[str, Callable[[], Any]] = {
        "runs": lambda: bandwidth.over_runs(shapes, nbytes, device, top, pace, tick),
        "neighbours": lambda: bandwidth.neighbours(blocks, nbytes, device or 0, top, pace, tick),
        "bytes": lambda: [r for s in small for r in bandwidth.over_bytes(s, nbytes, device, pace, tick)],
        "both": lambda: [r for s in small for r in bandwidth.both_at_once(s, nbytes, device or 0, top, pace, tick)],
        "device": lambda: bandwidth.device_copies(
            [model] if model else DEVICE_SHAPES, between, device or 0, top, pace, tick
        ),
        "host": lambda: latency.host_times(nbytes, device, pace, tick),
        "driver": lambda: latency.driver_calls(device or 0, pace, tick),
        "latency": lambda: latency.one_block(model, nbytes, device, pace, tick),
        "checks": lambda: latency.bounds_checks(blocks, nbytes, device, pace, tick),
        "batch": lambda: latency.batch_descriptors(device or 0, pace, tick),
        "cold": lambda: [cold_start(device, e) for e in _cold(device, tick)],
        "sustained": lambda: sustain(blocks, nbytes, device, options.sustained, options.matmul, tick),
        "threads": lambda: beside_threads(model, nbytes, device, 0.1 if options.quick else _BESIDE_SECONDS, tick),
    }
    left_out = {name for name in PARTS if name not in options.parts}
    left_out |= _GPU_ONLY if device is None else set()
    left_out |= set() if options.sustained else {"sustained"}
    left_out |= set() if options.beside == "threads" else {"threads"}
    return {
        "ok": True,
        "machine": _machine(device),
        "options": asdict(options) | {"parts": [name for name in PARTS if name not in left_out]},
        "ceilings": top,
        **{name: None if name in left_out else measure() for name, measure in parts.items()},
    }


def _cold(device: int | None, tick: Callable[[str], None]) -> Sequence[str]:
    tick("cold start")
    return ("cpu",) if device is None else ("kernel", "copy", "staged")
