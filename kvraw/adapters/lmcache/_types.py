"""The value types: directions, formats, the shape descriptor, and the records of planned transfers."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from kvraw.errors import KvrawError
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

M = TypeVar("M", bound="_Member")


class ArgumentError(KvrawError, ValueError, RuntimeError):
    """An argument that cannot be meant; one of LMCache's modules raises ValueError for it, the other RuntimeError."""


class _Members(type):
    """Makes a class of named integers iterable, and callable by number."""

    names: dict[str, Any]

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls.names.values())

    def __len__(cls) -> int:
        return len(cls.names)

    def __getitem__(cls, name: str) -> Any:
        return cls.names[name]

    @property
    def __members__(cls) -> Mapping[str, Any]:
        return dict(cls.names)


class _Member(int, metaclass=_Members):
    """An integer with a name: equal to the same integer and to other modules' members of that value."""

    names: ClassVar[dict[str, Any]] = {}
    name: str

    def __new__(cls: type[M], value: Any) -> M:
        number = operator.index(value)
        for member in cls.names.values():
            if int(member) == number:
                return member  # type: ignore[no-any-return]
        raise ArgumentError(f"{value!r} is not a valid {cls.__name__}")

    @property
    def value(self) -> int:
        """The number."""
        return int(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {int(self)}>"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self),)

    @classmethod
    def _define(cls, home: type, **members: int) -> None:
        for name, number in members.items():
            member = int.__new__(cls, number)
            member.name = name
            cls.names[name] = member
            setattr(home, name, member)


class TransferDirection(_Member):
    """Host to device, or device to host."""

    names: ClassVar[dict[str, Any]] = {}
    H2D: ClassVar[TransferDirection]
    D2H: ClassVar[TransferDirection]


TransferDirection._define(TransferDirection, H2D=0, D2H=1)


class _LaterFormats(_Member):
    """Home of the members that came after the reference version: ``vars(EngineKVFormat)`` shows that version's."""


class EngineKVFormat(_LaterFormats):
    """Layouts of an engine's paged KV cache."""

    names: ClassVar[dict[str, Any]] = {}


EngineKVFormat._define(
    EngineKVFormat,
    NB_NL_TWO_BS_NH_HS=0,
    NL_X_TWO_NB_BS_NH_HS=1,
    NL_X_NB_TWO_BS_NH_HS=2,
    NL_X_NB_BS_HS=3,
    TWO_X_NL_X_NBBS_NH_HS=4,
    NL_X_NBBS_ONE_HS=5,
    NL_X_TWO_NB_NH_BS_HS=6,
    NL_X_NB_TWO_NH_BS_HS=7,
    NB_NL_TWO_NH_BS_HS=8,
    TWO_X_NL_X_NB_BS_NH_HS=9,
    NL_X_NB_NH_BS_TWO_HS=10,
    NL_X_NB_BS_NH_TWO_HS=11,
)
EngineKVFormat._define(
    _LaterFormats,
    NL_X_NB_NH_BS_CS=12,
    NL_X_NB_BS_NH_CS=13,
    NL_X_NB_BSV_BSS=14,
    NL_X_TWO_NB_NH_ONE_BS_HS=15,
    NL_X_TWO_X_NB_BS_NH_HS=16,
    NL_X_NP_X_NB_BS_ONE_HS=17,
    NL_X_NB_BS_NH_HS=18,
)
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
    if not 0 <= value < len(EngineKVFormat):
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


_CROSS_LAYER, _KV_LIST, _MLA = (0, 8), (4, 9), (3, 5, 14, 17)


def _asked(engine_kv_format: Any, later: Any) -> int:
    """The format of a predicate, under either of its names."""
    if engine_kv_format is not None and later is not None:
        raise TypeError("engine_kv_format and format are two names of one argument, both were given")
    return format_of(engine_kv_format if later is None else later)


# Later versions of LMCache call the argument `format`.
def is_cross_layer(engine_kv_format: Any = None, *, format: Any = None) -> bool:
    """Whether all layers lie in one tensor."""
    return _asked(engine_kv_format, format) in _CROSS_LAYER


def is_kv_list(engine_kv_format: Any = None, *, format: Any = None) -> bool:
    """Whether keys and values are two lists of tensors."""
    return _asked(engine_kv_format, format) in _KV_LIST


def is_layer_list(engine_kv_format: Any = None, *, format: Any = None) -> bool:
    """Whether there is one entry per layer."""
    return _asked(engine_kv_format, format) not in _CROSS_LAYER + _KV_LIST


def is_mla(engine_kv_format: Any = None, *, format: Any = None) -> bool:
    """Whether a token is one row of one plane."""
    return _asked(engine_kv_format, format) in _MLA


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
