"""Caches as engines hand them in: arrays built and read with plain shaped indexing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvraw.layouts.discovery import Discovery


@dataclass(frozen=True)
class FakeView:
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def view_of(array: np.ndarray, **changes: Any) -> FakeView:
    made = FakeView(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)
    return replace(made, **changes)


@dataclass(frozen=True)
class Sizes:
    """L layers, B blocks, T tokens per block, H heads, D elements of a head."""

    L: int = 3
    B: int = 5
    T: int = 4
    H: int = 3
    D: int = 8
    P: int = 2


# How an element is found in what the engine hands in: x is the structure of arrays, all indices plain.
#   key: (structure shape, physical tensor shape, element(x, i, k, b, t, h, d), engine and hints that discovery needs)
@dataclass(frozen=True)
class Case:
    lists: Callable[[Sizes], tuple[int, ...]]
    shape: Callable[[Sizes], tuple[int, ...]]
    element: Callable[..., Any]
    engine: str | None  # None: by format= alone
    planes: int = 2
    heads: bool = True
    hints: dict[str, Any] = field(default_factory=dict)


def layers(s: Sizes) -> tuple[int, ...]:
    return (s.L,)


CASES: dict[str, Case] = {
    "0": Case(
        lambda s: (), lambda s: (s.B, s.L, 2, s.T, s.H, s.D), lambda x, i, k, b, t, h, d, s: x[b, i, k, t, h, d], "vllm"
    ),
    "1": Case(layers, lambda s: (2, s.B, s.T, s.H, s.D), lambda x, i, k, b, t, h, d, s: x[i][k, b, t, h, d], "vllm"),
    "2": Case(layers, lambda s: (s.B, 2, s.T, s.H, s.D), lambda x, i, k, b, t, h, d, s: x[i][b, k, t, h, d], "vllm"),
    "3": Case(layers, lambda s: (s.B, s.T, s.D), lambda x, i, k, b, t, h, d, s: x[i][b, t, d], "vllm", 1, False),
    "3 sglang": Case(
        layers, lambda s: (s.B, s.T, s.D), lambda x, i, k, b, t, h, d, s: x[i][b, t, d], "sglang", 1, False
    ),
    "4": Case(
        lambda s: (2, s.L),
        lambda s: (s.B * s.T, s.H, s.D),
        lambda x, i, k, b, t, h, d, s: x[k][i][b * s.T + t, h, d],
        "sglang",
    ),
    "4 flat": Case(
        lambda s: (2 * s.L,),
        lambda s: (s.B * s.T, s.H, s.D),
        lambda x, i, k, b, t, h, d, s: x[k * s.L + i][b * s.T + t, h, d],
        "sglang",
        hints={"kv_list_layout": "k_v"},
    ),
    "5": Case(
        layers,
        lambda s: (s.B * s.T, 1, s.D),
        lambda x, i, k, b, t, h, d, s: x[i][b * s.T + t, 0, d],
        "sglang",
        1,
        False,
    ),
    "6": Case(layers, lambda s: (2, s.B, s.H, s.T, s.D), lambda x, i, k, b, t, h, d, s: x[i][k, b, h, t, d], "vllm"),
    "7": Case(layers, lambda s: (s.B, 2, s.H, s.T, s.D), lambda x, i, k, b, t, h, d, s: x[i][b, k, h, t, d], "vllm"),
    "8": Case(
        lambda s: (),
        lambda s: (s.B, s.L, 2, s.H, s.T, s.D),
        lambda x, i, k, b, t, h, d, s: x[b, i, k, h, t, d],
        "trtllm",
    ),
    "8 pool": Case(
        lambda s: (),
        lambda s: (s.B, s.L, 2, s.H * s.T * s.D),
        lambda x, i, k, b, t, h, d, s: x[b, i, k, (h * s.T + t) * s.D + d],
        "trtllm",
    ),
    "9": Case(
        lambda s: (2, s.L), lambda s: (s.B, s.T, s.H, s.D), lambda x, i, k, b, t, h, d, s: x[k][i][b, t, h, d], "sglang"
    ),
    "9 flat": Case(
        lambda s: (2 * s.L,),
        lambda s: (s.B, s.T, s.H, s.D),
        lambda x, i, k, b, t, h, d, s: x[k * s.L + i][b, t, h, d],
        "sglang",
        hints={"kv_list_layout": "k_v"},
    ),
    "10": Case(
        layers,
        lambda s: (s.B, s.H, s.T, 2, s.D),
        lambda x, i, k, b, t, h, d, s: x[i][b, h, t, k, d],
        "vllm",
        hints={"planes": 2},
    ),
    "11": Case(
        layers,
        lambda s: (s.B, s.T, s.H, 2, s.D),
        lambda x, i, k, b, t, h, d, s: x[i][b, t, h, k, d],
        "vllm",
        hints={"planes": 2},
    ),
    "10 one plane": Case(
        layers,
        lambda s: (s.B, s.H, s.T, 2, s.D),
        lambda x, i, k, b, t, h, d, s: x[i][b, h, t, d // s.D, d % s.D],
        "vllm",
        1,
        hints={"planes": 1},
    ),
    "11 one plane": Case(
        layers,
        lambda s: (s.B, s.T, s.H, 2, s.D),
        lambda x, i, k, b, t, h, d, s: x[i][b, t, h, d // s.D, d % s.D],
        "vllm",
        1,
        hints={"planes": 1},
    ),
    "10 raw": Case(
        layers,
        lambda s: (s.B, s.H, s.T, 2 * s.D),
        lambda x, i, k, b, t, h, d, s: x[i][b, h, t, k * s.D + d],
        "vllm",
        hints={"planes": 2},
    ),
    "11 raw": Case(
        layers,
        lambda s: (s.B, s.T, s.H, 2 * s.D),
        lambda x, i, k, b, t, h, d, s: x[i][b, t, h, k * s.D + d],
        "vllm",
        hints={"planes": 2},
    ),
    "12": Case(layers, lambda s: (s.B, s.H, s.T, s.D), lambda x, i, k, b, t, h, d, s: x[i][b, h, t, d], "vllm", 1),
    "13": Case(layers, lambda s: (s.B, s.T, s.H, s.D), lambda x, i, k, b, t, h, d, s: x[i][b, t, h, d], "vllm", 1),
    "15": Case(
        layers, lambda s: (2, s.B, s.H, 1, s.T, s.D), lambda x, i, k, b, t, h, d, s: x[i][k, b, h, 0, t, d], "vllm"
    ),
    "16": Case(
        lambda s: (s.L, 2), lambda s: (s.B, s.T, s.H, s.D), lambda x, i, k, b, t, h, d, s: x[i][k][b, t, h, d], "vllm"
    ),
    "18": Case(
        layers,
        lambda s: (s.B, s.T, s.H, s.D),
        lambda x, i, k, b, t, h, d, s: x[i][b, t, h, d],
        "sglang",
        1,
        hints={"kv_list_layout": "unified"},
    ),
    "layer_first": Case(
        lambda s: (2,),
        lambda s: (s.L, s.B * s.T, s.H, s.D),
        lambda x, i, k, b, t, h, d, s: x[k][i, b * s.T + t, h, d],
        None,
    ),
    "layer_first one": Case(
        lambda s: (),
        lambda s: (2, s.L, s.B * s.T, s.H, s.D),
        lambda x, i, k, b, t, h, d, s: x[k, i, b * s.T + t, h, d],
        None,
    ),
    "layer_first paged": Case(
        lambda s: (2,), lambda s: (s.L, s.B, s.T, s.H, s.D), lambda x, i, k, b, t, h, d, s: x[k][i, b, t, h, d], None
    ),
    "page_first": Case(
        lambda s: (2,),
        lambda s: (s.B * s.T, s.L, s.H, s.D),
        lambda x, i, k, b, t, h, d, s: x[k][b * s.T + t, i, h, d],
        None,
    ),
    "page_first one": Case(
        lambda s: (),
        lambda s: (2, s.B * s.T, s.L, s.H, s.D),
        lambda x, i, k, b, t, h, d, s: x[k, b * s.T + t, i, h, d],
        None,
    ),
    "page_first_direct": Case(
        lambda s: (2,), lambda s: (s.B, s.L, s.T, s.H, s.D), lambda x, i, k, b, t, h, d, s: x[k][b, i, t, h, d], None
    ),
    "page_first_direct one": Case(
        lambda s: (), lambda s: (2, s.B, s.L, s.T, s.H, s.D), lambda x, i, k, b, t, h, d, s: x[k, b, i, t, h, d], None
    ),
    "page_head": Case(
        lambda s: (2,), lambda s: (s.B, s.H, s.T, s.L, s.D), lambda x, i, k, b, t, h, d, s: x[k][b, h, t, i, d], None
    ),
    "page_head one": Case(
        lambda s: (), lambda s: (2, s.B, s.H, s.T, s.L, s.D), lambda x, i, k, b, t, h, d, s: x[k, b, h, t, i, d], None
    ),
    "layer_first_mla": Case(
        lambda s: (),
        lambda s: (s.L, s.B * s.T, s.D),
        lambda x, i, k, b, t, h, d, s: x[i, b * s.T + t, d],
        None,
        1,
        False,
    ),
    "layer_first_mla sglang": Case(
        lambda s: (),
        lambda s: (s.L, s.B * s.T, 1, s.D),
        lambda x, i, k, b, t, h, d, s: x[i, b * s.T + t, 0, d],
        None,
        1,
        False,
    ),
    "page_first_mla": Case(
        lambda s: (),
        lambda s: (s.B * s.T, s.L, s.D),
        lambda x, i, k, b, t, h, d, s: x[b * s.T + t, i, d],
        None,
        1,
        False,
    ),
    "page_first_direct_mla": Case(
        lambda s: (), lambda s: (s.B, s.L, s.T, s.D), lambda x, i, k, b, t, h, d, s: x[b, i, t, d], None, 1, False
    ),
}
PADDABLE = ["0", "2", "3", "7", "8", "10", "12", "13", "9", "16", "18", "page_first_direct", "page_head"]
HND = {"6", "7", "8", "10", "12", "15"}


class Built:
    """Arrays of a case in one buffer, every element its own number, seen through permuted views."""

    def __init__(self, case: Case, sizes: Sizes, order: list[int], pad: int = 0, dtype: Any = np.int32) -> None:
        lists, shape = case.lists(sizes), case.shape(sizes)
        count, block = int(np.prod(lists)), int(np.prod(shape[1:]))
        span = shape[0] * (block + pad)
        self.buffer = np.arange(7 + count * (span + 5), dtype=dtype)
        self.case, self.sizes = case, sizes
        rows = [self.buffer[7 + i * (span + 5) :][:span].reshape(shape[0], block + pad) for i in range(count)]
        arrays = [
            np.lib.stride_tricks.as_strided(row, shape, (row.strides[0], *np.empty(shape[1:], dtype).strides))
            for row in rows
        ]
        axes = [i for i in order if i < len(shape)]
        self.arrays = self._nest(arrays, lists)
        self.views = self._nest([view_of(a.transpose(axes)) for a in arrays], lists)

    @staticmethod
    def _nest(flat: list[Any], lists: tuple[int, ...]) -> Any:
        if not lists:
            return flat[0]
        if len(lists) == 1:
            return flat
        return [flat[i * lists[1] : (i + 1) * lists[1]] for i in range(lists[0])]

    def check(self, found: Discovery, width: int | None = None) -> None:
        """Every element that the layout addresses is the one that plain indexing finds."""
        s, g, form = self.sizes, found.layout.geometry, found.layout.format
        width = width or s.D
        heads = s.H if self.case.heads else 1
        assert (g.layers, g.blocks, g.block_size, g.heads) == (s.L, s.B, s.T, heads)
        assert (g.planes, g.head_size, g.element_size) == (self.case.planes, width, self.buffer.itemsize)
        assert len(found.addresses) == found.layout.pointers
        strides = found.layout.strides()
        base = self.buffer.__array_interface__["data"][0]
        for i, k, b, t, h, d in itertools.product(*map(range, (s.L, g.planes, s.B, s.T, heads, width))):
            pointer = {"": 0, "L": i, "P": k, "PL": k * s.L + i, "LP": i * 2 + k}[form.pointers]
            place = dict(zip("LPBTHD", (i, k, b, t, h, d), strict=True))
            byte = found.addresses[pointer] - base + sum(strides[axis] * n for axis, n in place.items())
            assert byte % self.buffer.itemsize == 0
            expected = self.case.element(self.arrays, i, k, b, t, h, d, s)
            assert self.buffer[byte // self.buffer.itemsize] == expected, (i, k, b, t, h, d)


def form_of(name: str) -> int | str:
    name = name.split()[0]
    return int(name) if name.isdigit() else name


def full_hints(name: str, s: Sizes) -> dict[str, Any]:
    case = CASES[name]
    # One half of a fused head will do, but 2 elements are the whole of a head that K and V have one element each of.
    head_size = s.D if s.D > 2 else width_of(name, s)
    hints = {"block_size": s.T, "num_heads": s.H if case.heads else 1, "head_size": head_size, **case.hints}
    if case.engine is not None:
        hints["kv_layout"] = "HND" if name.split()[0] in HND else "NHD"
    return hints


def width_of(name: str, s: Sizes) -> int:
    return 2 * s.D if name.endswith("one plane") else s.D


def orders() -> st.SearchStrategy[list[int]]:
    return st.permutations(range(6)).map(list)


def sizes(least: int = 1) -> st.SearchStrategy[Sizes]:
    few = st.integers(least, 4)
    return st.builds(Sizes, L=few, B=st.integers(least, 5), T=few, H=few, D=st.integers(least, 5))
