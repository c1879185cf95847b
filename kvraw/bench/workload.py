"""A cache with random bytes, chunks, ids in random order, and how long plans over them take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import kvraw
from kvraw.bench.shapes import Shape
from kvraw.layouts.geometry import CacheLayout, find_format
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.timing import Pace, stream_seconds, wall_seconds

__all__ = ["CPU", "DIRECTIONS", "GPU", "Engine", "Workload", "fill", "fill_device"]

Direction = Literal["store", "load"]
DIRECTIONS: tuple[Direction, Direction] = ("store", "load")
_RANDOM_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine as it is measured: its name, and the most thread blocks that it may take."""

    name: str
    ctas: int | None = None

    @property
    def label(self) -> str:
        """The engine's name, with its thread blocks."""
        return self.name if self.ctas is None else f"{self.name} x{self.ctas}"


GPU = (Engine("kernel", 2), Engine("kernel", 16), Engine("copy"), Engine("staged"), Engine("auto"))
CPU = (Engine("cpu"),)


def _random(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(0).bytes(min(_RANDOM_BYTES, max(nbytes, 1))), np.uint8)


def fill(memory: npt.NDArray[np.uint8]) -> None:
    """Fill host memory with random bytes: zeros may move faster than data does."""
    part = _random(len(memory))
    for at in range(0, len(memory), len(part)):
        piece = memory[at : at + len(part)]
        piece[:] = part[: len(piece)]


def fill_device(memory: kvraw.DeviceBuffer, stream: kvraw.Stream) -> None:
    """Fill device memory with random bytes."""
    part = _random(memory.nbytes)
    with DeviceScope(memory.device):
        for at in range(0, memory.nbytes, len(part)):
            size = min(len(part), memory.nbytes - at)
            source = memory.address if at else int(part.ctypes.data)
            driver().memcpy_async(memory.address + at, source, size, stream.handle)
        stream.synchronize()


class Workload:
    """A cache of a shape, and chunks of about `nbytes` in all.

    Parameters
    ----------
    shape : Shape
        The cache.
    nbytes : int
        Bytes to move with each call, at most, and at least one chunk.
    device : int or None
        The device that holds the cache; None: host memory.
    chunks_on_device : bool
        Chunks in device memory, not in pinned memory.
    neighbours : int
        So many ids follow each other; the order of such groups is random.
    """

    def __init__(
        self, shape: Shape, nbytes: int, device: int | None, *, chunks_on_device: bool = False, neighbours: int = 1
    ) -> None:
        per_chunk = shape.chunk_tokens // shape.geometry.block_size
        self.shape, self.device = shape, device
        self.count = max(1, nbytes // shape.chunk_bytes)
        self.nbytes = self.count * shape.chunk_bytes
        used = self.count * per_chunk
        groups = -(-(used + max(2, used // 4)) // neighbours)
        order = np.random.default_rng(1).permutation(groups) * neighbours
        self.ids = (order[:, None] + np.arange(neighbours)).reshape(-1)[:used].astype(np.int64)
        geometry = replace(shape.geometry, blocks=groups * neighbours)
        cache_bytes = geometry.blocks * geometry.block_size * geometry.token_bytes
        pointers = CacheLayout(find_format(shape.format), geometry).pointers
        with ExitStack() as stack:
            self.stream = None if device is None else stack.enter_context(kvraw.Stream(device))
            pool_bytes = 0 if chunks_on_device else self.count * (shape.chunk_bytes + kvraw.HostPool.ALIGNMENT)
            if device is None:
                pool_bytes += cache_bytes + kvraw.HostPool.ALIGNMENT
            if pool_bytes:
                pool = stack.enter_context(kvraw.HostPool(pool_bytes, device=device, pin=device is not None))
                fill(pool.view(pool.address, pool.nbytes))
            if device is None or self.stream is None:
                base = pool.chunks(1, cache_bytes)[0].address
            else:
                memory = kvraw.DeviceBuffer(cache_bytes, device)
                stack.callback(memory.close)
                fill_device(memory, self.stream)
                base = memory.address
            self.chunks: list[Any] = (
                [stack.enter_context(kvraw.DeviceBuffer(shape.chunk_bytes, device or 0)) for _ in range(self.count)]
                if chunks_on_device
                else list(pool.chunks(self.count, shape.chunk_bytes))
            )
            bases = [base + k * (cache_bytes // pointers) for k in range(pointers)]
            self.cache = kvraw.PagedCache.from_pointers(bases, shape.format, geometry, device=device)
            self._stack = stack.pop_all()

    def plan(self, direction: Direction, engine: Engine, check: bool = True) -> kvraw.TransferPlan:
        """A transfer plan on an engine."""
        return kvraw.TransferPlan(
            self.cache,
            direction,
            chunk_tokens=self.shape.chunk_tokens,
            chunk_layout=self.shape.chunk_layout,
            engine=engine.name,
            ctas=engine.ctas,
            check=check,
        )

    def call(
        self, plan: kvraw.TransferPlan, blocks: int | None = None, ids: Any = None
    ) -> Callable[[], kvraw.Transfer]:
        """One call of a plan, with the first `blocks` ids, or with others."""
        ids = self.ids[:blocks] if ids is None else ids
        return lambda: plan(self.chunks, ids, stream=self.stream)

    def seconds(self, work: Callable[[], object], pace: Pace) -> float:
        """Median time of one call, several in a row."""
        if self.device is None or self.stream is None:
            return wall_seconds(work, pace)
        with DeviceScope(self.device):
            return stream_seconds(work, self.stream.handle, pace)

    def settle(self) -> None:
        """Wait until nothing is going on."""
        if self.stream is not None:
            self.stream.synchronize()

    def close(self) -> None:
        """Give everything back."""
        self.settle()
        self._stack.close()

    def __enter__(self) -> Workload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
