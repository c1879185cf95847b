"""Transfers of single tokens, by slot mapping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvraw.adapters.lmcache._blocks import ids_of
from kvraw.adapters.lmcache._pageable import StandIns
from kvraw.adapters.lmcache._paged import INDEXER, Counts, Paged, Part, from_pointers, from_tensors, host_table
from kvraw.adapters.lmcache._place import current_stream, device_index, raise_seen, tensor_device, watch
from kvraw.adapters.lmcache._types import ArgumentError, direction_of, format_of, is_mla
from kvraw.arrays import U64, pointer_vector
from kvraw.errors import BoundsError
from kvraw.formats import FORMATS
from kvraw.plan import Side
from kvraw.prepared import Reached
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.memory import Where, locate

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "load_and_reshape_flash",
    "multi_layer_kv_transfer",
    "multi_layer_kv_transfer_unilateral",
    "reshape_and_cache_back_flash",
    "single_layer_kv_transfer",
    "single_layer_kv_transfer_sgl",
]

_KV_LIST = 9
# Where a slot's number times a token's bytes is its place in a tensor: block sizes do not matter.
_TOKEN_ROWS = (1, 3, 4, 5, 9, 11, 13, 16, 18)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tokens outside the paged cache: where they begin, how many, and byte strides of planes, layers and tokens."""

    tensor: Any
    count: int
    plane: int
    layer: int
    token: int

    @classmethod
    def of(cls, tensor: Any, row: int, *, token: int, plane: int | None = None, layer: int | None = None) -> _Rows:
        """Rows of a tensor whose axes are named by position; the last one is a row of `row` bytes."""
        unit, strides = tensor.element_size(), tensor.stride()
        if tensor.shape[-1] * unit != row or (strides[-1] != 1 and tensor.shape[-1] > 1):
            raise ArgumentError(
                f"a token of shape {tuple(tensor.shape)}, strides {strides} has {tensor.shape[-1] * unit} bytes, must "
                f"have {row}, dense"
            )
        step = [0 if axis is None else int(strides[axis]) * unit for axis in (plane, layer, token)]
        return cls(tensor, int(tensor.shape[token]), *step)


def _move(paged: Paged, rows: _Rows, slots: Any, to_host: bool, skip: int = 0) -> None:
    """Move a token per slot between a paged cache and rows, on the caller's stream; a negative slot moves nothing."""
    g, device = paged.geometry, paged.device
    stream = None if device is None else current_stream(device)
    if device is not None and stream is not None:
        raise_seen(device, stream)
    ids = ids_of("slot_mapping", slots, device)
    if ids.count < rows.count:
        raise BoundsError(f"slot_mapping has {ids.count} slots for {rows.count} tokens")
    skip = max(skip, 0)
    if rows.count <= skip:
        return

    def flat(part: Part) -> Side:
        entries = g.planes * g.layers
        return Side(rows.token, table_layer=1, table_plane=g.layers, head=part.head_bytes, entries=entries)

    copies = paged.copies("slot", to_host, flat, rows.token)
    steps = np.arange(g.planes)[:, None] * rows.plane + np.arange(g.layers) * rows.layer
    span = int(steps[-1, -1]) + (rows.count - 1) * rows.token + paged.row
    address, refs, where = int(rows.tensor.data_ptr()), rows.tensor, Where(None, 0)
    shift = 0
    stand_ins = None
    if device is not None:
        with DeviceScope(device):
            where = locate(address, span)
            if not where.device_address:
                stand_ins = StandIns([(address, span)], device, fill=True)
                refs, address = stand_ins.views(), stand_ins.addresses[0]
                where = locate(address, span)
        shift = where.device_address - address
    offsets = steps.ravel().astype(np.uint64)
    for copy, part, table in zip(copies, paged.parts, paged.reached(), strict=True):
        host = offsets + np.uint64(address + part.at)
        seen = host + np.uint64(shift % 2**64) if shift else host
        side = Reached(host, seen, where.device is None, where.edges)
        count = rows.count - skip
        if to_host:
            done = copy(table, side, count, src_index=ids, first=skip, stream=stream, refs=refs)
        else:
            done = copy(side, table, count, dst_index=ids, first=skip, stream=stream, refs=refs)
        if device is not None and ids.host is None:
            watch(device, done)
    if stand_ins is not None and to_host:
        done.wait()
        stand_ins.copy_back()


def _addresses(ptrs: Any) -> U64 | None:
    """Addresses of a table or of dense tensors; None where the tensors have strides of their own."""
    if not isinstance(ptrs, (list, tuple)):
        return host_table(ptrs) if len(ptrs.shape) == 1 else _addresses([ptrs])
    flat = [t for entry in ptrs for t in (entry if isinstance(entry, (list, tuple)) else [entry])]
    if not all(t.is_contiguous() for t in flat):
        return None
    return pointer_vector("key_value_ptrs", [t.data_ptr() for t in flat])


def _counts(number: int, key_value: Any, page_buffer_size: int, block_size: int, head_size: int, stride: int) -> Counts:
    """Counts of a call by slots: blocks and heads only where they matter."""
    _, layers, _, hidden = key_value.shape
    fused, halves = key_value.shape[0] == 1 and number in (10, 12), key_value.shape[0] == 2 and number in (10, 11)
    if number in _TOKEN_ROWS and not stride:
        block_size = 1
    elif block_size <= 0:
        raise ArgumentError(f"block_size is {block_size}, must be positive for format {number}")
    heads = 1
    if halves or (number != INDEXER and FORMATS[number].hnd):
        # The argument is one half of a fused head; newer callers pass both halves already.
        width = 2 * head_size if fused and head_size > 0 and hidden % (2 * head_size) == 0 else head_size
        if width <= 0 or hidden % width:
            raise ArgumentError(f"head_size is {head_size}, must divide {hidden} for format {number}")
        heads = hidden // width
    return Counts(
        layers, 0, page_buffer_size // block_size, block_size, heads, hidden // heads, key_value.element_size(), stride
    )


def multi_layer_kv_transfer(
    key_value: Tensor,
    key_value_ptrs: Tensor | list[Tensor],
    slot_mapping: Tensor,
    paged_memory_device: Any,
    page_buffer_size: int,
    direction: Any,
    engine_kv_format: Any,
    block_size: int = 0,
    head_size: int = 0,
    skip_prefix_n_tokens: int = 0,
    block_stride_elems: int = 0,
) -> None:
    """Move tokens of all layers between a paged cache and ``key_value`` [planes, layers, tokens, hidden].

    Token i goes with slot i of `slot_mapping`; the first `skip_prefix_n_tokens` are left out. `head_size` counts
    elements, and matters where heads are outside the tokens of a block. Format 0 is one cross-layer tensor where one
    address is given, and is taken as format 1 where there is one per layer.
    """
    to_host, number = direction_of(direction), format_of(engine_kv_format)
    if not isinstance(key_value_ptrs, (list, tuple)) and not hasattr(key_value_ptrs, "data_ptr"):
        raise TypeError(f"Expected torch.Tensor or list, but got {type(key_value_ptrs).__name__}")
    device, kv_size = device_index(paged_memory_device), int(key_value.shape[0])
    addresses = _addresses(key_value_ptrs)
    if addresses is None or number == 17:
        paged = from_tensors(number, key_value_ptrs, block_size, kv_size, device)
    else:
        if number == 0 and len(addresses) > 1:
            number = 1
        c = _counts(number, key_value, page_buffer_size, block_size, head_size, block_stride_elems)
        paged = from_pointers(number, addresses, c, kv_size, device)
    if paged.geometry.planes != kv_size:
        raise ArgumentError(f"key_value has {kv_size} planes, format {number} has {paged.geometry.planes}")
    rows = _Rows.of(key_value, paged.row, plane=0, layer=1, token=2)
    _move(paged, rows, slot_mapping, to_host, int(skip_prefix_n_tokens))


def multi_layer_kv_transfer_unilateral(
    key_value: Tensor,
    key_value_ptrs: Tensor | list[Tensor],
    slot_mapping: Tensor,
    paged_memory_device: Any,
    page_buffer_size: int,
    direction: Any,
    engine_kv_format: Any,
) -> None:
    """Move tokens as `multi_layer_kv_transfer` does; keys of all layers, then values, are tensors of their own."""
    number = format_of(engine_kv_format)
    multi_layer_kv_transfer(
        key_value,
        key_value_ptrs,
        slot_mapping,
        paged_memory_device,
        page_buffer_size,
        direction,
        number if is_mla(number) else _KV_LIST,
    )


def single_layer_kv_transfer(
    lmc_key_value_cache: Tensor,
    vllm_key_value_cache: Tensor,
    slot_mapping: Tensor,
    direction: Any,
    engine_kv_format: Any,
    token_major: bool = False,
) -> None:
    """Move tokens of one layer; ``lmc_key_value_cache`` is [2, tokens, hidden], or [tokens, 2, hidden] if token-major.

    Where the format has one plane it is [tokens, hidden].
    """
    to_host, number = direction_of(direction), format_of(engine_kv_format)
    device, lmc = tensor_device(vllm_key_value_cache), lmc_key_value_cache
    planes = int(lmc.shape[1 if token_major else 0]) if len(lmc.shape) == 3 else 1
    tensor = vllm_key_value_cache
    if number in (4, 9, 16, 17):
        raise ArgumentError(f"Unsupported EngineKVFormat {number}: a layer of it is no single tensor")
    block_size = int(tensor.shape[0]) if number == 5 and len(tensor.shape) == 3 else 0
    if number == 5 and len(tensor.shape) == 3 and tensor.shape[1] != 1:
        number = 3  # handed in by blocks
    paged = from_tensors(number, tensor, block_size, planes, device)
    _move(paged, _one_layer(lmc, paged, token_major), slot_mapping, to_host)


def _one_layer(lmc: Any, paged: Paged, token_major: bool) -> _Rows:
    if paged.geometry.layers != 1:
        raise ArgumentError(f"the paged tensor holds {paged.geometry.layers} layers, must hold 1")
    if len(lmc.shape) == 2:
        rows, planes = _Rows.of(lmc, paged.row, token=0), 1
    else:
        plane, token = (1, 0) if token_major else (0, 1)
        rows, planes = _Rows.of(lmc, paged.row, plane=plane, token=token), int(lmc.shape[plane])
    if planes != paged.geometry.planes:
        raise ArgumentError(f"the tokens have {planes} planes, the paged tensor has {paged.geometry.planes}")
    return rows


def single_layer_kv_transfer_sgl(
    lmc_key_value_cache: Tensor,
    sgl_key_cache: Tensor,
    sgl_value_cache: Tensor,
    slot_mapping: Tensor,
    direction: Any,
    token_major: bool = False,
) -> None:
    """Move tokens of one layer whose keys and values are two tensors [blocks, block_size, heads, head_size]."""
    to_host = direction_of(direction)
    paged = from_tensors(_KV_LIST, [sgl_key_cache, sgl_value_cache], 0, 2, tensor_device(sgl_key_cache))
    _move(paged, _one_layer(lmc_key_value_cache, paged, token_major), slot_mapping, to_host)


def _flash(key_value: Any, key_cache: Any, value_cache: Any, slots: Any, layer_idx: int, to_host: bool) -> None:
    if not 0 <= layer_idx < key_value.shape[1]:
        raise BoundsError(f"layer_idx is {layer_idx}, must be in [0, {key_value.shape[1]})")
    paged = from_tensors(_KV_LIST, [key_cache, value_cache], 0, 2, tensor_device(key_cache))
    _move(paged, _one_layer(key_value[:, layer_idx], paged, False), slots, to_host)


def load_and_reshape_flash(
    key_value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, layer_idx: int
) -> None:
    """Move tokens of one layer from the cache to ``key_value`` [2, layers, tokens, hidden]."""
    _flash(key_value, key_cache, value_cache, slot_mapping, layer_idx, True)


def reshape_and_cache_back_flash(
    key_value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, layer_idx: int
) -> None:
    """Move tokens of one layer from ``key_value`` [2, layers, tokens, hidden] to the cache."""
    _flash(key_value, key_cache, value_cache, slot_mapping, layer_idx, False)
