"""Discovery where sizes are 1, blocks are padded, or views are not dense."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvraw.errors import LayoutError
from kvraw.layouts.discovery import discover
from tests.helpers.handed_in import (
    CASES,
    HND,
    PADDABLE,
    Built,
    Sizes,
    form_of,
    full_hints,
    orders,
    sizes,
    view_of,
    width_of,
)
from tests.helpers.profile import examples


@pytest.mark.parametrize("name", ["1", "2", "6", "7", "12", "13"])
@pytest.mark.parametrize(("one", "hint"), [("H", "num_heads"), ("T", "block_size")])
@settings(max_examples=examples(10), deadline=None)
@given(order=orders())
def test_one_head_or_one_token(name: str, one: str, hint: str, order: list[int]) -> None:
    """By slot they differ: a block of 4 tokens of one head is not one of one token of 4 heads."""
    s = replace(Sizes(B=5, T=4, H=3), **{one: 1})
    built = Built(CASES[name], s, order)
    kv_layout = "HND" if name in HND else "NHD"
    for hints in ({}, {"kv_layout": kv_layout}, {"format": int(name)}):
        with pytest.raises(LayoutError, match=r"cannot be told apart.*axes="):
            discover(built.views, **hints)
    counts = full_hints(name, s)
    built.check(discover(built.views, format=int(name), block_size=s.T, num_heads=s.H))
    if sorted(order) == order:
        built.check(discover(built.views, **counts))
    assert hint in counts


def test_the_stride_of_one_means_nothing() -> None:
    built = Built(CASES["1"], Sizes(H=1), list(range(6)))
    for stride in (0, 4, 32, -8, 2**40):
        views = [replace(v, strides=(*v.strides[:3], stride, v.strides[4])) for v in built.views]
        with pytest.raises(LayoutError, match="cannot be told apart"):
            discover(views, kv_layout="NHD")
        built.check(discover(views, kv_layout="NHD", num_heads=1))
        built.check(discover(views, axes="PBTHD"))


@pytest.mark.parametrize("name", ["1", "6", "0", "8", "15", "3"])
def test_one_block(name: str) -> None:
    s = Sizes(B=1)
    built = Built(CASES[name], s, list(range(6)))
    hints = full_hints(name, s)
    with pytest.raises(LayoutError, match="cannot be told apart"):
        discover(built.views)
    if name in ("0", "8"):  # one block of 3 layers, or 3 blocks of one
        with pytest.raises(LayoutError, match="pass axes='BLP"):
            discover(built.views, **hints)
        built.check(discover(built.views, axes="BLPTHD" if name == "0" else "BLPHTD"))
    else:
        built.check(discover(built.views, **hints))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=examples(10), deadline=None)
@given(s=sizes().map(lambda s: replace(s, D=1)), order=orders())
def test_one_element_per_head(name: str, s: Sizes, order: list[int]) -> None:
    built = Built(CASES[name], s, order)
    try:
        found = discover(built.views, format=form_of(name), **full_hints(name, s))
    except LayoutError as error:
        text = str(error)
    else:
        built.check(found, width_of(name, s))
        return
    assert "cannot be told apart" in text


@pytest.mark.parametrize("name", CASES)
def test_all_ones(name: str) -> None:
    s = Sizes(1, 1, 1, 1, 1)
    built = Built(CASES[name], s, list(range(6)))
    built.check(discover(built.views, format=form_of(name), **full_hints(name, s)), width_of(name, s))


@pytest.mark.parametrize("name", PADDABLE)
@settings(max_examples=examples(20), deadline=None)
@given(s=sizes(2), order=orders(), pad=st.integers(1, 9))
def test_padded_blocks(name: str, s: Sizes, order: list[int], pad: int) -> None:
    built = Built(CASES[name], s, order, pad)
    found = discover(built.views, format=form_of(name), **full_hints(name, s))
    block = int(np.prod(CASES[name].shape(s)[1:]))
    assert found.layout.geometry.block_stride == (block + pad) * 4
    built.check(found, width_of(name, s))


@pytest.mark.parametrize("name", ["1", "6", "15", "page_first_direct one"])
def test_gaps_elsewhere_are_followed(name: str) -> None:
    built = Built(CASES[name], Sizes(), list(range(6)), pad=2)
    found = discover(built.views, format=form_of(name), **full_hints(name, Sizes()))
    built.check(found, width_of(name, Sizes()))


def test_gaps_inside() -> None:
    whole = np.zeros((2, 9, 4, 6, 8), np.int16)
    layout = discover([view_of(whole[:, :, :, :3])] * 2, kv_layout="NHD").layout
    assert (layout.geometry.heads, layout.strides()["T"], layout.strides()["H"]) == (3, 96, 16)
    assert layout == discover([view_of(whole[:, :, :, :3])] * 2, axes="PBTHD").layout


@pytest.mark.parametrize("hints", [{"kv_layout": "NHD"}, {"axes": "PBTHD"}])
def test_no_memory_of_their_own(hints: dict[str, str]) -> None:
    whole = np.zeros((2, 9, 4, 6, 8), np.int16)
    with pytest.raises(LayoutError, match="elements of a head are 4 bytes apart, must be dense: 2"):
        discover([view_of(whole[..., ::2])], **hints)
    with pytest.raises(LayoutError, match="axis 1 has stride -384, a reversed axis"):
        discover([view_of(whole[:, ::-1])], **hints)
    expanded = np.broadcast_to(whole[:, :1], (2, 9, 4, 6, 8))
    with pytest.raises(LayoutError, match="axis 1 has stride 0, an expanded axis"):
        discover([view_of(expanded)], **hints)
    overlapping = np.lib.stride_tricks.as_strided(whole, (2, 9, 4, 6, 8), (192, 192, 96, 16, 2))
    with pytest.raises(LayoutError, match=r"axis 1 has stride 192, axes overlap"):
        discover([view_of(overlapping)], **hints)


def test_no_elements() -> None:
    with pytest.raises(LayoutError, match="no elements"):
        discover([view_of(np.zeros((2, 0, 4, 3, 8)))])
