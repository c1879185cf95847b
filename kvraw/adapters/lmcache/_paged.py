"""An engine's paged cache as a call describes it: addresses, and one or more layouts over them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

import numpy as np

from kvraw import config
from kvraw.adapters.lmcache._launch import Copies
from kvraw.adapters.lmcache._memo import cached_by_tensors
from kvraw.adapters.lmcache._types import ArgumentError
from kvraw.arrays import U64, is_pointer, pointer_vector
from kvraw.cache import require_host
from kvraw.copying.addresses import resolve
from kvraw.copying.plan import CopyPlan, Side
from kvraw.errors import PlacementError
from kvraw.layouts.formats import FORMATS
from kvraw.layouts.geometry import CacheLayout, Geometry
from kvraw.plain import require_memory, require_plain
from kvraw.prepared import PreparedCopy, Reached
from kvraw.runtime import fork
from kvraw.runtime.context import DeviceScope, at_reset
from kvraw.runtime.memory import locate

__all__ = [
    *("Counts", "Paged", "Part", "addresses_of", "from_pointers", "from_tensors", "interned", "is_tensor", "parts_of"),
]

SCALES, INDEXER, PLANES = 4, 14, 17  # bytes of a token's scale; the formats that are several layouts at once
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


@dataclass(frozen=True, slots=True)
class Part:
    """One layout over some of the addresses, and where its bytes lie in an object's row.

    Attributes
    ----------
    layout : CacheLayout
        Its runs.
    first, step : int
        Entries of the table that it uses.
    offset : int
        Bytes behind each of them.
    at, row : int
        Where its bytes begin in a row of an object, and the row's bytes.
    """

    layout: CacheLayout
    first: int = 0
    step: int = 1
    offset: int = 0
    at: int = 0
    row: int = 0

    @property
    def head_bytes(self) -> int:
        """Contiguous bytes of a head."""
        return self.layout.geometry.head_size * self.layout.geometry.element_size

    def bases(self, addresses: U64) -> U64:
        """The part's table."""
        found: U64 = addresses[self.first :: self.step] + np.uint64(self.offset)
        return found

    def plan(self, flat: Side, by: str, to_host: bool) -> CopyPlan:
        """The copy between the cache and a row of objects."""
        g, paged = self.layout.geometry, self.layout.side(by)
        src, dst = (paged, flat) if to_host else (flat, paged)
        tokens = 1 if by == "slot" else g.block_size
        return CopyPlan(src, dst, g.layers, g.planes, tokens, g.heads, self.head_bytes)


@dataclass(eq=False)
class Paged:
    """A paged cache and all that was made ready for it."""

    addresses: U64
    parts: tuple[Part, ...]
    device: int | None
    plans: dict[tuple[object, ...], Any] = field(default_factory=dict)
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

    def ready(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """What was made for a key before, or is made now."""
        found: T | None = self.plans.get(key)
        if found is None:
            if len(self.plans) > 256:
                self.plans.clear()
            found = self.plans[key] = make()
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


def _planes(number: int, kv_size: int) -> int:
    """Planes of a format; the fused ones are two planes where the descriptor says so."""
    if number in (10, 11) and kv_size == 2:
        return 2
    planes = 1 if number in (INDEXER, PLANES) else FORMATS[number].planes
    if planes == 2 and kv_size == 1:
        raise ArgumentError(f"kv_size is 1, format {number} has 2 planes")
    return planes


def parts_of(
    number: int, c: Counts, given: tuple[tuple[str, int], ...] = (), widths: Sequence[tuple[int, int]] = ()
) -> Any:
    """The layouts of a format; `widths` are those of the planes of a layer: elements, and bytes of each."""
    if number == INDEXER:
        # A block holds all its values, then all its scales; a row of an object holds a token's values and its scale.
        row = c.heads * c.head_size * c.element
        values = row - SCALES
        block = dict(given).get("B") or (c.stride or c.block_size * c.heads * c.head_size) * c.element
        pieces = ((0, 0, values), (c.block_size * values, values, SCALES))
        return tuple(
            Part(
                CacheLayout(
                    FORMATS[3],
                    Geometry(c.layers, c.blocks, c.block_size, 1, width, 1, planes=1),
                    (("B", block), ("T", width), ("D", 1)),
                ),
                offset=offset,
                at=at,
                row=row,
            )
            for offset, at, width in pieces
        )
    if number == PLANES:
        row, at, parts = sum(n * size for n, size in widths), 0, []
        for k, (width, size) in enumerate(widths):
            geometry = Geometry(c.layers, c.blocks, c.block_size, 1, width, size, planes=1)
            parts.append(Part(CacheLayout(FORMATS[3], geometry), k, len(widths), at=at, row=row))
            at += width * size
        return tuple(parts)
    form = FORMATS[number]
    heads, head_size = (1, c.heads * c.head_size) if form.mla else (c.heads, c.head_size)
    geometry = Geometry(c.layers, c.blocks, c.block_size, heads, head_size, c.element, planes=c.planes)
    layout = CacheLayout(form, geometry, given)
    inner = c.block_size * c.heads * c.head_size
    if c.stride and not given and c.stride * c.element not in (inner * c.element, layout.strides()[layout.axes[0]]):
        layout = CacheLayout(form, replace(geometry, block_stride=c.stride * c.element))
    return (Part(layout, row=heads * head_size * c.element),)


_lock = fork.lock()
_known: OrderedDict[tuple[object, ...], Paged] = OrderedDict()
at_reset(_known.clear)


def interned(key: tuple[object, ...], make: Callable[[], Paged]) -> Paged:
    """The cache of a key, so that what was made ready for it is found again; the last 256 are kept."""
    found = _known.get(key)
    if found is None:
        found = make()
        with _lock:
            _known[key] = found
            while len(_known) > 256:
                _known.popitem(last=False)
    return found


def from_pointers(number: int, addresses: U64, c: Counts, kv_size: int, device: int | None) -> Paged:
    """A paged cache from base addresses in the format's order, and counts."""

    def make() -> Paged:
        if number == PLANES:
            if len(addresses) != c.layers:
                raise ArgumentError("format 17 with several planes takes tensors: addresses do not tell their widths")
            widths = [(c.heads * c.head_size, c.element)]
        else:
            widths = []
        blocks = c.blocks
        if blocks <= 0 and (number == INDEXER or FORMATS[number].axes[0] == "B"):
            blocks = _ENDLESS
        parts = parts_of(number, replace(c, planes=_planes(number, kv_size), blocks=blocks), widths=widths)
        need = sum(p.layout.pointers for p in parts) if number != INDEXER else c.layers
        if len(addresses) < need or not addresses[:need].all():
            raise ArgumentError(
                f"paged_buffer_ptrs has {len(addresses)} addresses, format {number} with {c.layers} layers takes "
                f"{need}, none of them null"
            )
        return Paged(addresses[:need].copy(), parts, device)

    return interned((number, addresses.tobytes(), c, kv_size, device), make)


# Axes that tensors of each format may have, letters as in `kvraw.layouts.formats`, D a token's row where there
# is no H; S is blocks * block_size, 2 and 1 are axes of that size.
_DIMS: dict[int, tuple[str, ...]] = {
    0: ("BLPTHD", "BLPTD"), 1: ("PBTHD", "PSHD", "PBTD", "PSD"), 2: ("BPTHD", "BPTD"), 3: ("BTD", "BT1D", "SD"),
    4: ("SHD", "BTHD", "BTD", "SD"), 5: ("S1D", "BTD", "BT1D", "SD"), 6: ("PBHTD",), 7: ("BPHTD",), 8: ("BLPHTD",),
    9: ("BTHD", "SHD", "BTD", "SD"), 10: ("BHTD", "BHT2D"), 11: ("BTHD", "BTH2D", "SH2D", "SHD", "BTD", "SD"),
    12: ("BHTD",), 13: ("BTHD", "SHD", "BTD", "SD"), 14: ("BTD",), 15: ("PBH1TD",),
    16: ("BTHD", "SHD", "BTD", "SD"), 17: ("BT1D", "BTD"), 18: ("BTHD", "SHD", "BTD", "SD"),
}  # fmt: skip
_FIXED = {"P": 2, "2": 2, "1": 1}


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor, or has its methods."""
    return hasattr(value, "data_ptr") and hasattr(value, "stride")


def _flatten(tensors: Any) -> list[Any]:
    return [x for t in tensors for x in _flatten(t)] if isinstance(tensors, (list, tuple)) else [tensors]


def _dims(number: int, shape: tuple[int, ...], halves: bool, row: int) -> str:
    """The axes of a tensor: of those that fit its shape, the ones whose tokens have `row` elements, else the first."""
    fit = [
        dims
        for dims in _DIMS[number]
        if len(dims) == len(shape)
        and all(n == _FIXED.get(a, n) for a, n in zip(dims, shape, strict=True))
        and ("H" in dims or not halves)
    ]
    if not fit:
        raise ArgumentError(
            f"format {number} takes tensors {' or '.join(_DIMS[number])}, not of shape {shape} (B blocks, T tokens of "
            f"a block, S both, L layers, P planes, H heads, D elements)"
        )
    row *= 1 + halves
    rows = (prod(n for a, n in zip(dims, shape, strict=True) if a in "HD2") for dims in fit)
    return next((dims for dims, found in zip(fit, rows, strict=True) if found == row), fit[0])


def _axes(number: int, tensor: Any, block_size: int, planes: int, row: int) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes and byte strides of a tensor's axes."""
    shape, strides, halves = tuple(tensor.shape), tensor.stride(), planes == 2 and number in (10, 11)
    dims, unit = _dims(number, shape, halves, row), tensor.element_size()
    size, step = {"L": 1, "H": 1}, {}
    for letter, count, stride in zip(dims, shape, strides, strict=True):
        size[letter], step[letter] = int(count), int(stride) * unit
    if "S" in size:
        if block_size <= 0 or size["S"] % block_size:
            raise ArgumentError(f"a tensor holds {size['S']} tokens, must be whole blocks of {block_size}")
        size["B"], size["T"] = size.pop("S") // block_size, block_size
        step["T"] = step.pop("S")
        step["B"] = step["T"] * block_size
    if "2" in size:
        size.pop("2")
        half = step.pop("2")
        if planes == 2:
            step["P"] = half
        elif half != size["D"] * step["D"]:
            raise ArgumentError("the halves of a fused tensor lie apart, must be one row")
        else:
            size["D"] *= 2
    elif halves:
        size["D"] //= 2
        step["P"] = size["D"] * unit
    if size["D"] > 1 and step["D"] != unit:
        raise ArgumentError(f"the last axis of a tensor has a stride of {step['D']} bytes, must be dense")
    step.pop("1", None)
    return size, {**step, "D": unit}


def _require_plain(tensors: Sequence[Any]) -> None:
    for at, tensor in enumerate(tensors):
        require_plain(f"paged tensor {at}", tensor)


def from_tensors(number: int, tensors: Any, block_size: int, kv_size: int, device: int | None, row: int = 0) -> Paged:
    """A paged cache from tensors, whose shapes and strides rule.

    `block_size` matters where blocks and tokens are one axis, and `row`, the elements of a token of one layer and
    plane, where a shape can be read in several ways.
    """
    flat = _flatten(tensors)
    if not flat or not all(is_tensor(t) for t in flat):
        raise TypeError("the paged cache must hold tensors, or be a 1-D tensor of addresses")
    depth = len(tensors[0]) if number == PLANES and isinstance(tensors[0], (list, tuple)) else 1
    try:
        seen = tuple((t.data_ptr(), tuple(t.shape), t.stride(), t.element_size()) for t in flat)
    except (RuntimeError, NotImplementedError):  # one without memory
        _require_plain(flat)
        raise

    def make() -> Paged:
        _require_plain(flat)
        addresses = pointer_vector("paged_buffer_ptrs", [s[0] for s in seen])
        for at, one in enumerate(seen):
            if one[1:] != seen[at % depth][1:]:
                raise ArgumentError(f"tensor {at} has shape, strides {one[1:3]}, tensor {at % depth} others")
        planes = _planes(number, kv_size)
        size, step = _axes(number, flat[0], block_size, planes, row)
        element = flat[0].element_size()
        if number == INDEXER and size["T"] > 1 and step["T"] != size["D"] * element:
            raise ArgumentError(f"tokens of a page lie {step['T']} bytes apart, must be {size['D'] * element}")
        layers = size["L"] if number in (0, 8) else len(flat) // (depth if number == PLANES else 1)
        if number in (4, 9, 16):
            layers //= 2
        c = Counts(layers, planes, size["B"], size["T"], size["H"], size["D"], element)
        given = tuple((a, s) for a, s in step.items())
        if number == PLANES:
            axes = [_axes(number, t, block_size, 1, 0) for t in flat[:depth]]
            for at, (sizes, _) in enumerate(axes):
                if (sizes["B"], sizes["T"]) != (c.blocks, c.block_size):
                    raise ArgumentError(
                        f"plane {at} has {sizes['B']} blocks of {sizes['T']} tokens, must have {c.blocks} of "
                        f"{c.block_size} as plane 0"
                    )
            widths = [(int(t.shape[-1]), int(t.element_size())) for t in flat[:depth]]
            parts = tuple(
                replace(p, layout=replace(p.layout, given=tuple(steps.items())))
                for p, (_, steps) in zip(parts_of(number, c, widths=widths), axes, strict=True)
            )
        else:
            parts = parts_of(number, c, given)
            g = parts[0].layout.geometry
            tight = replace(parts[0].layout, given=()) if number != INDEXER else None
            sizes = g.axis_sizes(g.block_size)
            if tight is not None and all(sizes[a] == 1 or step[a] == tight.strides()[a] for a in tight.axes):
                parts = (replace(parts[0], layout=tight),)
        return Paged(addresses, parts, device)

    return interned((number, seen, depth, block_size, kv_size, device, row), make)


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
