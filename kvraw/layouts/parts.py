"""Tensors whose axes stand as their format names them, and formats that are several layouts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from kvraw.copying.plan import CopyPlan, Side
from kvraw.errors import LayoutError
from kvraw.layouts.discovery import Tensors, View, flatten, memory_of
from kvraw.layouts.engine_shapes import shapes_of
from kvraw.layouts.formats import Format
from kvraw.layouts.geometry import CacheLayout, Geometry, copy_plan
from kvraw.layouts.reading import Hints, Reading, Spelling, read

__all__ = ["Part", "parts_of", "read_parts"]


@dataclass(frozen=True, slots=True)
class Part:
    """One layout over some of a cache's addresses, and where its bytes lie in a row: a token of a layer and plane.

    Attributes
    ----------
    layout : CacheLayout
        Its runs.
    first, step : int
        Addresses that it uses.
    offset : int
        Bytes behind each of them.
    at, row : int
        Where its bytes begin in a row outside the cache, and the row's bytes.
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

    def bases(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Its base addresses."""
        found: NDArray[np.uint64] = addresses[self.first :: self.step] + np.uint64(self.offset)
        return found

    def plan(self, flat: Side, by: str, to_host: bool) -> CopyPlan:
        """The copy between the cache and rows outside it."""
        paged = self.layout.side(by)
        return copy_plan(self.layout.geometry, *((paged, flat) if to_host else (flat, paged)), by)


def parts_of(form: Format, layouts: Sequence[CacheLayout]) -> tuple[Part, ...]:
    """The parts of a format, by the layouts of its planes (`Format.plane`): one, but for planes of unlike widths."""
    widths = [x.geometry.heads * x.geometry.head_size * x.geometry.element_size for x in layouts]
    if form.scales:  # a block holds all its tokens' values, then all their scales
        (layout,), (row,) = layouts, widths
        g, block, values = layout.geometry, layout.strides()["B"], row - form.scales
        pieces = ((0, 0, values), (g.block_size * values, values, form.scales))
        return tuple(
            Part(
                CacheLayout(
                    form.plane,
                    Geometry(g.layers, g.blocks, g.block_size, 1, width, 1, planes=1),
                    (("B", block), ("T", width), ("D", 1)),
                ),
                offset=offset,
                at=at,
                row=row,
            )
            for offset, at, width in pieces
        )
    count = len(layouts)
    return tuple(Part(x, k, count, at=sum(widths[:k]), row=sum(widths)) for k, x in enumerate(layouts))


@cache
def _spelled(form: Format) -> tuple[str, ...]:
    """The axes that a tensor may have: as it is handed in, then with blocks and tokens, or heads and elements, as one.

    One head of one plane may be an axis.
    """
    found = [shape.dims for shape in shapes_of(form) if "F" not in shape.dims]
    merges = [("S", "BT"), ("BT", "S"), ("HD", "D"), ("HW", "W"), *([("1D", "D"), ("TD", "T1D")] * form.mla)]
    if not form.several:
        for dims in found:
            found += [one for pair in merges if (one := dims.replace(*pair)) not in found]
    return tuple(found)


def _read(
    form: Format, views: dict[str, View], levels: tuple[int, ...], block_size: int, apart: bool, row: int
) -> Reading:
    """The reading whose tokens have `row` elements, else the first that fits the shape."""
    memory = memory_of(views, levels)
    shape, must = memory.shape, {"P": 2, "2": 2, "1": 1}
    fit = [
        dims
        for dims in _spelled(form)
        if len(dims) == len(shape)
        and all(n == must.get(a, n) for a, n in zip(dims, shape, strict=True))
        and ("H" in dims or not apart)
    ]
    if not fit:
        raise LayoutError(
            f"format {form.number} takes tensors {' or '.join(_spelled(form))}, not of shape {shape} (B blocks, "
            f"T tokens of a block, S both, L layers, P planes, H heads, D elements, W elements of K and V)"
        )
    rows = (prod(n for a, n in zip(dims, shape, strict=True) if a in "HDW2") for dims in fit)
    dims = next((dims for dims, found in zip(fit, rows, strict=True) if found == row), fit[0])
    hints = Hints(block_size=block_size if "S" in dims else None, planes=2 if apart else None)
    return read(Spelling(form.plane.pointers, dims, form.plane), memory, hints)


def read_parts(
    name: str, tensors: Tensors, form: Format, *, block_size: int = 0, planes: int = 1, row: int = 0
) -> tuple[tuple[int, ...], tuple[Part, ...]]:
    """Addresses and parts of a format out of tensors whose axes stand as its shapes name them, with any strides.

    Parameters
    ----------
    name : str
        What errors call the tensors.
    tensors : View, sequence of View, or sequence of sequences of View
        As an engine hands them in; blocks and tokens, or heads and elements, may be one axis.
    form : Format
        The format; it may be several layouts at once.
    block_size : int
        Tokens of a block, where blocks and tokens are one axis.
    planes : int
        2 to take K and V of a fused format apart.
    row : int
        Elements of a token of one layer and plane, where a shape can be read in several ways.

    Raises
    ------
    LayoutError
        The tensors cannot be so.
    """
    lists, views = flatten(tensors, name)
    levels, count = (lists[:1], lists[1]) if "K" in form.pointers and len(lists) == 2 else (lists, 1)
    each, apart = list(views.items()), planes == 2 and form.fused != ""
    readings = [
        _read(form, dict(each[k::count]), levels, block_size, apart, row * (1 + apart) if count == 1 else 0)
        for k in range(count)
    ]
    layouts = [reading.layout for reading in readings if reading.layout is not None]
    for k, layout in enumerate(layouts):
        g, first = layout.geometry, layouts[0].geometry
        if (g.blocks, g.block_size) != (first.blocks, first.block_size):
            raise LayoutError(
                f"{name}: plane {k} has {g.blocks} blocks of {g.block_size} tokens, must have {first.blocks} of "
                f"{first.block_size} as plane 0"
            )
        step, tight = layout.strides()["T"], g.head_size * g.element_size
        if form.scales and g.block_size > 1 and step != tight:
            raise LayoutError(f"{name}: tokens of a page lie {step} bytes apart, must be {tight}")
    return tuple(int(x.address) for x in views.values()), parts_of(form, layouts)
