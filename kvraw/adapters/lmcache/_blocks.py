"""Transfers by block ids between an engine's paged cache and memory objects."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvraw import config
from kvraw.adapters.deferred_errors import pending, pending_of, raise_deferred
from kvraw.adapters.lmcache._ids import ids_of, ids_on
from kvraw.adapters.lmcache._launch import Copies
from kvraw.adapters.lmcache._memo import cached_by_tensors
from kvraw.adapters.lmcache._objects import object_side, reach
from kvraw.adapters.lmcache._paged import (
    Counts,
    Paged,
    addresses_of,
    from_pointers,
    from_tensors,
    is_tensor,
)
from kvraw.adapters.lmcache._place import current_stream, device_index
from kvraw.adapters.lmcache._types import ArgumentError, way_of
from kvraw.addresses import FIRST, TOP
from kvraw.arrays import IndexVector, is_pointer, tensor_view
from kvraw.cache import PagedCache
from kvraw.copying.addresses import remembered
from kvraw.copying.bounce import BounceBuffers, pageable, require_no_capture
from kvraw.copying.device_state import DeviceState, device_state
from kvraw.copying.repeat import RepeatedCalls
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.layouts.formats import FORMATS
from kvraw.memo import Memo
from kvraw.plain import odd, unusable
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.transfer_plan import Direction, TransferPlan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["blocks_of", "multi_layer_block_kv_transfer", "paged_of"]

_HALF_KNOWN = 2  # bytes of an element, where nothing tells


def element_size(shape_desc: Any, *tensors: Any) -> int:
    """Bytes of an element: as the descriptor says, else its type, else the tensors."""
    if shape_desc.element_size > 0:
        return int(shape_desc.element_size)
    dtype = getattr(shape_desc, "dtype", None)
    if dtype is not None:
        return int(dtype.itemsize)
    for tensor in tensors:
        while isinstance(tensor, (list, tuple)) and tensor:
            tensor = tensor[0]
        if is_tensor(tensor):
            return int(tensor.element_size())
    return _HALF_KNOWN


def _check_described(paged: Paged, d: Any, number: int, element: int) -> None:
    """Check that a descriptor counts layers, tokens and bytes as the tensors do: objects are as large as it says.

    What it leaves 0 it does not count; how many blocks there are only the tensors tell.
    """
    form, g, row, said = FORMATS[number], paged.geometry, paged.row, int(d.nh) * int(d.hs) * element
    fits = [row]
    if "K" in form.pointers:  # hs may be the width of one plane or of all
        fits += [n * k for n in (row, *(p.head_bytes for p in paged.parts)) for k in (1, max(int(d.nh), 1))]
    elif form.mla:  # nh may count the heads of queries
        fits.append(row * int(d.nh))
    elif form.paired:  # hs is one half of a head in some versions, both in others
        fits += [2 * row, row * g.planes // max(int(d.kv_size), 1)]
    for name, given, found, allowed in (
        ("nl", int(d.nl), g.layers, [g.layers]),
        ("bs", int(d.bs), g.block_size, [g.block_size]),
        ("nh * hs * element_size", said, row, fits),
    ):
        if given > 0 and given not in allowed:
            raise ArgumentError(f"shape_desc.{name} is {given}, the tensors have {found}")


def paged_of(paged: Any, shape_desc: Any, number: int, device: int | None, objects: Any = ()) -> Paged:
    """The paged cache of a call: a tensor of addresses, a list of them, or the engine's tensors."""
    d = shape_desc
    addresses = addresses_of("paged_buffer_ptrs", paged)
    if addresses is None:
        found = from_tensors(number, paged, int(d.bs), int(d.kv_size), device, int(d.nh) * int(d.hs))
        _check_described(found, d, number, element_size(d, paged))
        return found
    element = element_size(d, objects)
    c = Counts(d.nl, 0, d.nb, d.bs, d.nh, d.hs, element, getattr(d, "block_stride_elems", 0))
    return from_pointers(number, addresses, c, int(d.kv_size), device)


_INTEGERS = {int}


class Blocks:
    """What all transfers of one cache share that go one way, with objects of one size.

    Attributes
    ----------
    per_object, nbytes : int
        Blocks and bytes of an object.
    """

    def __init__(self, paged: Paged, to_host: bool, tokens: int) -> None:
        g = paged.geometry
        self.paged, self.to_host, self._tokens = paged, to_host, tokens
        self.per_object, self.nbytes = tokens // g.block_size, g.layers * g.planes * tokens * paged.row
        self._open = config.ENGINE.get() in ("auto", "kernel")
        self._plan: TransferPlan | None = None
        self._repeated: RepeatedCalls | None = None
        self._by_kernel: Memo[tuple[int, int, int], bool] = Memo(64)  # ids, objects, skip: by ids on the device
        self._state: DeviceState | None = None
        if paged.whole:
            cache = PagedCache(paged.parts[0].layout, paged.reached()[0].host, paged.device)
            way: Direction = "store" if to_host else "load"
            self._plan = TransferPlan(cache, way, chunk_tokens=tokens, distinct=False)
            self._repeated = self._plan.repeated

    @cached_property
    def _copies(self) -> Copies:
        layers, tokens = self.paged.geometry.layers, self._tokens
        return self.paged.copies("block", self.to_host, lambda part: object_side(part, layers, tokens), tokens)

    def _places(self, objects: Sequence[Any]) -> list[int]:
        """Addresses of objects."""
        places, nbytes = [], self.nbytes
        for at, one in enumerate(objects):
            if type(one) is int:
                places.append(one)
                continue
            try:
                size, dense, address = one.numel() * one.element_size(), one.is_contiguous(), one.data_ptr()
                if not address or odd(one):
                    raise unusable(f"lmcache_objects_ptrs[{at}]", one)
            except (RuntimeError, NotImplementedError) as error:  # one without memory
                raise unusable(f"lmcache_objects_ptrs[{at}]", one, error) from None
            except AttributeError:
                if is_pointer(one):
                    places.append(int(one))
                    continue
                view = tensor_view(one, f"lmcache_objects_ptrs[{at}]")
                size, dense, address = view.nbytes, view.contiguous, view.address
            if size != nbytes:
                raise ArgumentError(f"object {at} has {size} bytes, must have {nbytes}")
            if not dense:
                raise LayoutError(f"object {at} of shape {tuple(one.shape)} must have no gaps")
            places.append(address)
        return places

    def _require_addresses(self, places: list[int]) -> None:
        for at, address in enumerate(places):
            if not FIRST <= address <= TOP - self.nbytes:
                raise ArgumentError(
                    f"lmcache_objects_ptrs[{at}] is {address}, must be the address of {self.nbytes} bytes"
                ) from None

    def _copy(
        self,
        places: list[int],
        ids: IndexVector,
        skip: int,
        stream: int | None,
        captured: bool,
        waited: bool = False,
    ) -> Any:
        device = self.paged.device
        if self._plan is None:
            self._require_addresses(places)
            row = reach(places, self.nbytes, device)
            return self._copies.run(row, ids, skip, ids.count - skip, stream, waited=waited)
        unseen = device is not None and ids.host is None and not waited
        done = self._plan(places, ids, skip=skip, stream=stream, on_error=pending_of(device) if unseen else None)
        if ids.host is None and not captured and done.engine == "kernel":
            self._by_kernel.keep((ids.count, len(places), skip), True)
        return done

    def _repeat(self, objects: Sequence[Any], ids: Any, skip: int, device: int, stream: int) -> bool:
        """Move as an earlier call did, objects in memory that was asked about; False: all must be looked at."""
        d, state = driver(), self._state
        if state is None or state.was_reset or state.owner is not d:
            self._state = device_state(device) if d.context_device() == device else None
            return False
        if not len(objects):
            return False
        places = objects if set(map(type, objects)) == _INTEGERS else self._places(objects)
        kept, there = remembered(state.memory, places, self.nbytes), None if type(ids) is list else ids_on(ids, device)
        if kept is None or kept.table.devices - {device}:
            return False
        table, used, most = kept.table, kept.used, len(places) * self.per_object
        if there is not None and (not table.link or (min(there[2], most), len(places), skip) in self._by_kernel):
            # By one launch, which asks about one allocation itself.
            count, memory = min(there[2], most) - skip, (used[0].start, used[0].number)
            known: dict[str, Any] = {"link": table.link, "memory": memory, "refs": (ids, objects)}
            holds = count > 0 and (len(used) == 1 or kept.holds(d))
            if holds and self._copies.repeat(stream, table.seen, table.alignment, there, skip, count, **known):
                return True
        repeated = self._repeated
        if repeated is None or pending(state) or not kept.holds(d):
            return False
        if there is None:
            index, on_error = ids_of("block_ids", ids, device, most), None
            if index.host is None:
                return False
        else:
            address, width, count = there
            index, on_error = IndexVector(None, address, min(count, most), width, device, ids), pending_of(device)
        if index.count <= skip:
            return False
        engine = repeated.enqueue(state, table, index, skip, stream, on_error, (self._plan, objects))
        if engine == "kernel" and there is not None:
            self._by_kernel.keep((index.count, len(places), skip), True)
        return engine is not None

    def move(self, objects: Sequence[Any], block_ids: Any, skip: int) -> None:
        """Move blocks on the caller's stream; pageable objects are filled on return."""
        device, stream = self.paged.device, None
        if device is not None:
            stream = current_stream(device)
            if self._open and self._repeat(objects, block_ids, skip, device, stream):
                return
        ids = ids_of("block_ids", block_ids, device, len(objects) * self.per_object, objects)
        captured = device is not None and stream is not None and raise_deferred(device, stream)
        if ids.count <= skip or not len(objects):
            return
        places = self._places(objects)
        try:
            self._copy(places, ids, skip, stream, captured)
        except (BoundsError, OverflowError, PlacementError) as error:
            self._require_addresses(places)
            if device is None or not isinstance(error, PlacementError):
                raise
            with DeviceScope(device):
                bad = [at for at, address in enumerate(places) if pageable(address, self.nbytes)]
            if not bad:
                raise
            require_no_capture(captured)
            self._by_way_of_pinned(places, bad, ids, skip, stream)

    def _by_way_of_pinned(
        self, places: list[int], bad: list[int], ids: IndexVector, skip: int, stream: int | None
    ) -> None:
        assert self.paged.device is not None
        # Rows that are left out keep what they hold, so the buffers hold it as well; bad ids on the device are.
        partial = skip > 0 or ids.count < len(places) * self.per_object or ids.host is None
        buffers = BounceBuffers(
            [(places[at], self.nbytes) for at in bad], self.paged.device, fill=partial or not self.to_host
        )
        places = list(places)
        for at, address in zip(bad, buffers.addresses, strict=True):
            places[at] = address
        done = self._copy(places, ids._replace(owner=(ids.owner, buffers)), skip, stream, False, self.to_host)
        if self.to_host:
            try:
                done.wait()
            finally:
                buffers.copy_back()


def blocks_of(paged: Paged, to_host: bool, tokens: int) -> Blocks:
    """The transfers of a cache that go one way, with objects of this many tokens."""
    return paged.ready(("blocks", to_host, tokens), lambda: Blocks(paged, to_host, tokens))


def multi_layer_block_kv_transfer(
    paged_buffer_ptrs_tensor: Tensor | list[Tensor] | list[list[Tensor]],
    lmcache_objects_ptrs: list[int] | list[Tensor],
    block_ids: Tensor | list[int],
    device: Any,
    direction: Any,
    shape_desc: Any,
    lmcache_chunk_size: int,
    engine_kv_format: Any,
    skip_prefix_n_blocks: int,
) -> None:
    """Move blocks of all layers between a paged cache and memory objects, on the current stream of `device`.

    Parameters
    ----------
    paged_buffer_ptrs_tensor
        Base addresses in the format's order (a 1-D int64 tensor, on the device or not), or the engine's tensors.
    lmcache_objects_ptrs
        Any number of objects: addresses or tensors, on the device, pinned or pageable. A pageable object is filled
        when the call returns; it costs a copy more.
    block_ids
        Block ids, on the host or the device; entry i belongs to block i of the row of objects. Those beyond the last
        object are ignored.
    skip_prefix_n_blocks
        Leading entries to leave out.

    Raises
    ------
    BoundsError
        A block id out of bounds; where the ids lie on the device, the next call on it raises this instead.
    ArgumentError, LayoutError, PlacementError
        What was passed does not fit together.
    """
    to_host, number = way_of(direction, engine_kv_format)
    where, d, tokens = device_index(device), shape_desc, int(lmcache_chunk_size)
    if not hasattr(d, "element_size"):
        raise TypeError(f"shape_desc is a {type(d).__name__}, must be a PageBufferShapeDesc")
    if isinstance(lmcache_objects_ptrs, (str, bytes)) or hasattr(lmcache_objects_ptrs, "data_ptr"):
        raise TypeError("lmcache_objects_ptrs must be a list of addresses or tensors")

    def make() -> Blocks:
        bs = int(d.bs)
        if tokens <= 0 or bs <= 0 or tokens % bs:
            raise ArgumentError(f"lmcache_chunk_size is {tokens}, must be a positive multiple of the block size {bs}")
        return blocks_of(paged_of(paged_buffer_ptrs_tensor, d, number, where, lmcache_objects_ptrs), to_host, tokens)

    if d.element_size > 0:
        counts = d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size, getattr(d, "block_stride_elems", 0)
        blocks = cached_by_tensors(paged_buffer_ptrs_tensor, ("blocks", to_host, number, where, tokens, counts), make)
    else:
        blocks = make()
    blocks.move(lmcache_objects_ptrs, block_ids, max(int(skip_prefix_n_blocks), 0))
