"""Measures what the planner's model needs of a device.

That is bandwidth over run size and the time of a small transfer, on an idle device; the bandwidth of its memory; and
the rate of stores from which on they hold up work beside them that is bound by that memory.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from kvraw.arrays import IndexVector
from kvraw.copying.addresses import AddressTable
from kvraw.copying.bound_copy import BoundCopy
from kvraw.copying.call import Call
from kvraw.copying.device_state import device_state
from kvraw.copying.pace import paced_rate
from kvraw.copying.plan import CopyPlan, Side
from kvraw.copying.planner import DIRECTIONS, ENGINES, Curve, Profile, RateLimit, profile_for, profile_path
from kvraw.runtime.completion import Completion
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.host.pool import HostPool
from kvraw.runtime.memory import DeviceBuffer
from kvraw.runtime.stream import Stream
from kvraw.runtime.timing import Pace, host_seconds, stream_seconds

__all__ = ["calibrate", "require_place", "save"]

Tick = Callable[[str], None]

PACE = Pace(rounds=7, seconds=0.06)
TOTAL = 64 << 20  # bytes of a call
CHUNK = 4 << 20  # bytes of a chunk
SMALL = 64 << 10  # bytes of the call that tells the latency
RUNS = {
    "kernel": (16, 128, 512, 4096, 1 << 20),
    "staged": (16, 128, 512, 4096, 1 << 20),
    "copy": (2048, 8192, 32768, 131072, 1 << 20, 4 << 20),
}
MOST_DESCRIPTORS = 8192
_LAYERS, _TOKENS, _HEADS = 32, 16, 8
# The search for the rate of stores: shares of the link, and by how much copies beside them may take longer. On an H200
# they take 1 to 2 % longer up to three quarters of the link, and a multiple from the whole on (benchmarks/paced.py).
SHARES = (0.9, 0.85, 0.8, 0.755, 0.7, 0.65, 0.6, 0.5)
MORE = 0.025
BESIDE = 256 << 20  # bytes of a copy between device memory


class _Transfer:
    """Items of some runs each, between device memory in random order and a row of pinned chunks."""

    def __init__(self, device: int, run: int, total: int, chunk: int, stack: ExitStack) -> None:
        # Small runs are rows of heads that the chunk has token-major, so that they do not fold into longer ones.
        tokens, heads = (_TOKENS, _HEADS) if run < 2048 else (1, 1)
        row = run * tokens * heads
        # An id stands for a block of many layers, of which the cache has each in one piece.
        layers = max(1, min(_LAYERS, chunk // (4 * row)))
        item = row * layers
        self.device, per_chunk = device, max(1, chunk // item)
        self.chunk_bytes = per_chunk * item
        chunks = max(1, total // self.chunk_bytes)
        count = chunks * per_chunk
        paged = Side(row, layer=count * row, token=run, head=run * tokens, limit=count)
        flat = Side(
            0, row, page=per_chunk, layer=per_chunk * row, token=run * heads, head=run, table_outer=1, entries=0
        )
        self._sides, self._counts = (paged, flat), (layers, 1, tokens, heads, run)
        self.nbytes = count * item
        memory = stack.enter_context(DeviceBuffer(self.nbytes, device))
        pool = stack.enter_context(HostPool(chunks * (self.chunk_bytes + HostPool.ALIGNMENT), device=device))
        self.stream = stack.enter_context(Stream(device))
        view = pool.view(pool.address, pool.nbytes)
        part = np.frombuffer(np.random.default_rng(0).bytes(1 << 20), np.uint8)
        for at in range(0, len(view), len(part)):
            view[at : at + len(part)] = part[: len(view) - at]
        places = np.array([c.address for c in pool.chunks(chunks, self.chunk_bytes)], np.uint64)
        ids = np.random.default_rng(1).permutation(count).astype(np.int64)
        bases = np.array([memory.address], np.uint64)
        self._cache = AddressTable(bases, bases, False)
        seen = places + np.uint64(pool.device_shift % 2**64)
        self._chunks, self._index, self._count = AddressTable(places, seen, True), IndexVector(ids, 0, count), count
        self._refs = (memory, pool)

    def work(self, engine: str, direction: str, rate: float = 0.0) -> Callable[[], Completion]:
        """What enqueues the transfer once; a kernel keeps to `rate` bytes a second, 0: to none."""
        store = direction == "store"
        sides = self._sides if store else self._sides[::-1]
        plan = BoundCopy(CopyPlan(*sides, *self._counts), engine=engine, check=False, limit=RateLimit(False, rate))
        if store:
            call = Call(self._cache, self._chunks, self._index, None, 0, self._count)
        else:
            call = Call(self._chunks, self._cache, None, self._index, 0, self._count)
        state = device_state(self.device)

        def enqueue() -> Completion:
            operation = state.completions.begin(self.stream.handle)
            try:
                plan.enqueue(state, operation, call)
            except BaseException:
                operation.abort()
                raise
            return operation.commit(self._refs)

        return enqueue


def _curves(device: int, tick: Tick) -> dict[str, Curve]:
    points: dict[str, list[tuple[int, float]]] = {f"{e} {d}": [] for e in ENGINES for d in DIRECTIONS}
    for run in sorted({run for runs in RUNS.values() for run in runs}):
        for engine in ENGINES:
            if run not in RUNS[engine]:
                continue
            with ExitStack() as stack:
                nbytes = min(TOTAL, run * MOST_DESCRIPTORS) if engine == "copy" else TOTAL
                transfer = _Transfer(device, run, nbytes, min(CHUNK, nbytes), stack)
                for direction in DIRECTIONS:
                    tick(f"{engine}, runs of {run} bytes, {direction}")
                    work = transfer.work(engine, direction)
                    seconds = stream_seconds(work, transfer.stream.handle, PACE)
                    points[f"{engine} {direction}"].append((run, round(transfer.nbytes / seconds / 1e9, 3)))
                transfer.stream.synchronize()
    return {name: tuple(curve) for name, curve in points.items()}


def _latencies(device: int, curves: dict[str, Curve], tick: Tick) -> dict[str, float]:
    """Per engine, the time from call to done of a small transfer, less what its bytes take."""
    zero = Profile("", curves, dict.fromkeys(ENGINES, 0.0))
    run = 32768
    out = {}
    with ExitStack() as stack:
        transfer = _Transfer(device, run, SMALL, SMALL, stack)
        for engine in ENGINES:
            rest = []
            for direction in DIRECTIONS:
                tick(f"{engine}, latency, {direction}")
                work = transfer.work(engine, direction)
                settle = transfer.stream.synchronize
                seconds = host_seconds(lambda w=work: w().wait(), settle, PACE)  # type: ignore[misc]
                rest.append(seconds - zero.seconds(engine, direction, run, transfer.nbytes).alone)
            out[engine] = round(max(statistics.mean(rest) * 1e6, 0.1), 2)
    return out


class _Beside:
    """Copies between device memory on a stream of their own, which their memory alone holds back."""

    def __init__(self, device: int, stack: ExitStack) -> None:
        self._memory = stack.enter_context(DeviceBuffer(2 * BESIDE, device))
        self.stream = stack.enter_context(Stream(device))

    def copy(self) -> None:
        d, address = driver(), self._memory.address
        d.memcpy_async(address + BESIDE, address, BESIDE, self.stream.handle)

    def seconds(self, work: Callable[[], Completion] | None = None) -> float:
        """Median time of one, beside transfers that go on from before the first to behind the last."""
        d, found = driver(), []
        start, end = d.event_create(timing=True), d.event_create(timing=True)
        try:
            for _ in range(max(3, PACE.rounds)):
                going = [work() for _ in range(6)] if work is not None else []
                d.event_record(start, self.stream.handle)
                for _ in range(20):
                    self.copy()
                d.event_record(end, self.stream.handle)
                d.event_synchronize(end)
                found.append(d.event_milliseconds(start, end) / 20e3)
                for one in going:
                    one.wait()
        finally:
            d.event_destroy(start)
            d.event_destroy(end)
        return statistics.median(found)


def _beside(device: int, link: float, tick: Tick) -> tuple[float, float]:
    """GB/s of device memory, and those of the fastest stores beside which copies of it hardly take longer."""
    with ExitStack() as stack:
        tick("device memory")
        copies, transfer = _Beside(device, stack), _Transfer(device, 4096, TOTAL, min(CHUNK, TOTAL), stack)
        alone = copies.seconds()
        rate = SHARES[-1] * link
        for share in SHARES:
            tick(f"copies beside stores at {share:.0%} of the link")
            work = transfer.work("kernel", "store", share * link * 1e9)
            work().wait()
            if copies.seconds(work) <= (1 + MORE) * alone:
                rate = share * link
                break
        transfer.stream.synchronize()
        return round(2 * BESIDE / alone / 1e9, 1), round(rate, 2)


def calibrate(device: int, tick: Tick = lambda text: None) -> Profile:
    """Measure a device: a few seconds, about twice `TOTAL` bytes of memory; `tick` is told what comes next."""
    with DeviceScope(device):
        curves = _curves(device, tick)
        latency = _latencies(device, curves, tick)
        links = {way: curves[f"copy {way}"][-1][1] for way in DIRECTIONS}
        memory, rate = _beside(device, links["store"], tick)
        paced = {"store": rate, "load": round(paced_rate("load", links["load"] * 1e9) * 1e-9, 2)}
        day, d = time.strftime("%Y-%m-%d", time.gmtime()), driver()
        return Profile(
            f"calibration of {day}: {d.device_name(device)}, driver {d.version()}", curves, latency, memory, paced
        )


def require_place(device: int) -> Path:
    """The file that a calibration of the device goes to, in a directory that was made and can be written to.

    Raises
    ------
    OSError
        There is no cache directory, or it cannot be written to; says which.
    """
    path = profile_path(device)
    if path is None:
        raise OSError("there is no cache directory: neither XDG_CACHE_HOME nor HOME is set to an absolute path")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        return path


def save(profile: Profile, device: int) -> Path:
    """Write a calibration to the user's cache directory, whole or not at all; later plans of this process use it.

    Raises
    ------
    OSError
        It cannot be written.
    """
    path = require_place(device)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(profile.dumps() + "\n")
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    profile_for.cache_clear()
    return path
