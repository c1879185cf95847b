"""Axes named by the caller, vLLM's names of the order in memory, dicts of layers, and what a cache says that it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.errors import LayoutError
from kvraw.layouts.discovery import discover
from kvraw.layouts.formats import VLLM_LAYOUTS
from kvraw.layouts.geometry import find_format
from tests.helpers.handed_in import FakeView, view_of

L, B, H, N, C = 3, 5, 4, 6, 8


def views_of(name: str) -> list[Any]:
    """vLLM's views of the layers of one allocation: shaped [blocks, heads, tokens, content] whatever the name."""
    sizes = {"L": L, "B": B, "H": H, "N": N, "C": C}
    whole = np.arange(L * B * H * N * C, dtype=np.int32).reshape([sizes[a] for a in name])
    return list(whole.transpose([name.index(a) for a in "LBHNC"]))


@pytest.mark.parametrize("name", VLLM_LAYOUTS)
def test_names_of_vllm(name: str) -> None:
    layers = views_of(name)
    whole = np.stack(layers)
    for hints in ({"kv_layout": name}, {"axes": "BHTD"}, {"axes": "BHTD", "kv_layout": name}):
        cache = kvraw.PagedCache.from_tensors({f"layers.{k}": x for k, x in enumerate(layers)}, **hints)
        g = cache.geometry
        assert (g.layers, g.blocks, g.block_size, g.heads, g.head_size, g.planes) == (L, B, N, H, C, 1)
        chunk = np.zeros((L, 2 * N, H, C), np.int32)
        kvraw.store(cache, [chunk], [4, 1]).wait()
        np.testing.assert_array_equal(chunk, whole[:, [4, 1]].transpose(0, 1, 3, 2, 4).reshape(chunk.shape))
        slots = np.zeros((L, 1, H, C), np.int32)
        kvraw.store_slots(cache, [slots], [3 * N + 2]).wait()
        np.testing.assert_array_equal(slots[:, 0], whole[:, 3, :, 2])
    one = np.lib.stride_tricks.as_strided(
        layers[0], (L, B, H, N, C), (layers[1].ctypes.data - layers[0].ctypes.data, *layers[0].strides)
    )
    layout = discover(view_of(one), kv_layout=name).layout
    assert layout == discover(view_of(one), axes="LBHTD").layout
    assert layout.format == find_format(name)
    assert not layout.given


def test_heads_outside_blocks_are_no_blocks() -> None:
    layers = [view_of(x) for x in views_of("LHBNC")]
    for kv_layout in ("HND", "LBHNC", None):
        with pytest.raises(LayoutError, match="axes='BHTD'"):
            discover(layers, kv_layout=kv_layout)
    assert discover(layers, kv_layout="HND", num_heads=H).layout.geometry.blocks == B


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ("LBNHC", "a name of vLLM's for the order in memory is kv_layout="),
        ("PBTH", "must name blocks B, tokens of a block T .* and elements D"),
        ("PBTTD", "each once"),
        ("BTHD", "names 4 axes of a tensor, the tensors have 5"),
        ("PBTXD", "must name blocks"),
        ("PL/PBTHD", "each once"),
        ("L/LBTHD", "each once"),
        ("BPTHD", "axis 1 has 9 where 2 must be"),
        ("PBTDH", "elements of a head are 16 bytes apart, must be dense: 2"),
        ("P/BTHLD", "for the lists, tensors is|lists of"),
    ],
)
def test_bad_axes(axes: str, text: str) -> None:
    tensors = [view_of(np.zeros((2, 9, 16, 4, 8), np.int16)) for _ in range(3)]
    with pytest.raises(LayoutError, match=text):
        discover(tensors, axes=axes)


@pytest.mark.parametrize(
    ("hints", "text"),
    [
        ({"block_size": 4}, "gives block_size 16, the hint block_size is 4"),
        ({"kv_layout": "HND"}, "is NHD in memory, kv_layout is 'HND'"),
        ({"kv_layout": "LHBNC"}, "is BTH in memory, kv_layout is 'LHBNC'"),
        ({"planes": 1}, r"has 2 plane\(s\), planes is 1"),
        ({"format": 1}, "axes is 'PBTHD', format is 1: pass one of them"),
        ({"kv_list_layout": "k_v"}, "kv_list_layout is 'k_v'"),
    ],
)
def test_axes_against_hints(hints: dict[str, Any], text: str) -> None:
    tensors = [view_of(np.zeros((2, 9, 16, 4, 8), np.int16)) for _ in range(3)]
    assert discover(tensors, axes="PBTHD", block_size=16, kv_layout="NHD").layout.format.number == 1
    with pytest.raises(LayoutError, match=text):
        discover(tensors, axes="PBTHD", **hints)


def test_slots_and_lists() -> None:
    flat = [view_of(np.zeros((80, 4, 8), np.int16)) for _ in range(4)]
    with pytest.raises(LayoutError, match="pass block_size="):
        discover(flat, axes="PL/SHD")
    layout = discover(flat, axes="PL/SHD", block_size=16).layout
    assert (layout.geometry.layers, layout.geometry.planes, layout.geometry.blocks) == (2, 2, 5)
    assert discover(flat, axes="SHD", block_size=16).layout.geometry.layers == 4
    with pytest.raises(LayoutError, match="'PL' for the lists, tensors is a list of 3"):
        discover(flat[:3], axes="PL/SHD", block_size=16)
    pairs = [flat[:2], flat[2:], flat[:2]]
    assert discover(pairs, axes="SHD", block_size=16).layout.pointers == 6
    bare = discover(flat[0], axes="SHD", block_size=16).layout
    assert (bare.geometry.layers, bare.pointers) == (1, 1)


def test_tensors_of_a_dict_are_kept_and_named() -> None:
    layers = {f"layers.{k}": np.arange(2 * 3 * 4 * 5 * 8, dtype=np.int16).reshape(2, 3, 4, 5, 8) for k in range(2)}
    cache = kvraw.PagedCache.from_tensors(layers.values(), axes="PBTHD")
    assert cache.layout == kvraw.PagedCache.from_tensors(layers, axes="PBTHD").layout
    layers.clear()
    chunk = np.zeros((2, 2, 4, 40), np.int16)
    kvraw.store(cache, [chunk], [2]).wait()
    assert chunk[1, 0, 0, 0] == 5 * 4 * 5 * 8
    with pytest.raises(TypeError, match=r"tensors\['a'\] is a str"):
        kvraw.PagedCache.from_tensors({"a": "b"}, axes="PBTHD")
    with pytest.raises(LayoutError, match="empty"):
        kvraw.PagedCache.from_tensors({}, axes="PBTHD")


def test_a_cache_says_what_it_is() -> None:
    whole = np.zeros((2, 9, 4, 6, 8), np.int16)
    cache = kvraw.PagedCache.from_tensors([whole[:, :, :, :3], whole[:, :, :, 3:]], axes="PBTHD")
    assert repr(cache) == (
        "PagedCache(NL_X_TWO_NB_BS_NH_HS: 2 layers, K and V apart, 9 blocks of 4 tokens, "
        "3 heads of 8 elements of 2 bytes; a tensor per layer, "
        "in memory [plane, block, token, head, element], 96 bytes from one token to the next, on host)"
    )


def test_case_of_one_token_per_block() -> None:
    layers = [np.random.default_rng(k).integers(0, 99, (2, 20, 1, 8, 32)).astype(np.int16) for k in range(2)]
    for hints in ({}, {"kv_layout": "NHD"}):
        with pytest.raises(LayoutError, match="axes='PBTHD'"):
            kvraw.PagedCache.from_tensors(layers, **hints)
    for hints in ({"axes": "PBTHD"}, {"kv_layout": "NHD", "block_size": 1}):
        chunk = np.zeros((2, 2, 3, 256), np.int16)
        kvraw.store_slots(kvraw.PagedCache.from_tensors(layers, **hints), [chunk], [17, 3, 0]).wait()
        np.testing.assert_array_equal(chunk, np.stack([x.reshape(2, 20, 256)[:, [17, 3, 0]] for x in layers], 1))


def test_padded_planes_of_two_heads() -> None:
    t = np.arange(2 * 40 * 16 * 2 * 8, dtype=np.int32).reshape(2, 40, 16, 2, 8)[:, :32]
    with pytest.raises(LayoutError, match=r"format 1 .*format 11 .*pass block_size=16 or block_size=32"):
        kvraw.PagedCache.from_tensors([t], kv_layout="NHD")
    for hints in ({"axes": "PBTHD"}, {"kv_layout": "NHD", "num_heads": 2}, {"format": 1}):
        cache = kvraw.PagedCache.from_tensors([t], **hints)
        chunk = np.zeros((2, 16, 16), np.int32)
        kvraw.store(cache, [chunk], [1]).wait()
        np.testing.assert_array_equal(chunk, t[:, 1].reshape(2, 16, 16))


def test_many_layers_differ() -> None:
    a = FakeView(64, (5, 6, 4, 8), (384, 64, 16, 2), 2)
    with pytest.raises(LayoutError, match=r"tensors\[1\] .* differs from tensors\[0\]"):
        discover([a, FakeView(6400, (5, 6, 4, 8), (768, 64, 16, 2), 2)], axes="BTHD")


@pytest.mark.parametrize("hints", [{"axes": "PBTHD"}, {"kv_layout": "NHD", "block_size": 4, "num_heads": 2}])
@pytest.mark.parametrize(
    ("strides", "why"),
    [
        ((2048, 0, 64, 32, 2), "an expanded axis"),
        ((0, 256, 64, 32, 2), "an expanded"),
        ((2048, 64, 64, 32, 2), "axes over"),
    ],
)
def test_elements_that_share_memory(hints: dict[str, Any], strides: tuple[int, ...], why: str) -> None:
    """A load would write one block over another."""
    tensor = np.lib.stride_tricks.as_strided(np.zeros(4096, np.int16), (2, 8, 4, 2, 16), strides)
    with pytest.raises(kvraw.LayoutError, match=why):
        kvraw.PagedCache.from_tensors([tensor], **hints)
