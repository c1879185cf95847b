"""Call after call for some seconds: how long each takes, and what it costs a matrix product that runs beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvraw.bench.matmul import Matmul
from kvraw.bench.shapes import Shape
from kvraw.bench.workload import CPU, DIRECTIONS, GPU, Workload

__all__ = ["sustain"]

Row = dict[str, Any]
Tick = Callable[[str], None]


class _Calls:
    """Calls one at a time, each waited for, and their times."""

    def __init__(self, work: Workload, direction: Any, engine: Any) -> None:
        self._call = work.call(work.plan(direction, engine))
        self._nbytes = work.nbytes
        self._times: list[float] = []
        self()
        self._times.clear()
        self._begin = time.perf_counter()

    def __call__(self) -> None:
        begin = time.perf_counter()
        self._call().wait()
        self._times.append(time.perf_counter() - begin)

    def summary(self) -> Row:
        elapsed = time.perf_counter() - self._begin
        p50, p99 = np.percentile(self._times, [50, 99]) * 1e6
        return {
            "calls": len(self._times),
            "p50_microseconds": float(p50),
            "p99_microseconds": float(p99),
            "gb_per_s": self._nbytes * len(self._times) / elapsed / 1e9,
        }


def sustain(shape: Shape, nbytes: int, device: int | None, seconds: float, matmul: bool, tick: Tick) -> list[Row]:
    """Every engine, both directions, for `seconds` each; with `matmul` twice as long, a product beside it."""
    product = Matmul(device) if matmul and device is not None else None
    rows = []
    fitted = shape.within(nbytes) or shape
    with Workload(fitted, fitted.chunk_bytes, device) as work:
        for direction in DIRECTIONS:
            for engine in CPU if device is None else GPU:
                tick(f"sustained, {engine.label}, {direction}")
                calls = _Calls(work, direction, engine)
                end = time.perf_counter() + seconds
                while time.perf_counter() < end:
                    calls()
                row: Row = {
                    "run_bytes": fitted.run_bytes,
                    "engine": engine.label,
                    "direction": direction,
                    "bytes": work.nbytes,
                    **calls.summary(),
                    "matmul": None,
                }
                if product is not None:
                    # Alone before and after, because clocks drift with temperature and power.
                    before = product.seconds(seconds / 3)
                    calls = _Calls(work, direction, engine)
                    beside = product.seconds(seconds, calls)
                    summary = calls.summary()
                    alone = (before + product.seconds(seconds / 3)) / 2
                    row["matmul"] = {
                        **summary,
                        "alone_tflop_per_s": product.flops / alone / 1e12,
                        "beside_tflop_per_s": product.flops / beside / 1e12,
                        "cost_percent": (beside / alone - 1) * 100,
                    }
                rows.append(row)
    return rows
