"""The groups of a CacheBlend retrieval: their table and slots, and how their keys turn to new positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvraw.adapters.deferred_errors import Sink
from kvraw.adapters.lmcache._blend_wide import WideTurn
from kvraw.adapters.lmcache._objects import object_side, reach
from kvraw.adapters.lmcache._paged import from_pointers
from kvraw.adapters.lmcache._planned import tables_of
from kvraw.adapters.lmcache._slots import counts_of
from kvraw.adapters.lmcache._types import ArgumentError, CBGroupSpec, format_of
from kvraw.addresses import require_address, require_addresses
from kvraw.arrays import TensorView
from kvraw.copying.device_state import DeviceState
from kvraw.copying.launch import Launch
from kvraw.errors import LayoutError, PlacementError
from kvraw.layouts.formats import FORMATS
from kvraw.layouts.parts import Part
from kvraw.memo import Memo
from kvraw.plain import require_memory
from kvraw.prepared import DeviceTable, Reached
from kvraw.rope.rotate import Call, rerotate_keys
from kvraw.runtime.completion import Operation
from kvraw.runtime.context import at_reset
from kvraw.runtime.driver import driver

__all__ = ["Ends", "Group", "address_of", "group_of"]

_MOST = 256
# Torch's numbers for the types of keys.
_TYPES = {5: ("float16", 2), 6: ("float32", 4), 15: ("bfloat16", 2)}
_KEY_TYPES = {**_TYPES, 23: ("float8_e5m2", 1), 24: ("float8_e4m3fn", 1)}


def address_of(value: Any) -> int:
    """An address that is one, or a dense tensor's."""
    if not hasattr(value, "data_ptr"):
        return int(value)
    if not value.is_contiguous():
        raise LayoutError(
            f"a table, slot or mapping of shape {tuple(value.shape)}, strides {tuple(value.stride())} has gaps"
        )
    require_memory("a table, slot or mapping", value)
    return int(value.data_ptr())


@dataclass(frozen=True, slots=True)
class _Keys:
    """How the keys in a group's slots turn.

    Attributes
    ----------
    cache, row : int
        Address of the cosines and sines, and the bytes of a position.
    offset : int
        Bytes from a slot to the first element that turns.
    shape, strides : tuple of int
        Layers, heads and elements; bytes from one layer, token and head to the next.
    dtype, size, wide, wide_size : str, int
        Types of the keys and of the cosines, and their bytes.
    """

    cache: int
    row: int
    offset: int
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    dtype: str
    size: int
    neox: bool
    wide: str
    wide_size: int

    @classmethod
    def of(cls, spec: CBGroupSpec) -> _Keys | None:
        """Those of a group; None where they keep their positions."""
        cache, stride, offset = address_of(spec.cos_sin_cache), spec.rope_head_stride, spec.rope_base_offset
        if not cache:
            return None
        dtype, size = _KEY_TYPES.get(spec.key_scalar_type, ("", 0))
        if size != spec.element_size:
            raise ArgumentError(
                f"key_scalar_type is {spec.key_scalar_type} with elements of {spec.element_size} bytes, must be 5 "
                f"(fp16), 6 (fp32), 15 (bf16), 23 or 24 (fp8: e5m2, e4m3fn)"
            )
        number = spec.key_scalar_type if spec.cache_scalar_type < 0 else spec.cache_scalar_type
        wide, wide_size = _TYPES.get(number, ("", 0))
        if not wide:
            raise ArgumentError(f"cache_scalar_type is {number}, must be 5 (fp16), 6 (fp32) or 15 (bf16)")
        if stride <= 0 or spec.rope_num_kv_heads * stride != spec.hidden_elems:
            raise ArgumentError(
                f"rope_num_kv_heads is {spec.rope_num_kv_heads}, rope_head_stride {stride}: must be "
                f"{spec.hidden_elems} elements together"
            )
        if offset % size or not 0 <= offset < stride * size:
            raise ArgumentError(
                f"rope_base_offset is {offset}, must be whole elements in [0, {stride * size}), the bytes of a head"
            )
        width = stride - offset // size
        if spec.rot_dim <= 0 or spec.rot_dim % 2 or spec.rot_dim > width:
            raise ArgumentError(f"rot_dim is {spec.rot_dim}, must be even and in [2, {width}]")
        shape = spec.num_layers, spec.rope_num_kv_heads, width
        strides = spec.slot_tokens * spec.hidden_elems * size, spec.hidden_elems * size, stride * size
        if wide != dtype:  # what does not turn is not converted
            shape = *shape[:2], spec.rot_dim
        row = spec.rot_dim * wide_size
        return cls(cache, row, offset, shape, strides, dtype, size, bool(spec.is_neox), wide, wide_size)

    def limit(self, device: int | None, need: int) -> int:
        """Positions that may be read behind the first; in host memory nothing tells, and what is needed is believed."""
        if device is None:
            require_address("cos_sin_cache", self.cache, need * self.row)
            return need
        info = driver().pointer_info(self.cache)
        if info is None or (info.kind == "device" and info.device != device):
            where = "pageable host memory" if info is None else f"memory of device {info.device}"
            raise PlacementError(f"cos_sin_cache at {self.cache:#x} is {where}, must be memory of device {device}")
        return (info.base + info.size - self.cache) // self.row

    def views(self, slot: int, tokens: int, positions: int, device: int | None) -> tuple[TensorView, TensorView]:
        """The keys of the first tokens of a slot, and the table of cosines and sines."""
        layers, heads, width = self.shape
        size = self.size
        key = TensorView(slot + self.offset, (layers, tokens, heads, width), (*self.strides, size), size, device, None)
        size = self.wide_size
        return key, TensorView(self.cache, (positions, self.row // size), (self.row, size), size, device, None)


class _Turn:
    """A rotation of one slot's keys, ready."""

    __slots__ = ("_launch", "_values")

    def __init__(self, launch: Launch, values: tuple[int, int, int]) -> None:
        self._launch, self._values = launch, values

    def enqueue(self, state: DeviceState, operation: Operation, capturing: bool, on_error: Sink) -> None:
        """Enqueue it on the operation's stream, as an operation of its own; the device's context is current."""
        self._launch.start(operation.stream, (), capturing, values=self._values)


class Ends(NamedTuple):
    """Where a group's copies begin and end: the tables of its parts, and its slots."""

    tables: Sequence[DeviceTable | Reached]
    slots: Reached
    parts: tuple[Part, ...]

    def rows(self, chosen: list[int]) -> list[Reached]:
        """Some of the slots, as each part takes them."""
        host, seen = self.slots.host[chosen], self.slots.seen[chosen]
        at = [np.uint64(part.at) for part in self.parts]
        return [Reached(host + a, seen + a, self.slots.link, self.slots.edges) for a in at]


class Group:
    """What all plans share whose group has this table, these slots and these counts."""

    def __init__(self, at: int, spec: CBGroupSpec, device: int | None) -> None:
        number = format_of(spec.engine_kv_format)
        for name in ("num_layers", "slot_tokens", "hidden_elems", "element_size", "page_buffer_size"):
            if getattr(spec, name) <= 0:
                raise ArgumentError(f"group {at}: {name} is {getattr(spec, name)}, must be positive")
        self.at, self.device, self.tokens = at, device, spec.slot_tokens
        self.slots = [address_of(slot) for slot in spec.temp_buffer_ptrs]
        self.table = address_of(spec.paged_kv_ptrs)
        if not self.table or not self.slots or not all(self.slots):
            raise ArgumentError(f"group {at}: paged_kv_ptrs or one of temp_buffer_ptrs is null, or there is no slot")
        if device is None:
            require_addresses(f"group {at}: temp_buffer_ptrs", np.array(self.slots, np.uint64), 1)
        layers, hidden, element = spec.num_layers, spec.hidden_elems, spec.element_size
        self.keys = _Keys.of(spec)
        planes = FORMATS[number].planes
        sizes = spec.page_buffer_size, spec.block_size, spec.head_size
        c = counts_of(number, planes, layers, hidden, element, *sizes, spec.block_stride_elems)
        # The layout is that of any table: its addresses may be on the device, and only their number is known here.
        self._shape = shape = from_pointers(number, np.ones(2 * layers, np.uint64), c, planes, device)
        if shape.row != hidden * element:
            raise ArgumentError(f"group {at}: a token has {hidden * element} bytes, format {number} takes {shape.row}")
        self.nbytes = planes * layers * self.tokens * shape.row
        self.copies = shape.copies("slot", False, lambda p: object_side(p, layers, self.tokens, 1), self.tokens)
        self._turns: dict[tuple[int, int], Launch] = {}

    def ends(self, stream: int | None) -> Ends:
        """The tables of each part, and the slots; `stream` as for `tables_of`."""
        slots = reach(self.slots, self.nbytes, self.device)
        return Ends(tables_of("paged_kv_ptrs", self.table, self._shape, stream), slots, self._shape.parts)

    def slot(self, what: str, slot: int) -> int:
        """Address of a slot, by its number."""
        if not 0 <= slot < len(self.slots):
            raise ArgumentError(f"{what}: slot_idx is {slot}, must be in [0, {len(self.slots)})")
        return self.slots[slot]

    def turn(self, what: str, slot: int, old: int, new: int, tokens: int, limit: int) -> Any:
        """The rotation of the first tokens of a slot, ready: to be enqueued, or called."""
        keys, address = self.keys, self.slot(what, slot)
        assert keys is not None
        for name, start in (("old_st", old), ("cur_st", new)):
            if not 0 <= start <= limit - tokens:
                raise ArgumentError(
                    f"{what}: {name} is {start} for {tokens} tokens, must be in [0, {limit - tokens}]: cos_sin_cache "
                    f"has {limit} positions"
                )
        if keys.wide != keys.dtype:
            views = keys.views(address, tokens, max(old, new) + tokens, self.device)
            return WideTurn(*views, (keys.dtype, keys.wide), old, new, keys.neox, self._wide_launch)
        if self.device is None:
            views = keys.views(address, tokens, max(old, new) + tokens, None)
            positions = range(old, old + tokens), range(new, new + tokens)
            return partial(rerotate_keys, views[0], *positions, views[1], neox=keys.neox, dtype=keys.dtype)
        aligned = (tokens, address % 16)
        launch = self._turns.get(aligned)
        if launch is None:
            key, cache = keys.views(address, tokens, tokens, self.device)
            call = Call.take((key, range(tokens), range(tokens), cache), keys.neox, None, None, keys.dtype)
            assert call is not None
            launch = self._turns[aligned] = call.launch()
        return _Turn(launch, (address + keys.offset, old, new))

    def _wide_launch(self, key: TensorView) -> Launch:
        """The launch for keys that were widened, which lie without gaps; by their number and alignment."""
        keys, tokens = self.keys, key.shape[1]
        assert keys is not None
        aligned = (tokens, key.address % 16)
        launch = self._turns.get(aligned)
        if launch is None:
            _, cache = keys.views(key.address, tokens, tokens, self.device)
            call = Call.take((key, range(tokens), range(tokens), cache), keys.neox, None, None, keys.wide)
            assert call is not None
            launch = self._turns[aligned] = call.launch()
        return launch


_known: Memo[tuple[object, ...], Group] = Memo(_MOST)
at_reset(_known.clear)


def group_of(at: int, spec: CBGroupSpec, device: int | None) -> Group:
    """The group of these counts and addresses, as it was made before."""
    key = (
        *(device, spec.num_layers, spec.slot_tokens, spec.hidden_elems, spec.element_size, spec.page_buffer_size),
        *(format_of(spec.engine_kv_format), spec.block_size, spec.head_size, spec.rot_dim, spec.rope_num_kv_heads),
        *(spec.rope_head_stride, spec.key_scalar_type, spec.is_neox, spec.rope_base_offset),
        *(spec.block_stride_elems, spec.cache_scalar_type),
        *map(address_of, (spec.paged_kv_ptrs, spec.cos_sin_cache, *spec.temp_buffer_ptrs)),
    )
    found = _known.get(key)
    if found is None:
        found = _known.keep(key, Group(at, spec, device))
    if spec.slot_mapping_capacity < 0 or (spec.slot_mapping_capacity and not address_of(spec.slot_mapping_base)):
        raise ArgumentError(f"group {at}: slot_mapping_base is null, or slot_mapping_capacity negative")
    return found
