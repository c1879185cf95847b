"""From tensors to a format and a geometry: what was handed in, how its memory is ordered, and what the hints say.

Strides decide, logical shape does not. Dimensions larger than 1, sorted by stride, are the physical order. Nothing is
copied; what is not dense is refused, except padding between blocks that are the outermost axis.

The stride of a dimension of size 1 is never used to address memory, so its place is a matter of convention. The rule:

1. Every placement of the size-1 dimensions among a format's axes is read, and the hints strike out what contradicts
   them. Readings that address the same bytes are one reading. Two that differ in whether ``T`` or ``H`` is the 1 move
   the same bytes per block: the heads are the 1 then, and of NHD and HND the format is NHD, unless a hint says
   otherwise.
2. Where readings with different meanings are left, the size-1 dimension's stride is taken as evidence: every array that
   was ever contiguous gives it the stride of the dimension directly outside, and a transpose keeps that, so any
   permutation of the same memory is read alike. A stride that fits no place says nothing: such a dimension stays
   directly inside the one that precedes it logically. A stride of one element may mean either, as DLPack writes it for
   every size-1 dimension: both are read, and a head of more than one element is the likelier.
3. What is left after that cannot be told apart: an error names the hints that settle it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import prod
from typing import Any, Protocol, TypeAlias

from kvraw.errors import LayoutError
from kvraw.formats import Format
from kvraw.handed_in import ENGINES, HALVES, HINTS, KV_LAYOUTS, KV_LISTS, LETTERS, PRODUCTS, ROWS, Row
from kvraw.layout import CacheLayout, Geometry, find_format

__all__ = ["Discovery", "Tensors", "View", "discover"]


class View(Protocol):
    """What discovery asks of a tensor; strides are in bytes."""

    @property
    def address(self) -> int: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def strides(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def itemsize(self) -> int: ...  # noqa: D102


Tensors: TypeAlias = "View | Sequence[View] | Sequence[Sequence[View]]"


@dataclass(frozen=True, slots=True)
class Discovery:
    """A layout, and the addresses that it takes in the order of its format's ``pointers``."""

    layout: CacheLayout
    addresses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Hints:
    """The hints, checked on their own."""

    kv_layout: str | None
    block_size: int | None
    num_heads: int | None
    head_size: int | None
    planes: int | None
    kv_list_layout: str | None

    def __post_init__(self) -> None:
        for name in HINTS.values():
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise LayoutError(f"{name} is {value}, must be positive")
        _one_of("kv_layout", self.kv_layout, KV_LAYOUTS)
        _one_of("kv_list_layout", self.kv_list_layout, KV_LISTS)
        if self.planes not in (None, 1, 2):
            raise LayoutError(f"planes is {self.planes}, must be 1 or 2")

    def __str__(self) -> str:
        given = asdict(self)
        return ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None) or "no hints"


@dataclass(frozen=True, slots=True)
class _Memory:
    """The physical order of a tensor, outermost first.

    `sizes` leaves the size-1 dimensions out, `placed` has them where their strides may put them; `padded` is the
    outermost stride where it is more than dense.
    """

    sizes: tuple[int, ...]
    placed: tuple[tuple[int, ...], tuple[int, ...]]
    itemsize: int
    padded: int


@dataclass(frozen=True, slots=True)
class _Reading:
    """A row with every axis given a size; `layout` is None where `missing` hints are needed for that."""

    row: Row
    dims: tuple[int, ...]
    layout: CacheLayout | None
    missing: tuple[str, ...] = ()

    def same(self) -> object:
        """A key that is equal where the same bytes are addressed for every layer, plane and block."""
        if self.layout is None:
            return self.row.format
        geometry, strides = self.layout.geometry, self.layout.strides()
        sizes = geometry.axis_sizes(geometry.block_size)
        long = [axis for axis in "BLPTH" if sizes[axis] > 1]
        # One of T and H alone is named alike: a block of n tokens of one head is one of one token of n heads.
        named = [("T" if axis == "H" and "T" not in long else axis, sizes[axis], strides[axis]) for axis in long]
        return tuple(named), geometry.head_size, "".join(x for x in self.row.format.pointers if sizes[x] > 1)

    def value(self, hint: str) -> object:
        """What `hint` would say for this reading."""
        if hint == "format":
            return self.row.format.number if self.row.format.number >= 0 else self.row.format.name
        if hint == "kv_layout":
            return None if self.row.format.mla else "HND" if self.row.format.hnd else "NHD"
        if hint == "kv_list_layout":
            return self.row.lists.split()[-1]
        assert self.layout is not None
        return getattr(self.layout.geometry, "heads" if hint == "num_heads" else hint)

    def __str__(self) -> str:
        assert self.layout is not None
        g = self.layout.geometry
        counts = f"blocks={g.blocks}, block_size={g.block_size}, num_heads={g.heads}, head_size={g.head_size}"
        return f"{self.row.label} ({self.row.format.name}: layers={g.layers}, planes={g.planes}, {counts})"


def _one_of(name: str, value: str | None, allowed: Iterable[str]) -> None:
    if value is not None and value not in allowed:
        raise LayoutError(f"{name} is {value!r}, must be one of {', '.join(map(repr, allowed))}")


def _flatten(tensors: Tensors) -> tuple[tuple[int, ...], dict[str, View]]:
    """The lengths of the list levels, and the tensors by the name that errors call them."""
    levels: tuple[int, ...] = ()
    found: dict[str, Any] = {"tensors": tensors}
    while any(isinstance(x, Sequence) for x in found.values()):
        told = {name: f"a list of {len(x)}" if isinstance(x, Sequence) else "one tensor" for name, x in found.items()}
        first = next(iter(found))
        for name, text in told.items():
            if text == "a list of 0":
                raise LayoutError(f"{name} is an empty list, must hold one tensor or more")
            if len(levels) == 2 and text != "one tensor":
                raise LayoutError(f"{name} is {text}, must be one tensor: lists nest two deep at most")
            if text != told[first]:
                raise LayoutError(f"{name} is {text}, {first} is {told[first]}: must be alike")
        levels += (len(found[first]),)
        found = {f"{name}[{i}]": x for name, part in found.items() for i, x in enumerate(part)}
    return levels, found


def _told(name: str, view: View) -> str:
    return f"{name} (shape {tuple(view.shape)}, strides {tuple(view.strides)} bytes, itemsize {view.itemsize})"


def _physical(views: dict[str, View]) -> _Memory:
    """The physical order that all tensors share."""
    (first, view), *others = views.items()
    shape, strides = tuple(view.shape), tuple(view.strides)
    for name, other in others:
        alike = tuple(other.shape) == shape and other.itemsize == view.itemsize
        if not alike or any(n != 1 and a != b for n, a, b in zip(shape, strides, other.strides, strict=True)):
            raise LayoutError(f"{_told(name, other)} differs from {_told(first, view)}: all must be alike")
    if 0 in shape:
        raise LayoutError(f"{_told(first, view)} has no elements")
    order = sorted((i for i, n in enumerate(shape) if n > 1), key=lambda i: -strides[i])
    padded, unit = 0, view.itemsize
    for i in reversed(order):
        if strides[i] <= 0:
            why = "an expanded dimension" if strides[i] == 0 else "a reversed dimension"
            raise LayoutError(f"{_told(first, view)}: dimension {i} has stride {strides[i]}, {why}; must be positive")
        if strides[i] != unit:
            if i != order[0] or strides[i] < unit:
                raise LayoutError(
                    f"{_told(first, view)}: dimension {i} has stride {strides[i]}, dense memory has {unit} there; "
                    "accepted is any permutation of a contiguous tensor, padded at most between outermost blocks"
                )
            padded = strides[i]
        unit = strides[i] * shape[i]
    placed = _placed(shape, strides, order[:-1], unit), _placed(shape, strides, order, unit)
    return _Memory(tuple(shape[i] for i in order), placed, view.itemsize, padded)


def _placed(shape: tuple[int, ...], strides: tuple[int, ...], order: list[int], extent: int) -> tuple[int, ...]:
    """The physical shape with every size-1 dimension inside one of `order` of its stride, or its logical neighbour."""
    outside = {strides[i]: i for i in order}
    placed = sorted((i for i, n in enumerate(shape) if n > 1), key=lambda i: -strides[i])
    for i, size in enumerate(shape):
        if size == 1:
            before = -1 if strides[i] >= extent else outside.get(strides[i], i - 1)
            placed.insert(placed.index(before) + 1 if before >= 0 else 0, i)
    return tuple(shape[i] for i in placed)


def _counts(given: str, levels: tuple[int, ...], asked: bool) -> dict[str, int] | None:
    """Sizes of the axes that are lists, or None where the lists do not fit."""
    letters = given.split(",") if given else []
    if asked and len(levels) != len(letters) and set(levels) <= {1}:
        levels = (1,) * len(letters)  # a format that was asked for takes its one tensor bare or alone in a list
    if len(letters) != len(levels):
        return None
    counts = {}
    for axes, n in zip(letters, levels, strict=True):
        rest = n
        if "P" in axes:
            counts["P"], rest, odd = 2, n // 2, n % 2
            if odd:
                return None
        if "L" in axes:
            counts["L"] = rest
        elif rest != 1:
            return None
    return counts


def _solve(letter: str, size: int, sizes: dict[str, int], hints: _Hints) -> tuple[str, ...]:
    """Split a product of axes into `sizes` by the hints; the hints that are missing for that."""
    known = {axis: getattr(hints, HINTS[axis]) for axis in PRODUCTS[letter] if axis in HINTS}
    known = {axis: value for axis, value in known.items() if value is not None}
    unknown = [axis for axis in PRODUCTS[letter] if axis not in known]
    if len(unknown) > 1:
        return tuple(HINTS[axis] for axis in unknown if axis in HINTS)
    step = prod(known.values())
    if size % step or (not unknown and size != step):
        told = " * ".join(f"{HINTS[axis]}={value}" for axis, value in known.items())
        raise LayoutError(f"{LETTERS[letter]} is {size}, must be {'a multiple of ' if unknown else ''}{told}")
    sizes.update(known | dict.fromkeys(unknown, size // step))
    return ()


def _read(row: Row, dims: tuple[int, ...], counts: dict[str, int], memory: _Memory, hints: _Hints) -> _Reading:
    """The row with these sizes; a LayoutError says why they cannot be."""
    form, sizes = row.format, dict(counts)
    missing: tuple[str, ...] = ()
    for letter, size in zip(row.dims, dims, strict=True):
        must = {"1": 1, "2": 2, "P": 2}.get(letter, size)
        if size != must:
            raise LayoutError(f"physical shape {dims} has {size} where {must} must be")
        if letter in PRODUCTS:
            missing += _solve(letter, size, sizes, hints)
        else:
            sizes[letter] = size
    planes = (hints.planes or 1) if form.fused else form.planes
    if hints.kv_layout not in (None, "HND" if form.hnd else "NHD") and form.number >= 0 and not form.mla:
        raise LayoutError(f"is {'HND' if form.hnd else 'NHD'}, kv_layout is {hints.kv_layout!r}")
    if hints.planes not in (None, planes):
        raise LayoutError(f"has {planes} plane(s), planes is {hints.planes}")
    if memory.padded and (form.axes[0] != "B" or row.dims[next(i for i, n in enumerate(dims) if n > 1)] != "B"):
        raise LayoutError(f"the outermost stride is padded to {memory.padded} bytes, only outermost blocks may be")
    if missing:
        return _Reading(row, dims, None, missing)
    if form.fused:
        width = sizes.get("W", 2 * sizes.get("D", 0))
        if width % planes:
            raise LayoutError(f"K and V side by side are {width} elements, must be even for planes={planes}")
        sizes["D"] = width // planes
    for axis, name in HINTS.items():
        hint, size = getattr(hints, name), sizes.get(axis, 1)
        half = axis == "D" and form.number in HALVES and planes == 1 and hint is not None and size == 2 * hint
        if hint not in (None, size) and not half:
            raise LayoutError(f"physical shape {dims} gives {name} {size}, the hint {name} is {hint}")
    layers, blocks, tokens, heads, width = (sizes.get(axis, 1) for axis in "LBTHD")
    geometry = Geometry(layers, blocks, tokens, heads, width, memory.itemsize, planes, memory.padded)
    return _Reading(row, dims, CacheLayout(form, geometry))


def _assignments(row: Row, memory: _Memory) -> Iterator[tuple[int, ...]]:
    """Every way to lay the sizes, in order, on the row's axes, the rest being 1; first as the strides have it."""
    yield memory.placed[0]
    for axes in combinations(range(len(row.dims)), len(memory.sizes)):
        sizes = dict(zip(axes, memory.sizes, strict=True))
        dims = tuple(sizes.get(i, 1) for i in range(len(row.dims)))
        if dims != memory.placed[0]:
            yield dims


def _evident(groups: list[list[_Reading]], memory: _Memory, head_size: int | None) -> list[list[_Reading]]:
    """The groups that the strides of size-1 dimensions speak for, or all of them where they say nothing."""
    widths = {id(group): group[0].layout.geometry.head_size for group in groups if group[0].layout}
    # The hint means one half of a fused head only where it cannot be the whole of it.
    groups = [group for group in groups if head_size in (None, widths.get(id(group), head_size))] or groups
    some = [group for group in groups if any(x.dims in memory.placed for x in group)]
    return [group for group in some if widths.get(id(group)) != 1] or some or groups


def _choose(readings: list[_Reading], memory: _Memory, head_size: int | None, what: str) -> _Reading:
    """The one reading that is left by the rules of this module."""

    def rank(reading: _Reading) -> tuple[bool, int, bool, bool]:
        heads = reading.layout.geometry.heads if reading.layout else 1
        return reading.row.rare, heads, reading.row.format.hnd, reading.dims not in memory.placed

    alike: dict[object, list[_Reading]] = {}
    for reading in sorted(readings, key=rank):
        alike.setdefault(reading.same(), []).append(reading)
    groups = list(alike.values())
    groups = _evident([group for group in groups if not group[0].row.rare] or groups, memory, head_size)
    for first, *_ in groups:
        if first.missing:
            needs = ", ".join(f"{name}=" for name in first.missing)
            raise LayoutError(f"{what}: {first.row.label} is handed in as {first.row.shown}: pass {needs}")
    if len(groups) == 1:
        return groups[0][0]
    options = []
    for hint in ("kv_layout", "block_size", "num_heads", "head_size", "planes", "kv_list_layout", "format"):
        values = [{reading.value(hint) for reading in group} for group in groups]
        every = set().union(*values)
        if len(every) == sum(map(len, values)) and every.isdisjoint({None, "-"}):
            options.append(" or ".join(f"{hint}={group[0].value(hint)!r}" for group in groups))
    readable = "; or ".join(str(group[0]) for group in groups)
    settle = ", or ".join(options) or f"format= and {', '.join(HINTS.values())}, or hand in unpermuted tensors"
    raise LayoutError(f"{what} cannot be told apart: {readable}. To settle it pass {settle}")


def discover(
    tensors: Tensors,
    *,
    format: int | str | Format | None = None,
    engine: str = "vllm",
    kv_layout: str | None = None,
    block_size: int | None = None,
    num_heads: int | None = None,
    head_size: int | None = None,
    kv_list_layout: str | None = None,
    planes: int | None = None,
) -> Discovery:
    """Find the format and the geometry of a paged KV cache.

    Parameters
    ----------
    tensors : View, sequence of View, or sequence of sequences of View
        What the engine hands in, in any permutation of its dimensions.
    format : int, str or Format, optional
        The format, where it is known: only the geometry is derived, and `engine` does not matter.
    engine : str
        ``"vllm"``, ``"sglang"`` or ``"trtllm"``: whose shapes they are.
    kv_layout : str, optional
        ``"NHD"`` or ``"HND"``; not asked of formats without heads.
    block_size, num_heads, head_size : int, optional
        Tokens per block, KV heads, elements per head (for fused formats of one half or of both).
    kv_list_layout : str, optional
        SGLang: a flat list is ``"k_v"``, all K then all V, or ``"unified"``, one entry per layer.
    planes : int, optional
        1 or 2; for fused formats whether K and V are taken apart.

    Raises
    ------
    LayoutError
        The tensors fit no format, contradict the hints, or cannot be told apart: the text names what settles it.
    """
    hints = _Hints(kv_layout, block_size, num_heads, head_size, planes, kv_list_layout)
    _one_of("engine", engine, ENGINES)
    if format is not None:
        form = find_format(format)
        rows = [row for row in ROWS if row.format == form]
        rows = rows or [Row(form, ",".join(form.pointers), form.axes.replace("BT", "S") if form.flat else form.axes)]
        source = rows[0].label
    else:
        if kv_list_layout is not None and engine != "sglang":
            raise LayoutError(f"kv_list_layout is {kv_list_layout!r}, engine is {engine!r}: only 'sglang' has it")
        rows = [x for x in ROWS if engine in x.engines.split() and (kv_list_layout or "-") in x.lists.split()]
        source = f"engine {engine!r}"
    levels, views = _flatten(tensors)
    memory = _physical(views)
    name, view = next(iter(views.items()))
    what = _told(name, view) if len(views) == 1 else f"{len(views)} tensors like {_told(name, view)}"
    fits = [(row, _counts(row.given, levels, format is not None)) for row in rows if len(row.dims) == len(view.shape)]
    if not any(counts is not None for _, counts in fits):
        shown = "; ".join(f"{row.shown} ({row.label})" for row in rows)
        lists = f"a list of {' lists of '.join(map(str, levels))}" if levels else "one tensor"
        raise LayoutError(f"tensors is {lists}, {what}: {source} takes {shown}")
    readings: list[_Reading] = []
    reasons: dict[str, str] = {}  # not the errors: their tracebacks would keep the tensors
    for row, dims, counts in ((x, dims, n) for x, n in fits if n is not None for dims in _assignments(x, memory)):
        try:
            readings.append(_read(row, dims, counts, memory, hints))
        except LayoutError as error:
            reasons.setdefault(f"{row.label}, {row.shown}", str(error))
    if not readings:
        why = "; ".join(f"{label}: {reason}" for label, reason in reasons.items())
        raise LayoutError(f"{what} fits no layout of {source} with {hints}: {why}")
    found = _choose(readings, memory, head_size, what)
    assert found.layout is not None
    addresses = tuple(int(x.address) for x in views.values())
    if "P" in found.row.dims and "P" in found.row.format.pointers:  # K and V are the two halves of the one tensor
        addresses = (addresses[0], addresses[0] + prod(memory.sizes) * memory.itemsize // 2)
    return Discovery(found.layout, addresses)
