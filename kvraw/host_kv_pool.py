"""A pool of KV pages in host memory: slots to allocate and free, and copies to and from a paged cache."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from kvraw.arrays import I64, U64, IndexVector, index_vector
from kvraw.cache import PagedCache
from kvraw.engines.device_state import device_state
from kvraw.engines.operands import check_distinct, check_host_index
from kvraw.errors import BoundsError, LayoutError
from kvraw.layout import CacheLayout, Geometry, copy_plan, find_format
from kvraw.plan import Side
from kvraw.prepared import Copy, PreparedCopy
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.pool import HostPool
from kvraw.runtime.stream import stream_handle

__all__ = ["HostKVPool", "LayerwiseLoad"]

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class LayerwiseLoad:
    """A load of all layers in order, with an event behind each: a layer can be used while the next still moves."""

    __slots__ = ("_copies",)

    def __init__(self, copies: list[Copy]) -> None:
        self._copies = copies

    def wait_on(self, layer: int, stream: Any) -> None:
        """Make a stream of the same device wait for a layer, and those before it."""
        self._copies[layer].wait_on(stream)

    def done(self, layer: int = -1) -> bool:
        """Whether a layer, and those before it, is there; default: all of them. Never waits."""
        return self._copies[layer].done()

    def wait(self) -> None:
        """Wait on the host for all layers; raises `BoundsError` where a kernel met a bad slot."""
        for copy in self._copies:
            copy.wait()


def _layer(side: Side, bases: U64, layer: int, planes: int) -> tuple[Side, U64]:
    """One layer of a side: the side, which is the same for all layers, and that layer's bases."""
    entries = np.arange(planes if side.table_plane else 1) * side.table_plane + layer * side.table_layer
    one = replace(side, layer=0, table_layer=0, table_plane=int(side.table_plane != 0), entries=len(entries))
    return one, bases[entries] + np.uint64(layer * side.layer)


class HostKVPool:
    """KV pages in host memory, in one of the layouts that hierarchical caches use.

    Parameters
    ----------
    layout : str
        "layer_first", "page_first", "page_first_direct" or "page_head" (which needs K and V apart).
    tokens, page_size : int
        Slots, a multiple of the slots of a page.
    layers, heads, head_size, element_size : int
        What a token takes. With one plane (MLA), `heads` is 1.
    planes : int
        2: K and V are apart; 1: they are one.
    device : int, optional
        Pin the memory for the GPUs now, in a context of this device; default: at the first copy that needs it.

    Attributes
    ----------
    layout : CacheLayout
        Where everything lies.
    bases : numpy.ndarray of uint64
        Address of each plane.
    """

    def __init__(
        self,
        *,
        layout: str,
        tokens: int,
        page_size: int,
        layers: int,
        heads: int,
        head_size: int,
        element_size: int,
        planes: int = 2,
        device: int | None = None,
    ) -> None:
        if layout not in LAYOUTS:
            raise LayoutError(f"layout is {layout!r}, must be one of {', '.join(LAYOUTS)}")
        if page_size <= 0 or tokens <= 0 or tokens % page_size:
            raise BoundsError(f"tokens is {tokens}, must be a positive multiple of page_size, {page_size}")
        geometry = Geometry(layers, tokens // page_size, page_size, heads, head_size, element_size, planes)
        self.layout = CacheLayout(find_format(layout if planes == 2 else f"{layout}_mla"), geometry)
        each = self._plane_bytes = -(-self.layout.tensor_bytes() // 256) * 256  # aligned, for the widest accesses
        self._pool = HostPool(each * planes, device=device)
        (self._chunk,) = self._pool.chunks(1, each * planes)
        self.bases = np.array([self._chunk.address + k * each for k in range(planes)], np.uint64)
        self.page_size, self.tokens = page_size, tokens
        self._lock = threading.Lock()
        self._used = np.zeros(geometry.blocks, bool)
        self._free = list(range(geometry.blocks))[::-1]
        self._copies: dict[tuple[object, ...], PreparedCopy] = {}

    @classmethod
    def like(
        cls, cache: PagedCache, tokens: int, *, layout: str, page_size: int | None = None, device: int | None = None
    ) -> HostKVPool:
        """A pool for the tokens of a cache."""
        g = cache.geometry
        return cls(
            layout=layout,
            tokens=tokens,
            page_size=page_size or g.block_size,
            layers=g.layers,
            heads=g.heads,
            head_size=g.head_size,
            element_size=g.element_size,
            planes=g.planes,
            device=cache.device if device is None else device,
        )

    # slots

    @property
    def available(self) -> int:
        """Slots that are free."""
        return len(self._free) * self.page_size

    def alloc(self, tokens: int) -> I64 | None:
        """Slots of whole pages for this many tokens, a multiple of the page size; None where too few are free."""
        if tokens < 0 or tokens % self.page_size:
            raise BoundsError(f"tokens is {tokens}, must be a multiple of the page size, {self.page_size}")
        count = tokens // self.page_size
        with self._lock:
            if count > len(self._free):
                return None
            pages = np.array([self._free.pop() for _ in range(count)], np.int64)
            self._used[pages] = True
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()

    def free(self, slots: Any) -> None:
        """Give the slots of whole pages back, once no copy uses them any more.

        Raises
        ------
        BoundsError
            They are not whole pages of this pool.
        ValueError
            A page is not allocated (freed twice?), or stands twice; nothing is given back.
        """
        pages = self._pages("slots", self._host_slots("slots", slots))
        with self._lock:
            again = ~self._used[pages]
            twice = np.bincount(pages, minlength=1)[pages] > 1 if len(pages) else again
            if again.any() or twice.any():
                page = int(pages[np.argmax(again | twice)])
                raise ValueError(f"the page of slot {page * self.page_size} is not allocated (freed twice?)")
            self._used[pages] = False
            self._free += pages[::-1].tolist()

    def numpy(self, plane: int = 0) -> np.ndarray:
        """A plane's bytes, shaped as its layout says; the last axis counts bytes."""
        g = self.layout.geometry
        sizes = g.axis_sizes(g.block_size) | {"D": g.head_size * g.element_size}
        begin = plane * self._plane_bytes
        held = self._chunk.numpy()[begin : begin + self.layout.tensor_bytes()]
        return held.reshape([sizes[a] for a in self.layout.axes])

    # copies

    def backup(self, cache: PagedCache, cache_slots: Any, slots: Any, *, stream: Any = None, **options: Any) -> Copy:
        """Copy slots of a cache to slots of this pool, all layers.

        Parameters
        ----------
        cache : PagedCache
            Its layers, heads and sizes are this pool's; its blocks may have another size.
        cache_slots, slots : object
            One each per token: list, array or tensor. Whole pages move as such where both are on the host.
        stream : object
            As for `kvraw.store`; a GPU needs one.
        options
            `engine`, `ctas` and `check`, as of `PreparedCopy`.

        Raises
        ------
        BoundsError
            A slot out of bounds, not allocated here, or twice in the destination; nothing is moved.
        LayoutError
            The cache is of another geometry.
        """
        return self._all(cache, cache_slots, slots, True, stream, options)

    def load(self, cache: PagedCache, slots: Any, cache_slots: Any, *, stream: Any = None, **options: Any) -> Copy:
        """Copy slots of this pool to slots of a cache, all layers; see `backup`."""
        return self._all(cache, cache_slots, slots, False, stream, options)

    def load_layers(
        self, cache: PagedCache, slots: Any, cache_slots: Any, *, stream: Any = None, **options: Any
    ) -> LayerwiseLoad:
        """Load layer by layer, on a stream of kvraw's own behind what `stream` was given; see `backup`.

        `stream` itself goes on: what reads a layer there calls `LayerwiseLoad.wait_on` first.
        """
        by, here, there = self._index(cache, cache_slots, slots, False)
        own: Any = None
        if cache.device is not None:
            handle = stream_handle(stream)
            with DeviceScope(cache.device):
                state, own = device_state(cache.device), handle
                if not driver().stream_capturing(handle):
                    own = state.side_stream("layers").handle
                    event = state.books.take_event()
                    driver().event_record(event, handle)
                    driver().stream_wait_event(own, event)
                    state.books.give_event(event)
        copies = []
        planes = self.layout.geometry.planes
        for layer in range(self.layout.geometry.layers):
            src, from_ = _layer(self.layout.side(by), self.bases, layer, planes)
            dst, to = _layer(cache.layout.side(by), cache.bases, layer, planes)
            copy = self._prepared(cache, by, src, dst, False, 1, options)
            copies.append(self._run(copy, from_, to, here, there, own, cache))
        return LayerwiseLoad(copies)

    def _all(
        self, cache: PagedCache, cache_slots: Any, slots: Any, store: bool, stream: Any, options: dict[str, Any]
    ) -> Copy:
        by, here, there = self._index(cache, cache_slots, slots, store)
        mine, other = self.layout.side(by), cache.layout.side(by)
        layers = self.layout.geometry.layers
        if store:
            copy = self._prepared(cache, by, other, mine, True, layers, options)
            return self._run(copy, cache.bases, self.bases, there, here, stream, cache)
        copy = self._prepared(cache, by, mine, other, False, layers, options)
        return self._run(copy, self.bases, cache.bases, here, there, stream, cache)

    def _run(
        self, copy: PreparedCopy, src: U64, dst: U64, at: IndexVector, to: IndexVector, stream: Any, cache: PagedCache
    ) -> Copy:
        done = copy(src, dst, at.count, src_index=at, dst_index=to, stream=stream, refs=(cache, self._chunk))
        if done.completion is not None:
            self._pool.borrow(done.completion)
        return done

    def _prepared(
        self, cache: PagedCache, by: str, src: Side, dst: Side, store: bool, layers: int, options: dict[str, Any]
    ) -> PreparedCopy:
        key = (cache.device, by, src, dst, tuple(sorted(options.items())))
        found = self._copies.get(key)
        if found is None:
            # A negative slot is an error here, not a token to leave out.
            src, dst = replace(src, skip_negative=False), replace(dst, skip_negative=False)
            names = ("cache_slots", "slots") if store else ("slots", "cache_slots")
            plan = copy_plan(replace(self.layout.geometry, layers=layers), src, dst, by)
            found = self._copies[key] = PreparedCopy(plan, device=cache.device, index_names=names, **options)
        return found

    def _index(
        self, cache: PagedCache, cache_slots: Any, slots: Any, store: bool
    ) -> tuple[str, IndexVector, IndexVector]:
        """How to count, and both indices: pages where that can be, else slots."""
        self._pool.require_open()
        mine, other = self.layout.geometry, cache.geometry
        for name in ("layers", "planes", "heads", "head_size", "element_size"):
            if getattr(mine, name) != getattr(other, name):
                raise LayoutError(f"the pool has {name} {getattr(mine, name)}, the cache {getattr(other, name)}")
        if cache.device is not None:
            self._pool.pin(cache.device)
        here, there = index_vector("slots", slots), index_vector("cache_slots", cache_slots)
        if here.count != there.count:
            raise BoundsError(f"slots has {here.count} values, cache_slots {there.count}: must have the same number")
        whole = self.page_size == other.block_size and here.count % self.page_size == 0
        for name, index, layout in (("slots", here, self.layout), ("cache_slots", there, cache.layout)):
            if index.host is None:
                whole = False
                continue
            check_host_index(name, index.host, replace(layout.side("slot"), skip_negative=False), 0)
            if index is (here if store else there):
                check_distinct(name, index.host, 0)
            pages = index.host.reshape(-1, self.page_size) if whole else index.host[:0]
            whole = whole and self._are_pages(pages)
        if here.host is not None:
            idle = ~self._used[here.host // self.page_size]
            if idle.any():
                at = int(np.argmax(idle))
                raise BoundsError(f"slots[{at}] is {here.host[at]}, a slot that is not allocated")
        if not whole:
            return "slot", here, there
        return "block", self._first(here), self._first(there)

    def _first(self, index: IndexVector) -> IndexVector:
        """The pages of slots that are whole pages."""
        assert index.host is not None
        pages = index.host[:: self.page_size] // self.page_size
        return IndexVector(pages, 0, len(pages))

    def _are_pages(self, rows: I64) -> bool:
        return bool(((rows[:, :1] % self.page_size == 0) & (rows == rows[:, :1] + np.arange(self.page_size))).all())

    def _pages(self, name: str, slots: I64) -> I64:
        rows = slots.reshape(-1, self.page_size) if len(slots) % self.page_size == 0 else None
        if rows is None or not self._are_pages(rows):
            raise BoundsError(f"{name} must be all slots of whole pages of {self.page_size}, in order")
        return rows[:, 0] // self.page_size

    def _host_slots(self, name: str, slots: Any) -> I64:
        index = index_vector(name, slots)
        if index.host is None:
            raise TypeError(f"{name} lie on a device; give them on the host")
        check_host_index(name, index.host, replace(self.layout.side("slot"), skip_negative=False), 0)
        return index.host

    # lifetime

    def close(self) -> None:
        """Wait for the copies that use the pool and give the memory back. Idempotent."""
        self._pool.close()

    def __enter__(self) -> HostKVPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
