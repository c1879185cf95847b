"""Discovery where sizes are 1, blocks are padded, or views are not dense."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvraw.discovery import discover
from kvraw.errors import LayoutError
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


@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize("form", ["1", "2", "13"])
@pytest.mark.parametrize("export", [False, True], ids=["strides", "dlpack"])
def test_one_head_needs_no_hint(form: str, hnd: bool, export: bool) -> None:
    s = Sizes(H=1)
    name = {"1": "6", "2": "7", "13": "12"}[form] if hnd else form
    built = Built(CASES[name], s, list(range(6)))
    views = built.views
    if export:  # DLPack writes one element as the stride of every size-1 dimension
        views = [
            replace(v, strides=tuple(v.itemsize if n == 1 else x for n, x in zip(v.shape, v.strides, strict=True)))
            for v in views
        ]
    found = discover(views)
    assert found.layout.format.number == int(form)
    built.check(found)
    asked = discover(views, kv_layout="HND")
    assert asked.layout.format.hnd
    built.check(asked)


@settings(max_examples=60, deadline=None)
@given(order=orders(), form=st.sampled_from(["1", "2", "6", "7", "12", "13"]))
def test_any_permutation_of_one_head_is_the_same(order: list[int], form: str) -> None:
    built = Built(CASES[form], Sizes(H=1), order)
    found = discover(built.views)
    assert not found.layout.format.hnd
    built.check(found)


@settings(max_examples=60, deadline=None)
@given(order=orders(), form=st.sampled_from(["1", "2", "6", "7", "12", "13"]))
def test_block_size_one_by_hint_or_as_one_head(order: list[int], form: str) -> None:
    built = Built(CASES[form], Sizes(T=1), order)
    unhinted = discover(built.views).layout
    assert (unhinted.geometry.block_size, unhinted.geometry.heads) == (3, 1)
    for hints in ({"block_size": 1}, {"num_heads": 3}):
        found = discover(built.views, **hints)
        built.check(found)
        a, b = found.layout, unhinted
        assert a.strides()["B"] == b.strides()["B"]
        assert a.strides()["H"] == b.strides()["T"]
        assert a.tensor_bytes() == b.tensor_bytes()


@settings(max_examples=60, deadline=None)
@given(order=orders(), form=st.sampled_from(["0", "1", "2", "8", "15"]), s=sizes().filter(lambda s: s.D > 1))
def test_one_block(order: list[int], form: str, s: Sizes) -> None:
    """One block of several heads: the strides of an array that was once contiguous tell."""
    s = replace(s, B=1, L=3)
    built = Built(CASES[form], s, order)
    found = discover(built.views, kv_layout="HND" if form in HND else "NHD", block_size=s.T, num_heads=s.H)
    assert found.layout.format.number in {0: {0}, 1: {1, 2}, 2: {1, 2}, 8: {8}, 15: {15}}[int(form)]
    built.check(found)


def test_one_block_without_counts() -> None:
    built = Built(CASES["1"], Sizes(B=1), [0, 2, 1, 3, 4])
    built.check(discover(built.views, kv_layout="NHD"))
    spoiled = [replace(v, shape=(1, 2, 4, 3, 8), strides=(0, 384, 96, 32, 4)) for v in built.views]
    built.check(discover(spoiled, kv_layout="NHD"))
    # In front of the block size, where it says neither one block nor one head for sure, but one head would be refused.
    spoiled = [replace(v, shape=(2, 4, 3, 8, 1), strides=(384, 96, 32, 4, 7)) for v in built.views]
    with pytest.raises(LayoutError, match=r"cannot be told apart.*block_size=|head_size"):
        discover(spoiled)


@pytest.mark.parametrize("name", ["layer_first paged", "page_first_direct", "page_first_direct_mla", "0", "8"])
@pytest.mark.parametrize("s", [Sizes(L=1), Sizes(B=1), Sizes(L=1, B=1)], ids=str)
def test_one_block_or_one_layer(name: str, s: Sizes) -> None:
    built = Built(CASES[name], s, list(range(6)))
    built.check(discover(built.views, format=form_of(name), **full_hints(name, s)))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20, deadline=None)
@given(s=sizes().map(lambda s: replace(s, D=1)), order=orders())
def test_one_element_per_head(name: str, s: Sizes, order: list[int]) -> None:
    """Strides of one element are everywhere then: permuted views are read right, or refused, never misread."""
    built = Built(CASES[name], s, order)
    try:
        found = discover(built.views, format=form_of(name), **full_hints(name, s))
    except LayoutError as error:
        text = str(error)
    else:
        built.check(found, width_of(name, s))
        return
    assert "cannot be told apart" in text
    assert order != sorted(order)


@pytest.mark.parametrize("name", CASES)
def test_all_ones(name: str) -> None:
    s = Sizes(1, 1, 1, 1, 1)
    built = Built(CASES[name], s, list(range(6)))
    built.check(discover(built.views, format=form_of(name), **full_hints(name, s)), width_of(name, s))


@pytest.mark.parametrize("name", PADDABLE)
@settings(max_examples=20, deadline=None)
@given(s=sizes(2), order=orders(), pad=st.integers(1, 9))
def test_padded_blocks(name: str, s: Sizes, order: list[int], pad: int) -> None:
    built = Built(CASES[name], s, order, pad)
    found = discover(built.views, format=form_of(name), **full_hints(name, s))
    block = int(np.prod(CASES[name].shape(s)[1:]))
    assert found.layout.geometry.block_stride == (block + pad) * 4
    built.check(found, width_of(name, s))


@pytest.mark.parametrize("name", ["1", "6", "4", "5", "15", "layer_first", "page_first", "page_first_direct one"])
def test_padding_elsewhere_is_refused(name: str) -> None:
    built = Built(CASES[name], Sizes(), list(range(6)), pad=2)
    with pytest.raises(LayoutError, match=r"tensors.* (padded to \d+ bytes, only outermost blocks may be)"):
        discover(built.views, format=form_of(name), **full_hints(name, Sizes()))


def test_not_dense() -> None:
    whole = np.zeros((2, 9, 4, 6, 8), np.int16)
    with pytest.raises(
        LayoutError, match=r"tensors\[0\] \(shape \(2, 9, 4, 3, 8\), strides .*dimension 2 has stride 96.*48"
    ):
        discover([view_of(whole[:, :, :, :3])] * 2, kv_layout="NHD")
    with pytest.raises(LayoutError, match="accepted is any permutation of a contiguous tensor, padded at most between"):
        discover([view_of(whole[..., ::2])], kv_layout="NHD")
    with pytest.raises(LayoutError, match="dimension 1 has stride -384, a reversed dimension"):
        discover([view_of(whole[:, ::-1])], kv_layout="NHD")
    expanded = np.broadcast_to(whole[:, :1], (2, 9, 4, 6, 8))
    with pytest.raises(LayoutError, match="dimension 1 has stride 0, an expanded dimension"):
        discover([view_of(expanded)], kv_layout="NHD")
    overlapping = np.lib.stride_tricks.as_strided(whole, (2, 9, 4, 6, 8), (192, 192, 96, 16, 2))
    with pytest.raises(LayoutError, match=r"dimension 1|dimension 0"):
        discover([view_of(overlapping)], kv_layout="NHD")


def test_no_elements() -> None:
    with pytest.raises(LayoutError, match="no elements"):
        discover([view_of(np.zeros((2, 0, 4, 3, 8)))])
