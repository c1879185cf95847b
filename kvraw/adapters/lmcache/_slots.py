"""Transfers of single tokens, by slot mapping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvraw.adapters.deferred_errors import raise_deferred
from kvraw.adapters.lmcache._ids import ids_of, ids_on
from kvraw.adapters.lmcache._memo import cached_by_tensors
from kvraw.adapters.lmcache._paged import (
    Counts,
    Paged,
    addresses_of,
    from_pointers,
    from_tensors,
    interned,
)
from kvraw.adapters.lmcache._place import current_stream, device_index, tensor_device
from kvraw.adapters.lmcache._types import ArgumentError, direction_of, format_of, is_mla, way_of
from kvraw.arrays import U64
from kvraw.copying.bounce import BounceBuffers, require_no_capture
from kvraw.copying.plan import Side
from kvraw.errors import BoundsError, PlacementError
from kvraw.layouts.formats import FORMATS
from kvraw.layouts.parts import Part
from kvraw.plain import odd, require_plain, unusable
from kvraw.prepared import Reached
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.memory import Where, locate, pinned_at

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "counts_of",
    "load_and_reshape_flash",
    "multi_layer_kv_transfer",
    "multi_layer_kv_transfer_unilateral",
    "reshape_and_cache_back_flash",
    "single_layer_kv_transfer",
    "single_layer_kv_transfer_sgl",
]

_KV_LIST = 9
_FEW = 8  # base addresses that are written one by one sooner than as a vector


class _Rows:
    """Tokens outside the paged cache, in tensors of one shape, ready to be moved one way.

    Parameters
    ----------
    paged : Paged
        The cache.
    to_host : bool
        The way.
    shape, strides : list of int
        A tensor's, in elements; the last axis is a row.
    unit : int
        Bytes of an element.
    token, plane, layer : int or None
        Its axes, by position; None: there is none.
    """

    def __init__(
        self,
        paged: Paged,
        to_host: bool,
        shape: list[int],
        strides: list[int],
        unit: int,
        token: int,
        plane: int | None,
        layer: int | None,
    ) -> None:
        row, g = paged.row, paged.geometry
        element = g.element_size if paged.whole else unit
        if shape[-1] * unit != row or unit != element or (strides[-1] != 1 and shape[-1] > 1):
            raise ArgumentError(
                f"a token of shape {tuple(shape)}, strides {strides} has {shape[-1] * unit} bytes in elements of "
                f"{unit}, must have {row}, dense, in elements of {element} as in the paged cache"
            )
        by_plane, by_layer, self._step = (0 if a is None else strides[a] * unit for a in (plane, layer, token))
        self.paged, self.to_host, self.count = paged, to_host, shape[token]
        # A base for each plane and layer: strides between these change with the number of tokens, plans do not.
        steps = [plane * by_plane + layer * by_layer for plane in range(g.planes) for layer in range(g.layers)]
        self._steps: U64 = np.array(steps, np.int64).view(np.uint64)
        self._few = steps if len(steps) <= _FEW else None
        self._bits = int(np.bitwise_or.reduce(self._steps)) & 15
        self._span = steps[-1] + (self.count - 1) * self._step + row
        self._copies = paged.copies("slot", to_host, self._flat, self._step)
        self._pinned = (0, 0, 0, 0)  # where tokens lay in pinned memory, as `pinned_at`

    def _flat(self, part: Part) -> Side:
        g = part.layout.geometry
        entries = g.planes * g.layers
        return Side(self._step, table_layer=1, table_plane=g.layers, head=part.head_bytes, entries=entries)

    def _repeat(self, tensor: Any, offset: int, slots: Any, skip: int, device: int, stream: int) -> bool:
        """Move as an earlier call did, by slots on the device; False: all must be looked at."""
        there = ids_on(slots, device)
        if there is None or there[2] < self.count or skip >= self.count:
            return False
        place = tensor.data_ptr()
        if not place or odd(tensor):
            return False
        place += offset
        where, memory, link = tensor.device, (0, 0), False
        if where.type == "cpu":
            begin, end, shift, number = self._pinned
            if not begin <= place <= end - self._span or not number:
                return False
            address, memory, link = place + shift, (place, number), True
        elif where.index != device:
            return False
        else:
            address = place
        bases = self._steps + np.uint64(address) if self._few is None else [address + step for step in self._few]
        count, bits, refs = self.count - skip, (address | self._bits) & 15, (slots, tensor)
        return self._copies.repeat(stream, bases, bits, there, skip, count, link=link, memory=memory, refs=refs)

    def move(self, tensor: Any, offset: int, slots: Any, skip: int = 0) -> None:
        """Move a token per slot, on the caller's stream; a negative slot moves nothing."""
        device, stream = self.paged.device, None
        if device is not None:
            stream = current_stream(device)
            if self._repeat(tensor, offset, slots, skip, device, stream):
                return
        captured = device is not None and stream is not None and raise_deferred(device, stream)
        ids = ids_of("slot_mapping", slots, device, keep=tensor)
        if ids.count < self.count:
            raise BoundsError(f"slot_mapping has {ids.count} slots for {self.count} tokens")
        count = self.count - skip
        if count <= 0:
            return
        address = int(tensor.data_ptr()) + offset
        if address == offset or odd(tensor):
            raise unusable("the tensor of tokens", tensor)
        if device is None:
            if tensor.device.type != "cpu":
                raise PlacementError(f"the tokens lie on device {tensor.device.index}, the cache in host memory")
            self._copies.run(self._reached(address, Where(None, address)), ids, skip, count, stream)
            return
        if tensor.device.type != "cpu":
            if tensor.device.index not in (None, device):
                raise PlacementError(f"the tokens lie on device {tensor.device.index}, the cache on device {device}")
            self._copies.run(self._reached(address, Where(device, address)), ids, skip, count, stream)
            return
        with DeviceScope(device):
            where = locate(address, self._span)
            if where.device_address:
                self._pinned = pinned_at(address)
                self._copies.run(self._reached(address, where), ids, skip, count, stream)
                return
            require_no_capture(captured)
            buffers = BounceBuffers([(address, self._span)], device, fill=True)
            address = buffers.addresses[0]
            ids = ids._replace(owner=(ids.owner, buffers))
            reached, waited = self._reached(address, locate(address, self._span)), self.to_host
            done = self._copies.run(reached, ids, skip, count, stream, waited=waited)
        if waited and done is not None:
            try:
                done.wait()
            finally:  # what a bad slot leaves out is one token
                buffers.copy_back()

    def _reached(self, address: int, where: Where) -> Reached:
        host, seen = self._steps + np.uint64(address), self._steps + np.uint64(where.device_address)
        return Reached(host, seen, where.device is None, where.edges)


def _rows(
    paged: Paged,
    to_host: bool,
    tensor: Any,
    *,
    token: int,
    plane: int | None = None,
    layer: int | None = None,
    without: int | None = None,
) -> _Rows:
    """The rows of a tensor; without one of its axes, where only one place of it takes part."""
    try:
        shape, strides, unit = tensor.shape, tensor.stride(), tensor.element_size()
    except (RuntimeError, NotImplementedError):  # one without memory
        require_plain("the tensor of tokens", tensor)
        raise

    def make() -> _Rows:
        keep = [k for k in range(len(shape)) if k != without]
        return _Rows(paged, to_host, [shape[k] for k in keep], [strides[k] for k in keep], unit, token, plane, layer)

    return paged.ready(("rows", to_host, shape, strides, unit, token, plane, layer, without), make)


def _of_tensors(number: int, given: Any, kv_size: int, layers: int, hidden: int, device: int | None) -> Paged:
    """A paged cache from tensors, whose tokens have `hidden` elements; those beyond the layers are left out."""
    tensors = list(given) if isinstance(given, (list, tuple)) else [given]
    if number == 0 and (len(tensors) != 1 or (layers == 1 and len(getattr(tensors[0], "shape", ())) < 6)):
        number = 1
    if FORMATS[number].pointers in ("L", "LK"):
        tensors = tensors[:layers]
    paged = from_tensors(number, tensors, 1, kv_size, device, hidden)
    if paged.geometry.layers != layers:
        raise ArgumentError(f"key_value has {layers} layers, the paged tensors have {paged.geometry.layers}")
    return paged


def counts_of(
    number: int,
    planes: int,
    layers: int,
    hidden: int,
    element: int,
    page_buffer_size: int,
    block_size: int,
    head_size: int,
    stride: int = 0,
) -> Counts:
    """Counts of a call by slots and addresses, whose tokens have `hidden` elements.

    Blocks and heads only where they matter. The head size of formats 10 and 12 is one half of a head where twice as
    much divides `hidden`, else both.
    """
    form = FORMATS[number]
    if form.tokens_apart and not stride:
        block_size = 1
    elif block_size <= 0:
        raise ArgumentError(f"block_size is {block_size}, must be positive for format {number}")
    heads = 1
    if form.hnd or (planes == 2 and form.fused):
        fused = planes == 1 and form.paired
        width = 2 * head_size if fused and head_size > 0 and hidden % (2 * head_size) == 0 else head_size
        if width <= 0 or hidden % width:
            raise ArgumentError(f"head_size is {head_size}, must divide {hidden} for format {number}")
        heads = hidden // width
    return Counts(layers, 0, page_buffer_size // block_size, block_size, heads, hidden // heads, element, stride)


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

    Token i goes with slot i of `slot_mapping`; the first `skip_prefix_n_tokens` are left out. Format 0 is one
    cross-layer tensor where one address is given, and is taken as format 1 where there is one per layer.

    Where tensors are given, their shapes and strides rule; `page_buffer_size` and what follows the format describe
    addresses. `head_size` counts elements, and matters where heads are outside the tokens of a block. Of formats 10 and
    12 it is one half of a head, K or V, or both where twice as much is no divisor of `hidden`: an even number of heads
    of both halves cannot be told from twice as many of one, and is read as these.
    """
    to_host, number = way_of(direction, engine_kv_format)
    if not isinstance(key_value_ptrs, (list, tuple)) and not hasattr(key_value_ptrs, "data_ptr"):
        raise TypeError(f"Expected torch.Tensor or list, but got {type(key_value_ptrs).__name__}")
    if not hasattr(key_value, "data_ptr"):
        raise TypeError(f"key_value is a {type(key_value).__name__}, must be a tensor")
    try:
        kv_size, layers, _, hidden = key_value.shape
    except ValueError:
        shape = tuple(key_value.shape)
        raise ArgumentError(f"key_value has shape {shape}, must be [planes, layers, tokens, hidden]") from None
    device, element = device_index(paged_memory_device), key_value.element_size()

    def make() -> Paged:
        addresses = addresses_of("key_value_ptrs", key_value_ptrs)
        if addresses is None:
            paged = _of_tensors(number, key_value_ptrs, kv_size, layers, hidden, device)
        else:
            form = 1 if number == 0 and len(addresses) > 1 else number
            given = kv_size, layers, hidden, element
            c = counts_of(form, *given, page_buffer_size, block_size, head_size, block_stride_elems)
            paged = from_pointers(form, addresses, c, kv_size, device)
        if paged.geometry.planes != kv_size:
            raise ArgumentError(f"key_value has {kv_size} planes, format {number} has {paged.geometry.planes}")
        return paged

    sizes = page_buffer_size, block_size, head_size, block_stride_elems
    key = ("slots", number, device, *sizes, kv_size, layers, hidden, element)
    paged = cached_by_tensors(key_value_ptrs, key, make)
    rows = _rows(paged, to_host, key_value, token=2, plane=0, layer=1)
    rows.move(key_value, 0, slot_mapping, max(int(skip_prefix_n_tokens), 0))


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
    form, ends = number if is_mla(number) else _KV_LIST, (key_value, key_value_ptrs, slot_mapping)
    multi_layer_kv_transfer(*ends, paged_memory_device, page_buffer_size, direction, form)


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
    to_host, number = way_of(direction, engine_kv_format)
    lmc, tensor = lmc_key_value_cache, vllm_key_value_cache
    shape = lmc.shape
    planes, hidden = int(shape[1 if token_major else 0]) if len(shape) == 3 else 1, shape[-1]

    def make() -> Paged:
        if FORMATS[number].pointers not in ("", "L"):
            raise ArgumentError(f"Unsupported EngineKVFormat {number}: a layer of it is no single tensor")
        return from_tensors(number, tensor, 1, planes, tensor_device(tensor), hidden)

    paged = cached_by_tensors(tensor, ("layer", number, planes, hidden), make)
    _one_layer(lmc, paged, to_host, token_major).move(lmc, 0, slot_mapping)


def _one_layer(lmc: Any, paged: Paged, to_host: bool, token_major: bool) -> _Rows:
    """The rows of tokens of one layer."""
    try:
        key = (to_host, token_major, lmc.shape, lmc.stride(), lmc.dtype)
        found: _Rows | None = paged.plans.get(key)
    except (RuntimeError, NotImplementedError):  # one without memory
        return _find_layer(lmc, paged, to_host, token_major)
    if found is None:
        found = paged.ready(key, lambda: _find_layer(lmc, paged, to_host, token_major))
    return found


def _find_layer(lmc: Any, paged: Paged, to_host: bool, token_major: bool) -> _Rows:
    if paged.geometry.layers != 1:
        raise ArgumentError(f"the paged tensor holds {paged.geometry.layers} layers, must hold 1")
    plane, token, planes = None, 0, 1
    if len(lmc.shape) != 2:
        if len(lmc.shape) != 3:
            raise ArgumentError(f"the tokens have shape {tuple(lmc.shape)}, must have 2 or 3 axes")
        plane, token = (1, 0) if token_major else (0, 1)
        planes = int(lmc.shape[plane])
    if planes != paged.geometry.planes:
        raise ArgumentError(f"the tokens have {planes} planes, the paged tensor has {paged.geometry.planes}")
    return _rows(paged, to_host, lmc, token=token, plane=plane)


def _two_tensors(keys: Any, values: Any, hidden: int) -> Paged:
    def make() -> Paged:
        return from_tensors(_KV_LIST, [keys, values], 1, 2, tensor_device(keys), hidden)

    try:
        ends = keys.data_ptr(), keys.shape, keys.stride(), keys.dtype, values.data_ptr(), values.shape, values.stride()
        key = ("two", *ends, values.dtype, hidden, keys.device.index)
    except (AttributeError, RuntimeError, NotImplementedError):  # no tensors, or none with memory: `make` says so
        return make()
    return interned(key, make)


def single_layer_kv_transfer_sgl(
    lmc_key_value_cache: Tensor,
    sgl_key_cache: Tensor,
    sgl_value_cache: Tensor,
    slot_mapping: Tensor,
    direction: Any,
    token_major: bool = False,
) -> None:
    """Move tokens of one layer whose keys and values are two tensors [blocks, block_size, heads, head_size]."""
    lmc, to_host = lmc_key_value_cache, direction_of(direction)
    paged = _two_tensors(sgl_key_cache, sgl_value_cache, lmc.shape[-1])
    _one_layer(lmc, paged, to_host, token_major).move(lmc, 0, slot_mapping)


def _flash(key_value: Any, key_cache: Any, value_cache: Any, slots: Any, layer_idx: int, to_host: bool) -> None:
    shape = key_value.shape
    if len(shape) != 4 or shape[0] != 2:
        raise ArgumentError(f"key_value has shape {tuple(shape)}, must be [2, layers, tokens, hidden]")
    if not 0 <= layer_idx < shape[1]:
        raise BoundsError(f"layer_idx is {layer_idx}, must be in [0, {shape[1]})")
    paged = _two_tensors(key_cache, value_cache, shape[-1])
    rows = _rows(paged, to_host, key_value, token=1, plane=0, without=1)
    rows.move(key_value, layer_idx * key_value.stride(1) * key_value.element_size(), slots)


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
