"""An engine's paged cache as a call describes it: addresses, and one or more layouts over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from kvraw import config
from kvraw.adapters.lmcache._launch import Copies
from kvraw.adapters.lmcache._memo import cached_by_tensors
from kvraw.adapters.lmcache._types import ArgumentError
from kvraw.adapters.tensors import flatten
from kvraw.arrays import U64, is_pointer, pointer_vector
from kvraw.cache import require_host, views_of
from kvraw.copying.addresses import resolve
from kvraw.copying.plan import Side
from kvraw.errors import LayoutError, PlacementError
from kvraw.layouts.formats import FORMATS, Format
from kvraw.layouts.geometry import CacheLayout, Geometry
from kvraw.layouts.parts import Part, parts_of, read_parts
from kvraw.memo import Memo
from kvraw.plain import require_memory
from kvraw.prepared import PreparedCopy, Reached
from kvraw.runtime.context import DeviceScope, at_reset
from kvraw.runtime.memory import locate

__all__ = [
    *("Counts", "Paged", "addresses_of", "from_pointers", "from_tensors", "interned", "is_tensor"),
]

_ENDLESS = 1 << 31  # blocks, where the caller does not say how many there are

_INDEX = {"block": "block_ids", "slot": "slot_mapping"}  # what callers name the ids

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a call; `stride` is elements from block to block, 0 for tight."""

    layers: int
    planes: int
    blocks: int
    block_size: int
    heads: int
    head_size: int
    element: int
    stride: int = 0


@dataclass(eq=False)
class Paged:
    """A paged cache and all that was made ready for it."""

    addresses: U64
    parts: tuple[Part, ...]
    device: int | None
    number: int  # of its format
    plans: Memo[tuple[object, ...], Any] = field(default_factory=lambda: Memo(256))
    tables: list[Reached] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether one layout covers whole rows."""
        return len(self.parts) == 1 and not self.parts[0].at

    @property
    def geometry(self) -> Geometry:
        """Counts of the first part."""
        return self.parts[0].layout.geometry

    @property
    def row(self) -> int:
        """Bytes of a token of one layer and plane."""
        return self.parts[0].row

    @property
    def hidden(self) -> int:
        """Elements of a token of one layer and plane."""
        return self.row // self.geometry.element_size

    def ready(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """What was made for a key before, or is made now."""
        found: T | None = self.plans.get(key)
        if found is None:
            found = self.plans.keep(key, make())
        return found

    def reached(self) -> list[Reached]:
        """The table of each part, looked up once."""
        if not self.tables:
            tables = []
            for part in self.parts:
                bases = part.bases(self.addresses)
                if self.device is None:
                    require_host("paged_buffer_ptrs", bases, 1)
                else:
                    with DeviceScope(self.device):
                        table = resolve(bases)
                    if table.link or table.devices - {self.device}:
                        at = next(k for k, a in enumerate(bases.tolist()) if locate(a, 1).device != self.device)
                        raise PlacementError(
                            f"paged_buffer_ptrs[{at}] is {int(bases[at]):#x}, not memory of device {self.device}"
                        )
                tables.append(Reached(bases, bases, False))
            self.tables = tables
        return self.tables

    def copies(self, by: str, to_host: bool, flat: Callable[[Part], Side], key: object) -> Copies:
        """A prepared copy for each part; `key` tells the flat sides of different calls apart."""

        def make() -> Copies:
            engine, index = config.ENGINE.get(), _INDEX[by]
            each = [
                PreparedCopy(
                    part.plan(flat(part), by, to_host),
                    device=self.device,
                    names=("paged", "objects") if to_host else ("objects", "paged"),
                    index_names=(index, "objects") if to_host else ("objects", index),
                )
                for part in self.parts
            ]
            return Copies(self, to_host, each, index, engine != "copy")

        return self.ready((by, to_host, key), make)


def _planes(form: Format, kv_size: int) -> int:
    """Planes of a format; the fused ones are two planes where the descriptor says so."""
    if form.planes == 2 and kv_size == 1:
        raise ArgumentError(f"kv_size is 1, format {form.number} has 2 planes")
    return 2 if form.fused and kv_size == 2 else form.planes


_known: Memo[tuple[object, ...], Paged] = Memo(256)
at_reset(_known.clear)


def interned(key: tuple[object, ...], make: Callable[[], Paged]) -> Paged:
    """The cache of a key, so that what was made ready for it is found again; the last 256 are kept."""
    found = _known.get(key)
    if found is None:
        found = _known.keep(key, make())
    return found


def from_pointers(number: int, addresses: U64, c: Counts, kv_size: int, device: int | None) -> Paged:
    """A paged cache from base addresses in the format's order, and counts."""

    def make() -> Paged:
        form = FORMATS[number]
        if "K" in form.pointers and len(addresses) != c.layers:
            raise ArgumentError(
                f"format {number} with several planes takes tensors: addresses do not tell their widths"
            )
        blocks = c.blocks if c.blocks > 0 or form.axes[0] != "B" else _ENDLESS
        heads, head_size = (1, c.heads * c.head_size) if form.mla else (c.heads, c.head_size)
        planes, plane = _planes(form, kv_size), form.plane
        geometry = Geometry(c.layers, blocks, c.block_size, heads, head_size, c.element, planes)
        layout, stride = CacheLayout(plane, geometry), c.stride * c.element
        block = geometry.block_size * heads * head_size * c.element
        if stride not in (0, block, layout.strides()[layout.axes[0]]):
            layout = CacheLayout(plane, replace(geometry, block_stride=stride))
        need = layout.pointers
        if len(addresses) < need or not addresses[:need].all():
            raise ArgumentError(
                f"paged_buffer_ptrs has {len(addresses)} addresses, format {number} with {c.layers} layers takes "
                f"{need}, none of them null"
            )
        return Paged(addresses[:need].copy(), parts_of(form, [layout]), device, number)

    return interned((number, addresses.tobytes(), c, kv_size, device), make)


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor, or has its methods."""
    return hasattr(value, "data_ptr") and hasattr(value, "stride")


def from_tensors(number: int, tensors: Any, block_size: int, kv_size: int, device: int | None, row: int = 0) -> Paged:
    """A paged cache from tensors, whose shapes and strides rule.

    `block_size` matters where blocks and tokens are one axis, and `row`, the elements of a token of one layer and
    plane, where a shape can be read in several ways.
    """
    flat = flatten(tensors)
    if not flat or not all(is_tensor(t) for t in flat):
        raise TypeError("the paged cache must hold tensors, or be a 1-D tensor of addresses")
    try:
        seen = tuple((t.data_ptr(), tuple(t.shape), t.stride(), t.element_size()) for t in flat)
    except (RuntimeError, NotImplementedError):  # one without memory
        views_of(tensors, "paged tensors")
        raise

    def make() -> Paged:
        form = FORMATS[number]
        planes = _planes(form, kv_size)
        try:
            addresses, parts = read_parts(
                "paged tensors", views_of(tensors, "paged tensors"), form, block_size=block_size, planes=planes, row=row
            )
        except LayoutError as error:
            raise ArgumentError(str(error)) from None
        return Paged(pointer_vector("paged_buffer_ptrs", addresses), parts, device, number)

    lists = [len(t) for t in tensors if isinstance(t, (list, tuple))] if isinstance(tensors, (list, tuple)) else []
    return interned((number, seen, *lists, block_size, kv_size, device, row), make)


def _host_table(tensor: Any) -> U64:
    """Addresses out of a 1-D int64 or uint64 tensor; one on a device is read once, and again when torch changed it."""
    if len(tensor.shape) != 1 or str(tensor.dtype) not in ("torch.int64", "torch.uint64"):
        raise TypeError(f"a table of addresses has shape {tuple(tensor.shape)} and {tensor.dtype}, must be 1-D int64")
    require_memory("the table of addresses", tensor)
    found: U64 = cached_by_tensors(tensor, ("table",), lambda: tensor.detach().cpu().numpy().view(np.uint64))
    return found


def addresses_of(name: str, given: Any) -> U64 | None:
    """Addresses out of a table or a list of numbers; None where it is neither."""
    if isinstance(given, (list, tuple, np.ndarray)) and len(given) and is_pointer(given[0]):
        return pointer_vector(name, given)
    return _host_table(given) if is_tensor(given) and len(given.shape) == 1 else None
