"""Transfers by block ids between an engine's paged cache and memory objects."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvraw.adapters.lmcache._pageable import StandIns, pageable
from kvraw.adapters.lmcache._paged import Counts, Paged, Part, from_pointers, from_tensors, host_table, is_tensor
from kvraw.adapters.lmcache._place import current_stream, device_index, raise_seen, watch
from kvraw.adapters.lmcache._types import ArgumentError, direction_of, format_of
from kvraw.arrays import I64, IndexVector, index_vector, is_pointer, tensor_view
from kvraw.cache import PagedCache, require_host
from kvraw.errors import LayoutError, PlacementError
from kvraw.plan import Side
from kvraw.prepared import Reached
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.memory import locate_all
from kvraw.transfer_plan import TransferPlan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ids_of", "move_blocks", "multi_layer_block_kv_transfer", "object_side", "paged_of"]

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


def _is_table(value: Any) -> bool:
    return is_tensor(value) and len(value.shape) == 1


def paged_of(paged: Any, shape_desc: Any, number: int, device: int | None, objects: Any = ()) -> Paged:
    """The paged cache of a call: a tensor of addresses, a list of them, or the engine's tensors."""
    d = shape_desc
    numbers = isinstance(paged, (list, tuple, np.ndarray)) and len(paged) and is_pointer(paged[0])
    if not _is_table(paged) and not numbers:
        return from_tensors(number, paged, int(d.bs), int(d.kv_size), device)
    addresses = np.asarray(paged, np.uint64) if numbers else host_table(paged)
    element = element_size(d, objects)
    c = Counts(d.nl, 0, d.nb, d.bs, d.nh, d.hs, element, getattr(d, "block_stride_elems", 0))
    return from_pointers(number, addresses, c, int(d.kv_size), device)


def ids_of(name: str, ids: Any, device: int | None, most: int | None = None) -> IndexVector:
    """Ids as an index: what lies on another device than the cache is brought over."""
    if is_tensor(ids):
        if ids.device.type != "cpu" and device is None:
            ids = ids.cpu()
        if ids.device.type != "cpu" and str(ids.dtype) not in ("torch.int64", "torch.int32"):
            ids = ids.long()
        if not ids.is_contiguous():
            ids = ids.contiguous()
    index = index_vector(name, ids)
    if most is not None and index.count > most:
        index = index._replace(host=None if index.host is None else index.host[:most], count=most)
    return index


def object_side(part: Part, layers: int, tokens: int) -> Side:
    """The side of a row of objects, one base each, whose item i is block i of the row."""
    bs = part.layout.geometry.block_size
    return Side(
        outer=0,
        inner=bs * part.row,
        page=tokens // bs,
        layer=tokens * part.row,
        plane=layers * tokens * part.row,
        token=part.row,
        head=part.head_bytes,
        table_outer=1,
        entries=0,
    )


def reach(objects: Sequence[Any], nbytes: int, device: int | None) -> Reached:
    """Look objects up: what the device calls them, and where registrations end inside them."""
    host = np.array([o if is_pointer(o) else tensor_view(o).address for o in objects], np.uint64)
    if device is None:
        require_host("objects", host, 1)
        return Reached(host, host, False)
    with DeviceScope(device):
        found = locate_all(host, nbytes)
    if found.pageable:
        at = int(np.argmin(found.seen != 0))
        raise PlacementError(f"object {at} at {int(host[at]):#x} is pageable host memory")
    return Reached(host, found.seen, found.link, found.edges)


def _in_one(paged: Paged, to_host: bool, tokens: int) -> Callable[[Sequence[Any], IndexVector, int, int | None], Any]:
    """The transfer of a cache that one layout describes, by whichever engine is fastest."""

    def make() -> TransferPlan:
        cache = PagedCache(paged.parts[0].layout, paged.reached()[0].host, paged.device)
        return TransferPlan(cache, "store" if to_host else "load", chunk_tokens=tokens, distinct=False)

    plan = paged.ready(("blocks", to_host, tokens), make)
    return lambda objects, ids, skip, stream: plan(objects, ids, skip=skip, stream=stream)


def _in_parts(paged: Paged, to_host: bool, tokens: int) -> Callable[[Sequence[Any], IndexVector, int, int | None], Any]:
    """The transfer of a cache that takes several layouts."""
    g = paged.geometry
    copies = paged.copies("block", to_host, lambda part: object_side(part, g.layers, tokens), tokens)

    def run(objects: Sequence[Any], ids: IndexVector, skip: int, stream: int | None) -> Any:
        flat = reach(objects, g.layers * g.planes * tokens * paged.row, paged.device)
        last = None
        for copy, part, table in zip(copies, paged.parts, paged.reached(), strict=True):
            at = np.uint64(part.at)
            bases = Reached(flat.host + at, flat.seen + at, flat.link, flat.edges)
            count = max(ids.count - skip, 0)
            if to_host:
                last = copy(table, bases, count, src_index=ids, first=skip, stream=stream, refs=objects)
            else:
                last = copy(bases, table, count, dst_index=ids, first=skip, stream=stream, refs=objects)
            if paged.device is not None and ids.host is None:
                watch(paged.device, last)
        return last

    return run


def _object(at: int, value: Any, nbytes: int) -> Any:
    """An object: an address, or a tensor of the right size."""
    if is_pointer(value):
        return int(value)
    view = tensor_view(value)
    if view.nbytes != nbytes:
        raise ArgumentError(f"object {at} has {view.nbytes} bytes, must have {nbytes}")
    if not view.contiguous:
        raise LayoutError(f"object {at} has shape {view.shape}, strides {view.strides} bytes; must have no gaps")
    return view


def move_blocks(paged: Paged, objects: Sequence[Any], ids: IndexVector, to_host: bool, tokens: int, skip: int) -> None:
    """Move blocks between a paged cache and objects, on the caller's stream; pageable objects are filled on return."""
    stream = None if paged.device is None else current_stream(paged.device)
    if paged.device is not None and stream is not None:
        raise_seen(paged.device, stream)
    if ids.count <= skip or not len(objects):
        return
    g = paged.geometry
    nbytes = g.layers * g.planes * tokens * paged.row
    objects = [_object(at, o, nbytes) for at, o in enumerate(objects)]
    run = (_in_one if paged.whole else _in_parts)(paged, to_host, tokens)
    try:
        done = run(objects, ids, skip, stream)
    except PlacementError:
        if paged.device is None:
            raise
        where = [(o, nbytes) if is_pointer(o) else (o.address, nbytes) for o in objects]
        with DeviceScope(paged.device):
            bad = [at for at, (a, n) in enumerate(where) if pageable(a, n)]
        if not bad:
            raise
        # Rows that are left out keep what they hold, so the buffers hold it as well.
        partial = skip > 0 or ids.count < len(objects) * (tokens // g.block_size)
        stand_ins = StandIns([where[at] for at in bad], paged.device, fill=partial or not to_host)
        for at, view in zip(bad, stand_ins.views(), strict=True):
            objects[at] = view
        done = run(objects, ids, skip, stream)
        if to_host:
            done.wait()
            stand_ins.copy_back()
    if paged.device is not None and ids.host is None and paged.whole:
        watch(paged.device, done)


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
    to_host, number = direction_of(direction), format_of(engine_kv_format)
    tokens, bs = int(lmcache_chunk_size), int(shape_desc.bs)
    if tokens <= 0 or bs <= 0 or tokens % bs:
        raise ArgumentError(f"lmcache_chunk_size is {tokens}, must be a positive multiple of the block size {bs}")
    if isinstance(lmcache_objects_ptrs, (str, bytes)) or is_tensor(lmcache_objects_ptrs):
        raise TypeError("lmcache_objects_ptrs must be a list of addresses or tensors")
    where = device_index(device)
    paged = paged_of(paged_buffer_ptrs_tensor, shape_desc, number, where, lmcache_objects_ptrs)
    ids = ids_of("block_ids", block_ids, where, len(lmcache_objects_ptrs) * (tokens // bs))
    move_blocks(paged, lmcache_objects_ptrs, ids, to_host, tokens, max(int(skip_prefix_n_blocks), 0))


def host_ids(address: int, count: int) -> I64:
    """A vector of int64 ids in host memory."""
    if not count:
        return np.zeros(0, np.int64)
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address)).view(np.int64)
