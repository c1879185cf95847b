"""The doors of kvraw itself: plans, loads by layer, and beside them one large copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import kvraw
from kvraw.bench.beside.ground import Case, Ground, Lane, ordered
from kvraw.bench.shapes import SHAPES, Shape
from kvraw.layouts.geometry import CacheLayout, Geometry, find_chunk_layout, find_format

__all__ = ["OneCopy", "Planned", "Pooled", "PooledByPage", "device_rows", "fitted", "paged_cache"]

ORDER = "BLPTHD"


def fitted(case: Case) -> tuple[Shape, int]:
    """The cache of a case and the chunks of a call; the shape of its row size, made smaller for small transfers."""
    shape = SHAPES[case.row].within(case.nbytes)
    if shape is None:
        raise ValueError(f"{case.nbytes} bytes are less than a block with rows of {case.row}")
    return shape, case.nbytes // shape.chunk_bytes


def geometry_of(ground: Ground, shape: Shape) -> Geometry:
    """The shape's counts, with as many blocks as the device memory holds."""
    g = shape.geometry
    return replace(g, blocks=ground.device_bytes // (g.block_size * g.token_bytes))


def paged_cache(lane: Lane, shape: Shape, geometry: Geometry) -> tuple[kvraw.PagedCache, list[int]]:
    """The paged cache that fills the lane's device memory, and its base addresses."""
    layout = CacheLayout(find_format(shape.format), geometry)
    step, base = layout.tensor_bytes(), int(lane.memory.data_ptr())
    bases = [base + k * step for k in range(layout.pointers)]
    return kvraw.PagedCache.from_pointers(bases, shape.format, geometry, device=lane.ground.device), bases


def device_rows(lane: Lane, shape: Shape, geometry: Geometry, blocks: Any) -> Any:
    """Blocks of that cache, in `ORDER`."""
    found = find_format(shape.format)
    sizes = geometry.axis_sizes(geometry.block_size) | {"D": geometry.head_size * geometry.element_size}
    used = lane.memory[: geometry.blocks * geometry.block_size * geometry.token_bytes]
    return ordered(used, found.pointers + found.axes, sizes, ORDER)[lane.torch.from_numpy(blocks).to(lane.ground.place)]


def chunk_rows(memory: Any, shape: Shape, chunks: int) -> Any:
    """Chunks that lie one after another, block by block in `ORDER`."""
    g = shape.geometry
    axes = "C" + find_chunk_layout(shape.chunk_layout).axes.replace("T", "BT")
    sizes = g.axis_sizes(g.block_size) | {"D": g.head_size * g.element_size}
    sizes |= {"C": chunks, "B": shape.chunk_tokens // g.block_size}
    return ordered(memory, axes, sizes, "C" + ORDER).flatten(0, 1)


class OneCopy(Lane):
    """One copy of so many bytes by the copy engine, the floor."""

    def __init__(self, ground: Ground, case: Case) -> None:
        super().__init__(ground, case)
        self._around = max(1, ground.device_bytes // case.nbytes)

    def _ends(self, at: int) -> tuple[Any, Any]:
        begin = at % self._around * self.moved
        return self.memory[begin : begin + self.moved], self.part(at)

    def _enqueue(self, at: int) -> None:
        device, host = self._ends(at)
        if self.way == "store":
            host.copy_(device, non_blocking=True)
        else:
            device.copy_(host, non_blocking=True)


class Planned(Lane):
    """`TransferPlan`, between a paged cache and chunks of a pool, with ids on the host."""

    def __init__(self, ground: Ground, case: Case) -> None:
        super().__init__(ground, case)
        self._shape, self._count = fitted(case)
        self.moved = self._count * self._shape.chunk_bytes
        self._geometry = geometry_of(ground, self._shape)
        cache, _ = paged_cache(self, self._shape, self._geometry)
        engine, _, ctas = case.engine.partition(" x")
        self._plan = kvraw.TransferPlan(
            cache,
            self.way,
            chunk_tokens=self._shape.chunk_tokens,
            chunk_layout=self._shape.chunk_layout,
            engine=engine,
            ctas=int(ctas) if ctas else None,
        )
        self.places = max(1, ground.host_bytes // self.moved)
        self._all = ground.pool.chunks(self.places * self._count, self._shape.chunk_bytes, timeout=10)
        if self.way == "load":
            for chunk in self._all:
                ground.fill(self.torch.from_numpy(chunk.numpy()))
        blocks = self._count * self._shape.chunk_tokens // self._shape.geometry.block_size
        self._ids = ground.ids(blocks, self._geometry.blocks)
        self._chunks = [self._all[k * self._count : (k + 1) * self._count] for k in range(self.places)]

    def _call(self, at: int) -> Any:
        done = self._plan(self._chunks[at % self.places], self._ids[at % len(self._ids)], stream=self.stream)
        self.chosen = done.engine
        return done

    def _clear(self, at: int) -> None:
        for chunk in self._chunks[at % self.places]:
            chunk.numpy()[:] = 0

    def _ends(self, at: int) -> tuple[Any, Any]:
        blocks = self._ids[at % len(self._ids)]
        host = self.torch.from_numpy(np.stack([c.numpy() for c in self._chunks[at % self.places]]))
        return device_rows(self, self._shape, self._geometry, blocks), chunk_rows(host, self._shape, self._count)

    def _close(self) -> None:
        self.ground.pool.free(self._all)


class Pooled(Lane):
    """`HostKVPool`: loads layer by layer, and stores, with slots on the host."""

    layout = "layer_first"

    def __init__(self, ground: Ground, case: Case) -> None:
        super().__init__(ground, case)
        self._shape, _ = fitted(case)
        g = self._geometry = geometry_of(ground, self._shape)
        self._cache, _ = paged_cache(self, self._shape, g)
        tokens = case.nbytes // g.token_bytes // g.block_size * g.block_size
        self.moved = tokens * g.token_bytes
        held = max(tokens, ground.host_bytes // g.token_bytes // g.block_size * g.block_size)
        self._pool = kvraw.HostKVPool.like(self._cache, held, layout=self.layout)
        for plane in range(g.planes if self.way == "load" else 0):
            ground.fill(self.torch.from_numpy(self._pool.numpy(plane).reshape(-1)))
        every = self._pool.alloc(held)
        assert every is not None
        self._slots = ground.ids(tokens, held, g.block_size)
        self._cache_slots = ground.ids(tokens, g.blocks * g.block_size, g.block_size)[::-1]

    def _call(self, at: int) -> Any:
        slots, there = self._slots[at % len(self._slots)], self._cache_slots[at % len(self._slots)]
        if self.way == "load":
            return self._pool.load_layers(self._cache, slots, there, stream=self.stream, **self._options())
        return self._pool.backup(self._cache, there, slots, stream=self.stream, **self._options())

    def _options(self) -> dict[str, Any]:
        return {} if self.case.engine == "auto" else {"engine": self.case.engine}

    def _clear(self, at: int) -> None:
        for plane in range(self._geometry.planes):
            self._pool.numpy(plane)[:] = 0

    def _ends(self, at: int) -> tuple[Any, Any]:
        size = self._geometry.block_size
        pages, blocks = (v[at % len(v)][::size] // size for v in (self._slots, self._cache_slots))
        axes, found = "P" + find_format(self.layout).axes, []
        for plane in range(self._geometry.planes):
            memory = self.torch.from_numpy(self._pool.numpy(plane))
            sizes = dict(zip(axes[1:], memory.shape, strict=True)) | {"P": 1}
            found.append(ordered(memory, axes, sizes, ORDER)[self.torch.from_numpy(pages)])
        return device_rows(self, self._shape, self._geometry, blocks), self.torch.cat(found, dim=ORDER.index("P"))

    def _close(self) -> None:
        self._pool.close()


class PooledByPage(Pooled):
    """The same, where a page's layers lie together."""

    layout = "page_first"
