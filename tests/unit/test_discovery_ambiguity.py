"""What discovery cannot tell apart, what contradicts, and details."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvraw.errors import LayoutError
from kvraw.layouts.discovery import discover
from kvraw.layouts.formats import Format
from tests.helpers.handed_in import (
    FakeView,
    orders,
    view_of,
)
from tests.helpers.profile import examples


def list_of(*shape: int, n: int = 3) -> list[FakeView]:
    return [view_of(np.zeros(shape, np.int16)) for _ in range(n)]


def test_nhd_or_hnd() -> None:
    with pytest.raises(LayoutError) as caught:
        discover(list_of(2, 9, 16, 4, 8))
    text = str(caught.value)
    assert "3 tensors like tensors[0] (shape (2, 9, 16, 4, 8)" in text
    assert (
        "format 1 (NL_X_TWO_NB_BS_NH_HS: layers=3, planes=2, blocks=9, block_size=16, num_heads=4, head_size=8)" in text
    )
    assert (
        "kv_layout='NHD' or kv_layout='HND', or block_size=16 or block_size=4, or num_heads=4 or num_heads=16" in text
    )
    with pytest.raises(LayoutError) as caught:
        discover(list_of(2, 9, 16, 16, 8), block_size=16)
    assert "pass kv_layout='NHD' or kv_layout='HND', or format=1 or format=6" in str(caught.value)


def test_planes_first_or_blocks_first() -> None:
    with pytest.raises(LayoutError, match=r"pass format=1 or format=2, or axes='PBTHD' or axes='BPTHD'$"):
        discover(list_of(2, 2, 16, 4, 8), kv_layout="NHD")
    with pytest.raises(LayoutError, match=r"pass format=1 or format=2 or format=6 or format=7, or axes="):
        discover(list_of(2, 2, 16, 4, 8))
    with pytest.raises(LayoutError, match=r"cannot be told apart"):
        discover(list_of(2, 2, 16, 1, 8))
    assert discover(list_of(2, 3, 16, 4, 8), kv_layout="NHD").layout.format.number == 1
    assert discover(list_of(3, 2, 16, 4, 8), kv_layout="NHD").layout.format.number == 2
    for form in (1, 2):
        assert discover(list_of(2, 2, 16, 4, 8), format=form).layout.geometry.blocks == 2


def test_nested_two_by_two() -> None:
    pairs = [list_of(5, 16, 4, 8, n=2)] * 2
    with pytest.raises(LayoutError, match=r"cannot be told apart.*pass axes='PL/BTHD' or axes="):
        discover(pairs)
    with pytest.raises(LayoutError, match=r"pass format=9 or format=16, or axes='PL/BTHD' or axes='LP/BTHD'$"):
        discover(pairs, kv_layout="NHD")
    with pytest.raises(LayoutError, match=r"lists of 2 by 2: say 'PL/BTHD' or 'LP/BTHD'"):
        discover(pairs, axes="BTHD")
    assert discover(pairs, axes="LP/BTHD").layout.format.number == 16
    nhd = {"kv_layout": "NHD"}
    assert discover(pairs, engine="sglang").layout.format.number == 9
    assert discover(pairs, format=16).layout.format.number == 16
    assert discover([list_of(80, 4, 8, n=2)] * 2, block_size=16).layout.format.number == 4
    for lists, number in (
        ([list_of(5, 16, 4, 8, n=1)] * 2, 9),
        ([list_of(5, 16, 4, 8, n=2)], 16),
        ([list_of(5, 16, 4, 8, n=2)] * 3, 16),
        ([list_of(5, 16, 4, 8)] * 2, 9),
    ):
        with pytest.raises(LayoutError, match="kv_layout='NHD' or kv_layout='HND', or block_size=16 or block_size=4"):
            discover(lists)
        assert discover(lists, **nhd).layout.format.number == number
        assert discover(lists, axes="BTHD").layout.format.number == number
        assert discover(lists, kv_layout="HND").layout.geometry.block_size == 4
    with pytest.raises(LayoutError, match="a list of 3 lists of 3"):
        discover([list_of(5, 16, 4, 8)] * 3)


def test_sglang_lists() -> None:
    with pytest.raises(LayoutError, match="kv_list_layout='unified' or kv_list_layout='k_v'"):
        discover(list_of(5, 16, 4, 8, n=4), engine="sglang")
    assert discover(list_of(5, 16, 4, 8, n=3), engine="sglang").layout.format.number == 18
    found = discover(list_of(5, 16, 4, 8, n=4), engine="sglang", kv_list_layout="k_v").layout
    assert (found.format.number, found.geometry.layers) == (9, 2)
    with pytest.raises(LayoutError, match="a list of 3, 3 tensors like"):
        discover(list_of(5, 16, 4, 8, n=3), engine="sglang", kv_list_layout="k_v")
    with pytest.raises(LayoutError, match="kv_list_layout is 'k_v', engine is 'vllm'"):
        discover(list_of(5, 16, 4, 8), kv_list_layout="k_v")
    with pytest.raises(LayoutError, match=r"format 5 .*\[blocks\*block_size, 1, head_size\]: pass block_size="):
        discover(list_of(80, 1, 8), engine="sglang")
    assert discover(list_of(80, 1, 8), engine="sglang", block_size=16).layout.format.number == 5
    assert discover(list_of(80, 1, 8), engine="sglang", block_size=1).layout.format.number == 5
    assert discover(list_of(5, 16, 8), engine="sglang").layout.format.number == 3
    with pytest.raises(LayoutError, match=r"format 5 .*pass block_size="):  # 16 blocks of one token, or one of 16
        discover(list_of(1, 16, 8), engine="sglang")
    with pytest.raises(LayoutError, match=r"format 4 .*pass block_size="):  # all K, then all V
        discover(list_of(80, 4, 8, n=4), engine="sglang")
    one_block = discover(list_of(1, 16, 8), engine="sglang", block_size=16).layout
    assert (one_block.geometry.blocks, one_block.geometry.block_size) == (1, 16)


def test_flat_needs_a_block_size_that_divides() -> None:
    with pytest.raises(LayoutError, match=r"format 4 .*pass block_size="):
        discover([list_of(80, 4, 8)] * 2)
    with pytest.raises(LayoutError, match=r"blocks\*block_size is 81, must be a multiple of block_size=16"):
        discover([list_of(81, 4, 8)] * 2, block_size=16)
    with pytest.raises(LayoutError, match=r"blocks\*block_size is 81, must be a multiple of block_size=16"):
        discover(list_of(81, 1, 8), format=5, block_size=16)
    with pytest.raises(LayoutError, match="pass block_size="):
        discover(list_of(4, 80, 4, 8, n=2), format="layer_first")


def test_trtllm_pool() -> None:
    pool = view_of(np.zeros((5, 3, 2, 16 * 4 * 8), np.int16))
    with pytest.raises(LayoutError, match="pass num_heads=, block_size=, head_size="):
        discover(pool, engine="trtllm")
    with pytest.raises(LayoutError, match="pass num_heads=, head_size="):
        discover(pool, engine="trtllm", block_size=16)
    geometry = discover(pool, engine="trtllm", num_heads=4, block_size=16).layout.geometry
    assert (geometry.head_size, geometry.layers, geometry.blocks) == (8, 3, 5)
    with pytest.raises(LayoutError, match=r"is 512, must be num_heads=4 \* block_size=16 \* head_size=9"):
        discover(pool, engine="trtllm", num_heads=4, block_size=16, head_size=9)


def test_contradictions_name_both() -> None:
    tensors = list_of(2, 9, 16, 4, 8)
    with pytest.raises(LayoutError, match=r"kv_layout='HND', block_size=16: .*block_size 4, the hint block_size is 16"):
        discover(tensors, kv_layout="HND", block_size=16)
    with pytest.raises(LayoutError, match=r"format 6, .* is HND, kv_layout is 'NHD'"):
        discover(tensors, format=6, kv_layout="NHD")
    with pytest.raises(LayoutError, match="gives head_size 8, the hint head_size is 9"):
        discover(tensors, kv_layout="NHD", head_size=9)
    with pytest.raises(LayoutError, match=r"has 2 plane\(s\), planes is 1"):
        discover(tensors, format=1, planes=1)
    with pytest.raises(LayoutError, match="block_size=5"):
        discover(tensors, block_size=5)
    with pytest.raises(LayoutError, match="gives num_heads 1, the hint num_heads is 128"):
        discover(list_of(9, 16, 8), num_heads=128)


def test_format_against_the_tensors() -> None:
    with pytest.raises(LayoutError, match=r"a list of 3, .*format 3 takes a list .* \[blocks, block_size, head_size\]"):
        discover(list_of(2, 9, 16, 4, 8), format=3)
    with pytest.raises(LayoutError, match="has 3 where 2 must be"):
        discover(list_of(3, 9, 16, 4, 8), format=1)
    with pytest.raises(LayoutError, match=r"one tensor, .*engine 'vllm' takes"):
        discover(list_of(9, 16)[0])
    with pytest.raises(LayoutError, match=r"format 17 is unknown|format 17"):
        discover(list_of(9, 16, 8), format=17)
    with pytest.raises(LayoutError, match="nope"):
        discover(list_of(9, 16, 8), format="nope")


@pytest.mark.parametrize(
    ("hint", "value", "text"),
    [
        ("kv_layout", "DNH", "kv_layout is 'DNH', must be one of 'NHD', 'HND'"),
        ("engine", "ollama", "engine is 'ollama', must be one of 'vllm', 'sglang', 'trtllm'"),
        ("kv_list_layout", "v_k", "kv_list_layout is 'v_k', must be one of 'k_v', 'unified'"),
        ("block_size", 0, "block_size is 0, must be positive"),
        ("num_heads", -1, "num_heads is -1, must be positive"),
        ("head_size", 0, "head_size is 0, must be positive"),
        ("planes", 3, "planes is 3, must be 1 or 2"),
    ],
)
def test_bad_hints(hint: str, value: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(text)):
        discover(list_of(2, 9, 16, 4, 8), **{hint: value})
    assert issubclass(LayoutError, ValueError)


def test_lists_that_are_not_alike() -> None:
    a, b = list_of(2, 9, 16, 4, 8, n=2)
    for empty in ([], [[]], [[], []], [[a], []]):
        with pytest.raises(LayoutError, match="empty"):
            discover(empty)
    with pytest.raises(LayoutError, match=r"tensors\[1\] is a list of 1, tensors\[0\] is a list of 2"):
        discover([[a, b], [a]])
    with pytest.raises(LayoutError, match=r"tensors\[1\] is one tensor, tensors\[0\] is a list of 1"):
        discover([[a], b])  # type: ignore[list-item]
    with pytest.raises(LayoutError, match="two deep at most"):
        discover([[[a]]])  # type: ignore[list-item]
    for changed in ({"shape": (2, 8, 16, 4, 8)}, {"strides": (2, 4, 8, 16, 32)}, {"itemsize": 4}):
        with pytest.raises(LayoutError, match=r"tensors\[2\] .* differs from tensors\[0\]"):
            discover([a, b, replace(b, **changed)], kv_layout="NHD")


def test_fused_formats() -> None:
    five = list_of(9, 4, 16, 2, 8)
    layout = discover(five, block_size=16).layout
    assert (layout.format.number, layout.geometry.planes, layout.geometry.head_size) == (10, 1, 16)
    assert discover(five, block_size=16, head_size=8).layout == layout
    assert discover(five, block_size=16, head_size=16).layout == layout
    layout = discover(five, block_size=4, planes=2).layout
    assert (layout.format.number, layout.geometry.planes, layout.geometry.head_size) == (11, 2, 8)
    four = list_of(9, 4, 16, 16)
    assert discover(four, kv_layout="HND", head_size=8).layout.geometry.head_size == 16
    assert discover(four, kv_layout="HND").layout.format.number == 12
    assert discover(four, format=10).layout.geometry.planes == 1
    with pytest.raises(LayoutError, match="are 15 elements, must be even for planes=2"):
        discover(list_of(9, 4, 16, 15), format=10, planes=2)
    # Blocks first with two heads, or fused with two tokens per block; planes first, or fused with two blocks.
    for shape, number in (((9, 2, 16, 2, 8), 2), ((2, 9, 16, 2, 8), 1)):
        with pytest.raises(
            LayoutError, match=r"pass block_size=16 or block_size=.*, or planes=2 or planes=1, or format="
        ):
            discover(list_of(*shape), kv_layout="NHD")
        assert discover(list_of(*shape), kv_layout="NHD", num_heads=2).layout.format.number == number
        assert discover(list_of(*shape), kv_layout="NHD", planes=1).layout.format.number == 11


def test_one_tensor_bare_or_in_a_list() -> None:
    (one,) = list_of(2, 9, 16, 4, 8, n=1)
    assert discover(one, format=1).layout == discover([one], format=1).layout
    (whole,) = list_of(9, 3, 2, 16, 4, 8, n=1)
    assert discover([whole], format=0).layout == discover(whole, format=0).layout
    assert discover([whole], format=0).addresses == (whole.address,)


def test_mla_takes_kv_layout_as_a_remark() -> None:
    for kv_layout in ("NHD", "HND"):
        assert discover(list_of(9, 16, 8), kv_layout=kv_layout).layout.format.number == 3


def test_a_format_of_ones_own() -> None:
    mine = Format(-1, "mine", "PL", "TBHD")
    tensors = [list_of(4, 9, 2, 8), list_of(4, 9, 2, 8)]
    layout = discover(tensors, format=mine).layout
    assert (layout.geometry.blocks, layout.geometry.block_size, layout.pointers) == (9, 4, 6)


def test_halves_of_one_host_buffer() -> None:
    (one,) = list_of(2, 3, 80, 4, 8, n=1)
    assert discover(one, format="layer_first", block_size=16).addresses == (
        one.address,
        one.address + 3 * 80 * 4 * 8 * 2,
    )


@settings(max_examples=examples(200), deadline=None)
@example(shape=[3, 2, 2, 3, 2], order=[2, 5, 3, 0, 1, 4], n=1, engine="vllm")  # format 1 as shaped, not as in memory
@given(
    shape=st.lists(st.integers(1, 3), min_size=3, max_size=6),
    order=orders(),
    n=st.integers(1, 4),
    engine=st.sampled_from(["vllm", "sglang"]),
)
def test_the_hint_that_an_error_names_settles_it(shape: list[int], order: list[int], n: int, engine: str) -> None:
    array = np.zeros(shape, np.int8).transpose([i for i in order if i < len(shape)])
    try:
        discover([view_of(array)] * n, engine=engine)
    except LayoutError as error:
        _, found, advice = str(error).partition("To settle it pass ")
        for hint, value in re.findall(r"(\w+)=(\d+|'[\w/]+')", advice):
            on_error = int(value) if value.isdigit() else value.strip("'")
            layout = discover([view_of(array)] * n, engine=engine, **{hint: on_error}).layout
            if hint == "format":
                assert layout.format.number == on_error
        assert not found or "=" in advice


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.zeros(9, 2, 4, 16, 8, dtype=torch.bfloat16).permute(1, 0, 3, 2, 4) for _ in range(3)]
    views = [FakeView(x.data_ptr(), tuple(x.shape), tuple(2 * n for n in x.stride()), 2) for x in tensors]
    found = discover(views, block_size=16)
    assert found.layout.format.number == 7
    assert found.addresses == tuple(x.data_ptr() for x in tensors)
