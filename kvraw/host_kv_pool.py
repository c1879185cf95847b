"""A pool of KV pages in host memory: slots to allocate and free, and copies to and from a paged cache."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvraw.arrays import I64, IndexVector, index_vector
from kvraw.cache import PagedCache
from kvraw.checks import NotPicklable, integer
from kvraw.copying.addresses import AddressTable
from kvraw.copying.device_state import device_state
from kvraw.copying.operands import check_distinct, check_host_index
from kvraw.copying.plan import Side
from kvraw.copying.transfer import Transfer
from kvraw.errors import BoundsError, LayoutError
from kvraw.layouts.geometry import CacheLayout, Geometry, copy_plan, find_format
from kvraw.memo import Memo
from kvraw.pages import Pages
from kvraw.prepared import PreparedCopy
from kvraw.runtime import fork
from kvraw.runtime.closeable import Closing
from kvraw.runtime.completion import Completion
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.host.pool import HostPool
from kvraw.runtime.host.usage import HostWork, Use
from kvraw.runtime.stream import stream_handle

__all__ = ["HostKVPool"]

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def _check_slots(name: str, slots: I64, tokens: int) -> None:
    if len(slots) and int(np.maximum.reduce(slots.view(np.uint64))) >= tokens:  # as unsigned: negative ones too
        check_host_index(name, slots, Side(outer=0, limit=tokens), 0)


class _Part(NamedTuple):
    """A copy of some layers, with the bases of its source and destination."""

    copy: PreparedCopy
    src: AddressTable
    dst: AddressTable
    layers: int


class _Partner(NamedTuple):
    """What is known of a cache that fits: bases of the pool and of the cache, and copies that were made for them."""

    here: AddressTable
    there: AddressTable
    copies: Memo[tuple[object, ...], list[_Part]]


# Bytes of a launch of a load by layers. One of a single layer of few bytes is over sooner than the next one is there:
# layers of 1 MiB loaded at 14 GB/s one by one, beside a decode (benchmarks/README.md).
_LAYERS_BYTES = 4 << 20
_MOST = 64  # kinds of copies that are kept for a cache: rates may come in any number


def _some_layers(side: Side, bases: AddressTable, first: int, count: int, planes: int) -> tuple[Side, AddressTable]:
    """Some layers of a side: the side, which is the same for as many of any others, and their bases."""
    across = np.arange(planes if side.table_plane else 1) * side.table_plane
    down = (first + np.arange(count if side.table_layer else 1)) * side.table_layer
    entries = (down[:, None] + across).ravel()
    tables = len(across) * (side.table_layer != 0), int(side.table_plane != 0)
    some = replace(side, table_layer=tables[0], table_plane=tables[1], entries=len(entries))
    shift = np.uint64(first * side.layer)
    return some, AddressTable(bases.host[entries] + shift, bases.seen[entries] + shift, bases.link)


def _sides(layout: CacheLayout) -> dict[str, Side]:
    """By block and by slot; a negative slot is an error here, not a token to leave out."""
    return {by: replace(layout.side(by), skip_negative=False) for by in ("block", "slot")}


class HostKVPool(Closing, NotPicklable):
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

    Raises
    ------
    LayoutError
        There is no such layout, or not for these planes and heads.
    BoundsError
        `tokens` or `page_size` is not positive, or they do not fit.
    HostMemoryError
        There is not as much memory.

    Examples
    --------
    >>> layers = [np.zeros((2, 64, 16, 4, 64), np.float16) for _ in range(2)]
    >>> cache = kvraw.PagedCache.from_tensors(layers, axes="PBTHD")
    >>> with kvraw.HostKVPool.like(cache, tokens=512, layout="page_first") as host:
    ...     slots = host.alloc(32)
    ...     host.backup(cache, np.arange(64, 96), slots).wait()  # on a GPU: stream=...
    ...     host.load(cache, slots, np.arange(32)).wait()
    ...     host.free(slots)
    ...     host.available
    512
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
        page_size, tokens = integer("page_size", page_size), integer("tokens", tokens)
        if page_size <= 0:
            raise BoundsError(f"page_size is {page_size}, must be positive")
        if tokens <= 0 or tokens % page_size:
            raise BoundsError(f"tokens is {tokens}, must be a positive multiple of page_size, {page_size}")
        if planes == 1 and layout == "page_head":
            raise LayoutError("layout is 'page_head' with planes 1, must be another: it takes K and V apart")
        if planes == 1 and heads != 1:
            raise LayoutError(f"heads is {heads} with planes 1, must be 1; of a fused cache make K and V two planes")
        geometry = Geometry(layers, tokens // page_size, page_size, heads, head_size, element_size, planes)
        self.layout = CacheLayout(find_format(layout if planes == 2 else f"{layout}_mla"), geometry)
        each = self._plane_bytes = -(-self.layout.tensor_bytes() // 256) * 256  # aligned, for the widest accesses
        self._pool = HostPool(each * planes, device=device)
        (self._chunk,) = self._pool.chunks(1, each * planes)
        self.bases = np.array([self._chunk.address + k * each for k in range(planes)], np.uint64)
        self.page_size, self.tokens = page_size, tokens
        self._lock = fork.lock()
        self._mine = _sides(self.layout)
        self._book = Pages(geometry.blocks)
        self._steps = np.arange(page_size)
        self._partners: weakref.WeakKeyDictionary[PagedCache, _Partner] = weakref.WeakKeyDictionary()

    @classmethod
    def like(
        cls, cache: PagedCache, tokens: int, *, layout: str, page_size: int | None = None, device: int | None = None
    ) -> HostKVPool:
        """A pool for the tokens of a cache.

        Parameters
        ----------
        cache : PagedCache
            Whose layers, heads and sizes it takes.
        tokens, layout, page_size, device
            As of the constructor; by default pages are the cache's blocks, and the device is the cache's.

        Returns
        -------
        HostKVPool
            The pool.
        """
        g = cache.geometry
        return cls(
            layout=layout,
            tokens=tokens,
            page_size=g.block_size if page_size is None else page_size,
            layers=g.layers,
            heads=g.heads,
            head_size=g.head_size,
            element_size=g.element_size,
            planes=g.planes,
            device=cache.device if device is None else device,
        )

    @property
    def available(self) -> int:
        """Slots that are free."""
        with self._lock:
            self._pool.require_open()
            return self._book.available * self.page_size

    def alloc(self, tokens: int) -> I64 | None:
        """Allocate slots of whole pages.

        Parameters
        ----------
        tokens : int
            How many slots; a multiple of the page size.

        Returns
        -------
        numpy.ndarray of int64, or None
            The slots; None where too few are free.

        Raises
        ------
        BoundsError
            `tokens` is negative, or no multiple.
        """
        tokens = integer("tokens", tokens)
        if tokens < 0 or tokens % self.page_size:
            raise BoundsError(f"tokens is {tokens}, must be a multiple of the page size, {self.page_size}")
        count = tokens // self.page_size
        number = self._book.number()
        try:
            # One line, here and below: an interrupt at the end of the block would come before its lock is free.
            with self._lock: pages = self._take(count, number)  # fmt: skip # noqa: E701
            return None if pages is None else (pages[:, None] * self.page_size + self._steps).ravel()
        except BaseException:
            with self._lock: self._book.revoke(number)  # fmt: skip # noqa: E701
            raise

    def _take(self, count: int, number: int) -> I64 | None:
        self._pool.require_open()
        return self._book.take(count, number)

    def free(self, slots: Any) -> None:
        """Give the slots of whole pages back, once no copy uses them any more.

        Parameters
        ----------
        slots : sequence of int
            As `alloc` returned them, or whole pages out of that.

        Raises
        ------
        BoundsError
            They are not whole pages of this pool.
        ValueError
            A page is not allocated (freed twice?), or stands twice; nothing is given back.
        """
        pages = self._pages(slots)
        with self._lock: self._give(pages)  # fmt: skip # noqa: E701

    def _give(self, pages: I64) -> None:
        self._pool.require_open()
        page = self._book.first_unfit(pages)
        if page is not None:
            raise ValueError(f"the page of slot {page * self.page_size} is not allocated (freed twice?)")
        self._book.give(pages)

    def numpy(self, plane: int = 0) -> np.ndarray:
        """A plane's bytes, shaped as its layout says.

        Parameters
        ----------
        plane : int
            K or V; 0 where they are one.

        Returns
        -------
        numpy.ndarray of uint8
            A view; the last axis counts bytes.

        Raises
        ------
        BoundsError
            There is no such plane.
        """
        g = self.layout.geometry
        if not 0 <= integer("plane", plane) < g.planes:
            raise BoundsError(f"plane is {plane}, must be in [0, {g.planes})")
        sizes = g.axis_sizes(g.block_size) | {"D": g.head_size * g.element_size}
        begin = plane * self._plane_bytes
        held = self._chunk.numpy()[begin : begin + self.layout.tensor_bytes()]
        return held.reshape([sizes[a] for a in self.layout.axes])

    def backup(
        self, cache: PagedCache, cache_slots: Any, slots: Any, *, stream: Any = None, **options: Any
    ) -> Transfer:
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
            `engine`, `ctas`, `neighbour`, `max_rate` and `check`, as of `PreparedCopy`.

        Returns
        -------
        Transfer
            To wait for.

        Raises
        ------
        BoundsError
            A slot out of bounds, not allocated here, or twice in the destination; nothing is moved.
        LayoutError
            The cache is of another geometry.
        """
        return self._all(cache, cache_slots, slots, True, stream, options)

    def load(self, cache: PagedCache, slots: Any, cache_slots: Any, *, stream: Any = None, **options: Any) -> Transfer:
        """Copy slots of this pool to slots of a cache, all layers.

        Parameters
        ----------
        cache, slots, cache_slots, stream, options
            As of `backup`.

        Returns
        -------
        Transfer
            To wait for.

        Raises
        ------
        BoundsError, LayoutError
            As of `backup`.
        PlacementError
            The cache is read-only.
        """
        return self._all(cache, cache_slots, slots, False, stream, options)

    def load_layers(
        self, cache: PagedCache, slots: Any, cache_slots: Any, *, stream: Any = None, **options: Any
    ) -> Transfer:
        """Load layer by layer, on a stream of kvraw's own behind what `stream` was given; see `backup`.

        `stream` itself goes on: what reads a layer there calls `Transfer.wait_on` first.

        Parameters
        ----------
        cache, slots, cache_slots, stream, options
            As of `backup`.

        Returns
        -------
        Transfer
            To wait for, layer by layer.

        Raises
        ------
        BoundsError, LayoutError
            As of `backup`.
        PlacementError
            The cache is read-only.
        """
        with self._call() as call:
            partner, by, here, there = self._index(cache, cache_slots, slots, False)
            g = self.layout.geometry
            if cache.device is None:
                (part,) = self._prepared(partner, cache, by, "load", options)
                return part.copy(part.src, part.dst, here.count, src_index=here, dst_index=there)
            nbytes = here.count * (g.token_bytes // g.layers) * (1 if by == "slot" else g.block_size)
            step = min(g.layers, 1 << (-(-_LAYERS_BYTES // max(nbytes, 1)) - 1).bit_length())
            parts = self._prepared(partner, cache, by, "load", options, step)
            return self._load_layers(call, parts, here, there, cache, stream_handle(stream, cache.device))

    def _load_layers(
        self,
        use: Use,
        parts: list[_Part],
        here: IndexVector,
        there: IndexVector,
        cache: PagedCache,
        stream: int,
    ) -> Transfer:
        device = cache.device
        assert device is not None
        if not here.count:
            return Transfer(device=device)
        completions: list[Completion] = []
        with DeviceScope(device):
            state, own = device_state(device), stream
            capturing = driver().stream_capturing(stream)
            calls = [p.copy.call(p.src, p.dst, here.count, src_index=here, dst_index=there) for p in parts]
            if not capturing:
                own = state.side_stream("layers").handle
                event = state.completions.take_event()
                driver().event_record(event, stream)
                driver().stream_wait_event(own, event)
                state.completions.give_event(event)
            try:
                for part, call in zip(parts, calls, strict=True):
                    call.capturing = capturing
                    completion, engine = part.copy.bound.submit(state, own, call, (cache, self._chunk, call))
                    completions += [completion] * part.layers
            finally:
                if completions:
                    self._pool.mark_used(completions[-1], use)  # those before it are over when it is
        return Transfer(tuple(completions), engine, device)

    def _all(
        self, cache: PagedCache, cache_slots: Any, slots: Any, store: bool, stream: Any, options: dict[str, Any]
    ) -> Transfer:
        with self._call() as call:
            partner, by, here, there = self._index(cache, cache_slots, slots, store)
            ((copy, src, dst, _),) = self._prepared(partner, cache, by, "store" if store else "load", options)
            at, to = (there, here) if store else (here, there)
            refs = (cache, self._chunk)
            done = copy(src, dst, at.count, src_index=at, dst_index=to, stream=stream, refs=refs)
            if done.completion is not None:
                self._pool.mark_used(done.completion, call)
            return done

    def _prepared(
        self, partner: _Partner, cache: PagedCache, by: str, kind: str, options: dict[str, Any], step: int = 0
    ) -> list[_Part]:
        """Copies of the kind "store" or "load", each of `step` layers; 0: one of all."""
        key = (by, kind, step, tuple(sorted(options.items())))
        found = partner.copies.get(key)
        if found is None:
            if kind != "store":
                cache.require_writable()
            g, mine, other = self.layout.geometry, self._mine[by], _sides(cache.layout)[by]
            both = ((mine, partner.here), (other, partner.there))
            names = ("slots", "cache_slots")
            if kind == "store":
                both, names = both[::-1], names[::-1]
            copies: dict[int, PreparedCopy] = {}
            found = []
            for first in range(0, g.layers, step or g.layers):
                layers = min(step or g.layers, g.layers - first)
                src, dst = (_some_layers(*end, first, layers, g.planes) if step else end for end in both)
                if layers not in copies:
                    plan = copy_plan(replace(g, layers=layers), src[0], dst[0], by)
                    copies[layers] = PreparedCopy(plan, device=cache.device, index_names=names, **options)
                found.append(_Part(copies[layers], src[1], dst[1], layers))
            partner.copies.keep(key, found)
        return found

    def _partner(self, cache: PagedCache) -> _Partner:
        cache.require_context()
        found = self._partners.get(cache)
        if found is None:
            mine, other = self.layout.geometry, cache.geometry
            for name in ("layers", "planes", "heads", "head_size", "element_size"):
                if getattr(mine, name) != getattr(other, name):
                    raise LayoutError(f"the pool has {name} {getattr(mine, name)}, the cache {getattr(other, name)}")
            shift = 0
            if cache.device is not None:
                self._pool.pin(cache.device)
                shift = self._pool.device_shift
            here = AddressTable(self.bases, self.bases + np.uint64(shift % 2**64), cache.device is not None)
            found = self._partners[cache] = _Partner(here, AddressTable(cache.bases, cache.bases, False), Memo(_MOST))
        return found

    def _index(
        self, cache: PagedCache, cache_slots: Any, slots: Any, store: bool
    ) -> tuple[_Partner, str, IndexVector, IndexVector]:
        """What is known of the cache, how to count, and both indices: pages where that can be, else slots."""
        partner = self._partner(cache)
        here, there = index_vector("slots", slots), index_vector("cache_slots", cache_slots)
        if here.count != there.count:
            raise BoundsError(f"slots has {here.count} values, cache_slots {there.count}: must have the same number")
        size = cache.geometry.block_size
        whole = self.page_size == size and here.count % size == 0
        for name, index, tokens, written in (
            ("slots", here, self.tokens, store),
            ("cache_slots", there, cache.geometry.blocks * size, not store),
        ):
            if index.host is None:
                whole = False
                continue
            _check_slots(name, index.host, tokens)
            whole = whole and self._are_pages(index.host.reshape(-1, size))
            if written:  # whole pages: distinct where their first slots are
                check_distinct(name, index.host[::size] if whole else index.host, 0)
        if here.host is not None and not (used := self._book.taken[here.host // self.page_size]).all():
            at = int(np.argmin(used))
            raise BoundsError(f"slots[{at}] is {here.host[at]}, a slot that is not allocated")
        if not whole:
            return partner, "slot", here, there
        pages = [i.host[::size] // size for i in (here, there) if i.host is not None]
        here, there = (IndexVector(p, 0, len(p)) for p in pages)
        return partner, "block", here, there

    def _are_pages(self, rows: I64) -> bool:
        return bool(((rows[:, :1] % self.page_size == 0) & (rows == rows[:, :1] + self._steps)).all())

    def _pages(self, slots: Any) -> I64:
        """The pages of slots that must be on the host, and whole pages in order."""
        index = index_vector("slots", slots).host
        if index is None:
            raise TypeError("slots lie on a device; give them on the host")
        _check_slots("slots", index, self.tokens)
        rows = index.reshape(-1, self.page_size) if len(index) % self.page_size == 0 else None
        if rows is None or not self._are_pages(rows):
            raise BoundsError(f"slots must be all slots of whole pages of {self.page_size}, in order")
        return rows[:, 0] // self.page_size

    @contextmanager
    def _call(self) -> Iterator[Use]:
        """Note a call before it enqueues anything: `close` waits for it, and then for the copies that it noted."""
        work = HostWork()
        try:
            self._pool.mark_used(work.use)
            yield work.use
        finally:
            work.ended = True

    def close(self, timeout: float | None = 60.0) -> None:
        """Wait for the calls and copies that use the pool and give the memory back. Idempotent.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait, with the GIL released; None: for ever.

        Raises
        ------
        TransferTimeoutError
            Some are still under way. New ones are refused, the memory stays, and `close` can be called again.
        """
        self._pool.close(timeout)

    def __enter__(self) -> HostKVPool:
        self._pool.require_open()
        return self
