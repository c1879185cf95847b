"""One reading of tensors: a letter for every axis of theirs and for every level of lists, and the layout that follows.

Nothing is inferred here. Strides are followed, whatever they are, as long as the elements of a head are dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod

from kvraw.errors import LayoutError
from kvraw.layouts.engine_shapes import HINTS, KV_LAYOUTS, KV_LISTS, LETTERS, PRODUCTS
from kvraw.layouts.formats import Format, every_format
from kvraw.layouts.geometry import CacheLayout, Geometry

__all__ = ["Hints", "Memory", "Reading", "Spelling", "list_sizes", "one_of", "read"]


def one_of(name: str, value: str | None, allowed: Iterable[str]) -> None:
    """Raise `LayoutError` where a hint is none of its values."""
    if value is not None and value not in allowed:
        raise LayoutError(f"{name} is {value!r}, must be one of {', '.join(map(repr, allowed))}")


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints, checked on their own."""

    kv_layout: str | None = None
    block_size: int | None = None
    num_heads: int | None = None
    head_size: int | None = None
    planes: int | None = None
    kv_list_layout: str | None = None

    def __post_init__(self) -> None:
        for name in HINTS.values():
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise LayoutError(f"{name} is {value}, must be positive")
        one_of("kv_layout", self.kv_layout, KV_LAYOUTS)
        one_of("kv_list_layout", self.kv_list_layout, KV_LISTS)
        if self.planes not in (None, 1, 2):
            raise LayoutError(f"planes is {self.planes}, must be 1 or 2")

    def __str__(self) -> str:
        given = asdict(self)
        return ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None) or "no hints"


@dataclass(frozen=True, slots=True)
class Memory:
    """Shape, strides and element size that all tensors share, and the lengths of the list levels."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    levels: tuple[int, ...]

    @property
    def order(self) -> list[int]:
        """The axes larger than 1, outermost in memory first."""
        return sorted((i for i, n in enumerate(self.shape) if n > 1), key=lambda i: -self.strides[i])


@dataclass(frozen=True, slots=True)
class Spelling:
    """Letters for the list levels and for the axes of a tensor as it is shaped.

    Attributes
    ----------
    lists : str
        Outermost first: ``"PL"`` is two levels of lists, or one list with all K first, then all V.
    dims : str
        As in `kvraw.layouts.engine_shapes.EngineShape.dims`.
    form : Format or None
        The format that it is meant as; None: whichever has this order in memory.
    """

    lists: str
    dims: str
    form: Format | None = None

    def __str__(self) -> str:
        return self.dims if self.lists in ("", "L") else f"{self.lists}/{self.dims}"


@dataclass(frozen=True, slots=True)
class Reading:
    """Tensors as a spelling reads them; `layout` is None where `missing` hints are needed for that.

    Attributes
    ----------
    sizes, steps : dict
        Size and byte stride of every axis.
    split : int
        Bytes from K to V where they are two halves of one tensor that the format takes as two; else 0.
    """

    spelling: Spelling
    sizes: Mapping[str, int] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    layout: CacheLayout | None = None
    missing: tuple[str, ...] = ()
    split: int = 0

    @property
    def same(self) -> object:
        """A key that is equal where every token of every layer, plane and head lies at the same address."""
        if self.layout is None:
            return self.spelling
        named = [(a, n, self.steps.get(a, 0)) for a in "LPBTHD" if (n := self.sizes.get(a, 1)) > 1]
        return tuple(named), self.layout.geometry.planes, "".join(a for a in self.spelling.lists if self.sizes[a] > 1)


def list_sizes(letters: str, levels: tuple[int, ...]) -> dict[str, int] | None:
    """Sizes of the axes that are lists, or None where the lists do not fit."""
    if len(letters) == len(levels):
        sizes = dict(zip(letters, levels, strict=True))
    elif len(levels) == 1 and set(letters) == {"P", "L"} and levels[0] % 2 == 0:
        sizes = {"P": 2, "L": levels[0] // 2}
    elif set(levels) <= {1}:
        sizes = dict.fromkeys(letters, 1)
    else:
        return None
    return None if sizes.get("P", 2) != 2 else sizes


def _split(letter: str, size: int, sizes: dict[str, int], hints: Hints) -> tuple[str, ...]:
    """Split a product of axes into `sizes` by the hints; the hints that are missing for that."""
    known = {axis: getattr(hints, HINTS[axis]) for axis in PRODUCTS[letter] if axis in HINTS}
    known = {axis: value for axis, value in known.items() if value is not None}
    unknown = [axis for axis in PRODUCTS[letter] if axis not in known]
    if len(unknown) > 1:
        return tuple(HINTS[axis] for axis in unknown if axis in HINTS)
    step = prod(known.values())
    if size % step or (not unknown and size != step):
        product = " * ".join(f"{HINTS[axis]}={value}" for axis, value in known.items())
        raise LayoutError(f"{LETTERS[letter]} is {size}, must be {'a multiple of ' if unknown else ''}{product}")
    sizes.update(known | dict.fromkeys(unknown, size // step))
    return ()


def _fuse(sizes: dict[str, int], steps: dict[str, int], hints: Hints, itemsize: int) -> None:
    """K and V of a head side by side: two planes or one head of twice the size, as `planes` says."""
    if "W" in sizes:
        width, half = sizes.pop("W"), 0
        sizes["D"], steps["D"] = width, steps.pop("W")
    else:
        half, width = steps.pop("2"), 2 * sizes["D"]
    if (hints.planes or 1) == 2:
        if width % 2:
            raise LayoutError(f"K and V side by side are {width} elements, must be even for planes=2")
        sizes |= {"P": 2, "D": width // 2}
        steps["P"] = half or width // 2 * itemsize
    elif half and half != width // 2 * itemsize:
        raise LayoutError(f"K and V of a head are {half} bytes apart, must be {width // 2 * itemsize}: pass planes=2")
    else:
        sizes["D"] = width
        steps["D"] = itemsize


def read(spelling: Spelling, memory: Memory, hints: Hints) -> Reading:
    """The reading of tensors by a spelling.

    Raises
    ------
    LayoutError
        The tensors cannot be so, or the hints say otherwise.
    """
    lists = list_sizes(spelling.lists, memory.levels)
    if lists is None:
        raise LayoutError(f"lists of {memory.levels} tensors cannot be {spelling.lists!r}")
    sizes, steps = dict(lists), {}
    missing: tuple[str, ...] = ()
    for at, (letter, size, step) in enumerate(zip(spelling.dims, memory.shape, memory.strides, strict=True)):
        must = {"1": 1, "2": 2, "P": 1 if size == 1 and spelling.form is None else 2}.get(letter, size)
        if size != must:
            raise LayoutError(f"axis {at} has {size} where {must} must be")
        if letter in PRODUCTS:
            missing += (lacking := _split(letter, size, sizes, hints))
            for axis in reversed("" if lacking else PRODUCTS[letter]):
                steps[axis], step = step, step * sizes[axis]
        elif letter == "2":
            steps["2"] = step
        elif letter != "1":
            sizes[letter], steps[letter] = size, step
    fused = bool(set(spelling.dims) & {"2", "W"})
    planes = (hints.planes or 1) if fused else sizes.get("P", 1)
    if hints.planes not in (None, planes):
        raise LayoutError(f"has {planes} plane(s), planes is {hints.planes}")
    if missing:
        return Reading(spelling, missing=missing)
    if fused:
        _fuse(sizes, steps, hints, memory.itemsize)
    if sizes["D"] > 1 and steps["D"] != memory.itemsize:
        raise LayoutError(f"the elements of a head are {steps['D']} bytes apart, must be dense: {memory.itemsize}")
    for axis, name in HINTS.items():
        hint, size = getattr(hints, name), sizes.get(axis, 1)
        half = axis == "D" and planes == 1 and hint is not None and size == 2 * hint
        if half and (fused or (spelling.form is not None and spelling.form.paired)):
            continue
        if hint not in (None, size):
            raise LayoutError(f"gives {name} {size}, the hint {name} is {hint}")
    layers, blocks, tokens, heads, width = (sizes.get(axis, 1) for axis in "LBTHD")
    geometry = Geometry(layers, blocks, tokens, heads, width, memory.itemsize, planes)
    form = spelling.form
    if form is None or not _ordered(form, sizes, steps):
        form = _format(spelling, sizes, steps)
    layout, split = _layout(form, geometry, sizes, steps, memory)
    return Reading(spelling, sizes, steps, layout, split=split)


def _layout(
    form: Format, geometry: Geometry, sizes: Mapping[str, int], steps: Mapping[str, int], memory: Memory
) -> tuple[CacheLayout, int]:
    """The layout: as the format has it where the tensors are dense, else with strides of its own."""
    layout = CacheLayout(form, geometry)
    own = {a: n for a, n in steps.items() if a not in form.pointers}
    split = steps["P"] if "P" in form.pointers and "P" in steps and sizes["P"] > 1 else 0

    def unlike(layout: CacheLayout) -> list[str]:
        tight = layout.strides()
        return [a for a in own if sizes[a] > 1 and own[a] != tight[a]]

    gaps = unlike(layout)
    if gaps == ["B"] and layout.axes[0] == "B" and own["B"] > layout.strides()["B"]:
        layout = CacheLayout(form, replace(geometry, block_stride=own["B"]))
    elif gaps:
        # The stride of an axis of size 1 means nothing: it is not followed.
        given = tuple((a, own[a] if sizes[a] > 1 else layout.strides()[a]) for a in layout.axes if a in own)
        layout = CacheLayout(form, geometry, given)
    return layout, split


def _order(sizes: Mapping[str, int], steps: Mapping[str, int], pointers: str) -> str:
    """The axes of a tensor that are larger than 1, outermost in memory first."""
    return "".join(sorted((a for a in steps if sizes[a] > 1 and a not in pointers), key=lambda a: -steps[a]))


def _ordered(form: Format, sizes: Mapping[str, int], steps: Mapping[str, int]) -> bool:
    axes = form.axes_for(sizes.get("P", 1)) or form.axes
    return _order(sizes, steps, form.pointers) == "".join(a for a in axes if sizes.get(a, 1) > 1)


def _format(spelling: Spelling, sizes: Mapping[str, int], steps: Mapping[str, int]) -> Format:
    """The known format with this order in memory, or one that has only this."""
    lists = spelling.lists
    axes = {a for a in steps if a not in lists and not (a == "P" and sizes["P"] == 1)}
    if "L" not in lists and "L" not in axes:
        lists += "L"  # one tensor of one layer is a list of one
    for form in every_format():
        fits = (
            form.pointers == lists
            and not (form.flat or form.several)
            and set(form.axes_for(sizes.get("P", 1)) or "") == axes
        )
        if fits and _ordered(form, sizes, steps):
            return form
    order = "".join(sorted(axes, key=lambda a: (sizes[a] > 1, steps[a], "LBPTHD".index(a)), reverse=True))
    return Format(-1, f"axes {lists}/{order}", lists, order)
