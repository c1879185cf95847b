"""Tensors whose axes stand as their format names them, with any strides, against plain shaped indexing."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvraw
from kvraw.errors import LayoutError
from kvraw.layouts.formats import FORMATS
from kvraw.layouts.parts import Part, read_parts
from tests.helpers.handed_in import CASES, Sizes, form_of, orders, sizes, view_of, width_of
from tests.helpers.profile import examples

# "8" with heads, tokens and elements as one axis needs hints that LMCache does not give.
NAMES = [n for n in CASES if form_of(n) in FORMATS and not (n[0] == "8" and len(CASES[n].shape(Sizes())) == 4)]


def spread(shape: tuple[int, ...], order: list[int], pad: int, start: int) -> Any:
    """Numbers of their own in an array of this shape, its last axis dense and the others in this order in memory."""
    axes = [i for i in order if i < len(shape) - 1]
    memory = np.zeros((*(shape[i] for i in axes), shape[-1] + pad), np.int32)
    array = memory.transpose([*(axes.index(i) for i in range(len(shape) - 1)), len(shape) - 1])[..., : shape[-1]]
    array[...] = np.arange(array.size).reshape(shape) + start
    return array


def at(parts: tuple[Part, ...], addresses: tuple[int, ...], where: dict[str, int], part: int = 0) -> int:
    """The address of an element by the layout of a part."""
    p = parts[part]
    layout, pointer = p.layout, 0
    for axis in layout.format.pointers:
        pointer = pointer * layout.geometry.axis_sizes(0)[axis] + where[axis]
    base = int(p.bases(np.array(addresses, np.uint64))[pointer])
    return base + sum(layout.strides()[axis] * n for axis, n in where.items())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(8), deadline=None)
@given(s=sizes(), order=orders(), pad=st.integers(0, 2))
def test_axes_stand_as_they_are_named(name: str, s: Sizes, order: list[int], pad: int) -> None:
    case, form = CASES[name], FORMATS[int(form_of(name))]
    if name.endswith("one plane"):  # K and V of a head must be one row
        order, pad = sorted(order), 0
    lists, shape = case.lists(s), case.shape(s)
    size, heads, width = int(np.prod(shape)), s.H if case.heads else 1, width_of(name, s)
    flat = [spread(shape, order, pad, k * size) for k in range(int(np.prod(lists)))]
    nested: Any = flat if len(lists) == 1 else flat[0] if not lists else None
    if nested is None:
        nested = [flat[k * lists[1] : (k + 1) * lists[1]] for k in range(lists[0])]
    views = [[view_of(a) for a in x] for x in nested] if len(lists) == 2 else [view_of(a) for a in flat]
    addresses, parts = read_parts("tensors", views, form, block_size=s.T, planes=case.planes, row=heads * width)
    g = parts[0].layout.geometry
    assert (g.layers, g.planes, g.blocks, g.block_size) == (s.L, case.planes, s.B, s.T)
    assert (len(parts), g.heads * g.head_size, parts[0].row) == (1, heads * width, 4 * heads * width)
    for i, k, b, t, h, d in itertools.product(*map(range, (s.L, case.planes, s.B, s.T, heads, width))):
        h_, d_ = (h, d) if g.heads == heads else (0, h * width + d)
        found = at(parts, addresses, dict(zip("LPBTHD", (i, k, b, t, h_, d_), strict=True)))
        assert ctypes.c_int32.from_address(found).value == case.element(nested, i, k, b, t, h, d, s)


@settings(max_examples=examples(8), deadline=None)
@given(s=sizes(2), widths=st.lists(st.integers(1, 4), min_size=1, max_size=3), one=st.booleans())
def test_planes_of_unlike_widths(s: Sizes, widths: list[int], one: bool) -> None:
    shapes = [(s.B, s.T, 1, w) if one else (s.B, s.T, w) for w in widths]
    layers = [[spread(shape, [0, 1, 2], 1, 100 * i + 1000 * k) for k, shape in enumerate(shapes)] for i in range(s.L)]
    addresses, parts = read_parts("tensors", [[view_of(a) for a in layer] for layer in layers], FORMATS[17])
    assert [(p.at, p.row) for p in parts] == [(4 * sum(widths[:k]), 4 * sum(widths)) for k in range(len(widths))]
    for k, i, b, t in itertools.product(*map(range, (len(widths), s.L, s.B, s.T))):
        for d in range(widths[k]):
            found = at(parts, addresses, {"L": i, "B": b, "T": t, "D": d}, k)
            assert ctypes.c_int32.from_address(found).value == layers[i][k].reshape(s.B, s.T, -1)[b, t, d]


def test_values_and_scales() -> None:
    pages = [np.zeros((5, 3, 132), np.uint8) for _ in range(2)]
    addresses, parts = read_parts("tensors", [view_of(a) for a in pages], FORMATS[14])
    assert addresses == tuple(a.ctypes.data for a in pages)
    assert [(p.offset, p.at, p.row, p.head_bytes) for p in parts] == [(0, 0, 132, 128), (3 * 128, 128, 132, 4)]
    assert [(p.layout.strides()["B"], p.layout.strides()["T"]) for p in parts] == [(3 * 132, 128), (3 * 132, 4)]
    with pytest.raises(LayoutError, match="format 14 takes tensors BTD, not of shape"):  # where are the scales?
        read_parts("tensors", [view_of(pages[0].reshape(15, 132))], FORMATS[14], block_size=3)


@pytest.mark.parametrize("format", [14, 17, "NL_X_NB_BSV_BSS"])
def test_no_cache_is_several_layouts(format: int | str) -> None:
    geometry = kvraw.Geometry(layers=1, blocks=5, block_size=3, heads=1, head_size=132, element_size=1, planes=1)
    array = np.zeros((5, 3, 132), np.uint8)
    with pytest.raises(LayoutError, match="is several layouts at once"):
        kvraw.PagedCache.from_tensors([array], format=format)
    with pytest.raises(LayoutError, match="is several layouts at once"):
        kvraw.PagedCache.from_pointers([array.ctypes.data], format, geometry)


@pytest.mark.parametrize(
    ("number", "shapes", "message"),
    [
        (1, [(2, 20)], "format 1 takes tensors PBTHD or PSHD or PBTD or PSD, not of shape"),
        (1, [(3, 5, 4, 2, 6)], "not of shape"),
        (9, [(5, 4, 2, 6)] * 3, "lists of .* tensors cannot be 'PL'"),
        (4, [(9, 2, 6)] * 2, r"blocks\*block_size is 9, must be a multiple of block_size=4"),
        (11, [(5, 4, 2, 3)], "K and V side by side are 3 elements, must be even for planes=2"),
        (1, [(2, 5, 4, 2, 6), (2, 5, 4, 2, 8)], r"tensors\[1\] .* differs from tensors\[0\]"),
    ],
)
def test_tensors_that_cannot_be(number: int, shapes: list[tuple[int, ...]], message: str) -> None:
    views = [view_of(np.zeros(shape, np.int16)) for shape in shapes]
    with pytest.raises(LayoutError, match=message):
        read_parts("tensors", views, FORMATS[number], block_size=4, planes=2)
