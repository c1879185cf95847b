"""Transfers beside a Python thread that never lets go of the GIL by itself: what each costs the other."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

import kvraw
from kvraw.bench.shapes import BLOCKS, Shape
from kvraw.bench.workload import CPU, DIRECTIONS, Engine, Workload

__all__ = ["beside_threads"]

Row = dict[str, Any]
Tick = Callable[[str], None]

_ENGINES = (Engine("kernel"), Engine("copy"), Engine("staged"), Engine("auto"))
_IN_FLIGHT = (1, 8)


class _Counter:
    """A thread that counts in a loop for the length of a ``with`` block."""

    def __init__(self) -> None:
        self.count = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        count = 0
        while not self._stop:
            count += 1
        self.count = count

    def __enter__(self) -> _Counter:
        self._begin = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        self.per_second = self.count / (time.perf_counter() - self._begin)


class _Rate:
    """Calls of a plan for some time, with at most so many in flight."""

    def __init__(self, work: Workload, plan: kvraw.TransferPlan, in_flight: int) -> None:
        self._work, self._plan, self._in_flight = work, plan, in_flight
        order = np.random.default_rng(5)
        self._ids = itertools.cycle([order.permutation(work.ids) for _ in range(16)])
        self.enqueues: list[float] = []

    def run(self, seconds: float) -> float:
        """Bytes a second."""
        pending: deque[kvraw.Transfer] = deque()
        work, plan, calls = self._work, self._plan, 0
        self.enqueues.clear()
        work.settle()
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            if len(pending) == self._in_flight:
                if self._in_flight == 1:
                    pending.popleft().wait()
                else:
                    # What a scheduler does: look at each step, go on with other work meanwhile.
                    while not pending[0].done():
                        time.sleep(20e-6)
                    pending.popleft()
            ids, start = next(self._ids), time.perf_counter()
            pending.append(plan(work.chunks, ids, stream=work.stream))
            self.enqueues.append(time.perf_counter() - start)
            calls += 1
        for one in pending:
            one.wait()
        return calls * work.nbytes / (time.perf_counter() - begin)


def beside_threads(shape: Shape | None, nbytes: int, device: int | None, seconds: float, tick: Tick) -> list[Row]:
    """Every engine, both directions, one transfer waited for and eight in flight: alone, and beside the thread."""
    rows = []
    with suppress(ImportError):  # without numba, what it would compile is left to Python
        kvraw.warm_up(device)  # else the compiler's thread takes the GIL from the first rows
    fitted = (shape or BLOCKS).within(nbytes) or shape or BLOCKS
    with Workload(fitted, nbytes, device) as work:
        for engine in CPU if device is None else _ENGINES:
            for direction in DIRECTIONS:
                plan = work.plan(direction, engine)
                for in_flight in _IN_FLIGHT if device is not None else (1,):
                    tick(f"beside a thread, {engine.label}, {direction}, {in_flight} in flight")
                    rate = _Rate(work, plan, in_flight)
                    rate.run(min(seconds, 0.2))
                    alone = rate.run(seconds)
                    with _Counter() as idle:  # anew each time: clocks drift
                        time.sleep(seconds / 2)
                    with _Counter() as counter:
                        beside = rate.run(seconds)
                    p50, p99 = np.percentile(rate.enqueues, [50, 99]) * 1e6
                    rows.append(
                        {
                            "engine": engine.label,
                            "direction": direction,
                            "in_flight": in_flight,
                            "bytes": work.nbytes,
                            "alone_gb_per_s": alone / 1e9,
                            "gb_per_s": beside / 1e9,
                            "enqueue_p50_microseconds": float(p50),
                            "enqueue_p99_microseconds": float(p99),
                            "thread_ratio": counter.per_second / idle.per_second,
                        }
                    )
    return rows
