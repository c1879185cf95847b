"""The value types: directions, formats, the shape descriptor, and the records of planned transfers."""

from __future__ import annotations

import enum
import operator
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvraw.errors import KvrawError
from kvraw.layouts.formats import FORMATS, Format
from kvraw.memo import Memo

__all__ = [
    "BatchStep",
    "CBGroupSpec",
    "DirectCopyGroupSpec",
    "DirectCopyObject",
    "EngineKVFormat",
    "GPUKVFormat",
    "KernelGroupSpec",
    "LaunchVar",
    "PageBufferShapeDesc",
    "StagingCopy",
    "TransferDirection",
    "is_cross_layer",
    "is_kv_list",
    "is_layer_list",
    "is_mla",
    "set_shape_desc_dtype",
]


class ArgumentError(KvrawError, ValueError, RuntimeError):
    """An argument that cannot be meant; one of LMCache's modules raises ValueError for it, the other RuntimeError."""


class _Member(enum.IntEnum):
    """An integer with a name: equal to the same integer and to other modules' members of that value."""

    __str__ = enum.Enum.__repr__

    @classmethod
    def _missing_(cls, value: object) -> Any:
        found = cls._value2member_map_.get(operator.index(value))  # type: ignore[arg-type]
        if found is None:
            raise ArgumentError(f"{value!r} is not a valid {cls.__name__}")
        return found


class TransferDirection(_Member):
    """Host to device, or device to host."""

    H2D = 0
    D2H = 1


_REFERENCE = range(12)  # the formats that the reference version knows


def formats_of(rows: Mapping[int, Format]) -> Any:
    """The enum of the formats that have numbers.

    Members that came after the reference version live in a base: ``vars`` of the enum shows that version's.
    """
    later: Any = types.new_class("_LaterFormats", (_Member,))
    made = later("EngineKVFormat", {rows[n].name: n for n in sorted(rows)}, module=__name__)
    made.__doc__ = "Layouts of an engine's paged KV cache."
    for name, member in made.__members__.items():
        if name in vars(made):
            type.__delattr__(made, name)
        type.__setattr__(made if member in _REFERENCE else later, name, member)
    return made


EngineKVFormat = formats_of(FORMATS)
GPUKVFormat = EngineKVFormat


def number(name: str, value: Any) -> int:
    """An integer, or an enum member of any library that converts to one."""
    try:
        return operator.index(value)
    except TypeError:
        if isinstance(value, (str, bytes, float)) or not hasattr(value, "__int__"):
            raise TypeError(f"{name} is a {type(value).__name__}, must be an integer or an enum member") from None
        return int(value)


def direction_of(direction: Any) -> bool:
    """Whether a direction is device to host."""
    value = number("direction", direction)
    if value not in (0, 1):
        raise ArgumentError(f"Unsupported direction: {direction!r} (must be H2D = 0 or D2H = 1)")
    return value == 1


def format_of(engine_kv_format: Any) -> int:
    """The number of a format."""
    value = number("engine_kv_format", engine_kv_format)
    if value not in FORMATS:
        raise ArgumentError(f"Unsupported EngineKVFormat: {engine_kv_format!r}")
    return value


_ways: Memo[tuple[Any, ...], tuple[bool, int]] = Memo(256)


def way_of(direction: Any, engine_kv_format: Any) -> tuple[bool, int]:
    """`direction_of` and `format_of`, found again by values and types."""
    key = (type(direction), direction, type(engine_kv_format), engine_kv_format)
    try:
        return _ways[key]
    except TypeError:  # one of them has no hash
        return direction_of(direction), format_of(engine_kv_format)
    except KeyError:
        pass
    return _ways.keep(key, (direction_of(direction), format_of(engine_kv_format)))


def _asked(engine_kv_format: Any, later: Any) -> Format:
    """The format of a predicate, under either of its names."""
    if engine_kv_format is not None and later is not None:
        raise TypeError("engine_kv_format and format are two names of one argument, both were given")
    return FORMATS[format_of(engine_kv_format if later is None else later)]


# Later versions of LMCache call the argument `format`.
def is_cross_layer(engine_kv_format: Any = None, *, format: Any = None) -> bool:
    """Whether all layers lie in one tensor."""
    return not _asked(engine_kv_format, format).pointers


def is_kv_list(engine_kv_format: Any = None, *, format: Any = None) -> bool:
    """Whether keys and values are two lists of tensors."""
    return _asked(engine_kv_format, format).pointers == "PL"


def is_layer_list(engine_kv_format: Any = None, *, format: Any = None) -> bool:
    """Whether there is one entry per layer."""
    return _asked(engine_kv_format, format).pointers[:1] == "L"


def is_mla(engine_kv_format: Any = None, *, format: Any = None) -> bool:
    """Whether a token is one row of one plane."""
    return _asked(engine_kv_format, format).mla


class PageBufferShapeDesc:
    """Counts of one kernel group's paged tensors; all 0 at first.

    Attributes
    ----------
    kv_size, nl, nb, bs, nh, hs, element_size : int
        Planes, layers, blocks, tokens per block, heads, elements per head, bytes per element.
    block_stride_elems : int
        Elements from one block to the next, ``tensor.stride(0)``; 0: tight.
    dtype : object
        The elements' type, where it is known.
    """

    def __init__(self) -> None:
        self.kv_size = self.nl = self.nb = self.bs = self.nh = self.hs = self.element_size = 0
        self.block_stride_elems = 0
        self.dtype: Any = None


def set_shape_desc_dtype(shape_desc: Any, dtype: Any) -> None:
    """Set ``shape_desc.dtype`` where the descriptor takes it."""
    try:
        shape_desc.dtype = dtype
    except AttributeError:
        return


@dataclass(slots=True)
class StagingCopy:
    """One copy between a staging buffer on the device and host memory; `host_offset` is the host side's in its pool."""

    dest: int
    src: int
    nbytes: int
    host_offset: int


@dataclass(slots=True)
class LaunchVar:
    """What one launch of a kernel group has of its own."""

    group_idx: int
    block_ids_offset: int
    total_blocks: int
    num_objects: int
    skip_prefix_n_blocks: int


@dataclass(slots=True)
class BatchStep:
    """One batch: its staging copies and its launches."""

    staging: list[StagingCopy] = field(default_factory=list)
    launches: list[LaunchVar] = field(default_factory=list)


@dataclass(slots=True)
class KernelGroupSpec:
    """What all launches of a kernel group share; tables and ids are addresses of the transfer's device."""

    paged_buffer_ptrs: int
    lmcache_objects_ptrs: list[int]
    shape_desc: Any
    lmcache_chunk_size: int
    engine_kv_format: Any
    block_ids_base: int
    block_ids_capacity: int


@dataclass(slots=True)
class CBGroupSpec:
    """What all steps of a retrieval share in a kernel group: its table, its staging slots and how its keys turn.

    A slot is [planes, layers, `slot_tokens`, `hidden_elems`]; `rope_base_offset` is bytes from its first key to the
    first element that turns. Tables, slots, mapping and cosines are addresses or tensors of the retrieval's device.
    `block_stride_elems` is elements from block to block of the table's tensors (0: tight), `cache_scalar_type` torch's
    number for the type of the cosines (negative: that of the keys).
    """

    paged_kv_ptrs: Any
    temp_buffer_ptrs: Sequence[Any]
    num_layers: int
    slot_tokens: int
    hidden_elems: int
    element_size: int
    engine_kv_format: Any
    page_buffer_size: int
    block_size: int
    head_size: int
    slot_mapping_base: Any
    slot_mapping_capacity: int
    cos_sin_cache: Any
    rot_dim: int
    rope_num_kv_heads: int
    rope_head_stride: int
    key_scalar_type: int
    is_neox: bool
    rope_base_offset: int = 0
    block_stride_elems: int = 0
    cache_scalar_type: int = -1


@dataclass(slots=True)
class DirectCopyGroupSpec:
    """A kernel group that is copied block by block, without a kernel; tables and ids are on the host."""

    paged_layer_ptrs: list[int]
    shape_desc: Any
    engine_kv_format: Any
    slots_per_chunk: int
    byte_offset_in_object: int
    block_ids: list[int]


@dataclass(slots=True)
class DirectCopyObject:
    """One object in host memory: a chunk of every group."""

    host_ptr: int
    host_offset: int
    nbytes: int
    chunk_idx: int
    skip_prefix_n_blocks: list[int]
