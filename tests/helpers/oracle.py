"""What a store or load must do, written with plain indexing of shaped arrays. Shares no code with kvraw.

Arrays hold bytes: the last axis is head_size * element_size bytes long.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shape:
    """Counts of a case; `d` is bytes of a head."""

    nl: int
    nb: int
    bs: int
    nh: int
    d: int
    planes: int


@dataclass(frozen=True)
class PagedOracle:
    """One format: how many tensors, the shape of each, and where the bytes of one head of one token are."""

    tensors: Callable[[Shape], int]
    shape: Callable[[Shape], tuple[int, ...]]
    at: Callable[
        [list[np.ndarray], Shape, int, int, int, int, int], np.ndarray
    ]  # arrays, s, layer, plane, block, token, head


def one(s: Shape) -> int:
    return 1


def per_layer(s: Shape) -> int:
    return s.nl


def k_then_v(s: Shape) -> int:
    return 2 * s.nl


PAGED: dict[tuple[int | str, int], PagedOracle] = {
    (0, 2): PagedOracle(
        one, lambda s: (s.nb, s.nl, 2, s.bs, s.nh, s.d), lambda a, s, l, k, b, t, h: a[0][b, l, k, t, h]
    ),
    (1, 2): PagedOracle(per_layer, lambda s: (2, s.nb, s.bs, s.nh, s.d), lambda a, s, l, k, b, t, h: a[l][k, b, t, h]),
    (2, 2): PagedOracle(per_layer, lambda s: (s.nb, 2, s.bs, s.nh, s.d), lambda a, s, l, k, b, t, h: a[l][b, k, t, h]),
    (3, 1): PagedOracle(per_layer, lambda s: (s.nb, s.bs, s.d), lambda a, s, l, k, b, t, h: a[l][b, t]),
    (4, 2): PagedOracle(
        k_then_v, lambda s: (s.nb * s.bs, s.nh, s.d), lambda a, s, l, k, b, t, h: a[k * s.nl + l][b * s.bs + t, h]
    ),
    (5, 1): PagedOracle(per_layer, lambda s: (s.nb * s.bs, 1, s.d), lambda a, s, l, k, b, t, h: a[l][b * s.bs + t, 0]),
    (6, 2): PagedOracle(per_layer, lambda s: (2, s.nb, s.nh, s.bs, s.d), lambda a, s, l, k, b, t, h: a[l][k, b, h, t]),
    (7, 2): PagedOracle(per_layer, lambda s: (s.nb, 2, s.nh, s.bs, s.d), lambda a, s, l, k, b, t, h: a[l][b, k, h, t]),
    (8, 2): PagedOracle(
        one, lambda s: (s.nb, s.nl, 2, s.nh, s.bs, s.d), lambda a, s, l, k, b, t, h: a[0][b, l, k, h, t]
    ),
    (9, 2): PagedOracle(
        k_then_v, lambda s: (s.nb, s.bs, s.nh, s.d), lambda a, s, l, k, b, t, h: a[k * s.nl + l][b, t, h]
    ),
    (10, 1): PagedOracle(per_layer, lambda s: (s.nb, s.nh, s.bs, s.d), lambda a, s, l, k, b, t, h: a[l][b, h, t]),
    (10, 2): PagedOracle(per_layer, lambda s: (s.nb, s.nh, s.bs, 2, s.d), lambda a, s, l, k, b, t, h: a[l][b, h, t, k]),
    (11, 1): PagedOracle(per_layer, lambda s: (s.nb, s.bs, s.nh, s.d), lambda a, s, l, k, b, t, h: a[l][b, t, h]),
    (11, 2): PagedOracle(per_layer, lambda s: (s.nb, s.bs, s.nh, 2, s.d), lambda a, s, l, k, b, t, h: a[l][b, t, h, k]),
    (12, 1): PagedOracle(per_layer, lambda s: (s.nb, s.nh, s.bs, s.d), lambda a, s, l, k, b, t, h: a[l][b, h, t]),
    (13, 1): PagedOracle(per_layer, lambda s: (s.nb, s.bs, s.nh, s.d), lambda a, s, l, k, b, t, h: a[l][b, t, h]),
    (15, 2): PagedOracle(
        per_layer, lambda s: (2, s.nb, s.nh, 1, s.bs, s.d), lambda a, s, l, k, b, t, h: a[l][k, b, h, 0, t]
    ),
    (16, 2): PagedOracle(
        k_then_v, lambda s: (s.nb, s.bs, s.nh, s.d), lambda a, s, l, k, b, t, h: a[2 * l + k][b, t, h]
    ),
    (18, 1): PagedOracle(per_layer, lambda s: (s.nb, s.bs, s.nh, s.d), lambda a, s, l, k, b, t, h: a[l][b, t, h]),
    # SGLang's host pools: K and V apart
    ("layer_first", 2): PagedOracle(
        lambda s: 2, lambda s: (s.nl, s.nb * s.bs, s.nh, s.d), lambda a, s, l, k, b, t, h: a[k][l, b * s.bs + t, h]
    ),
    ("page_first", 2): PagedOracle(
        lambda s: 2, lambda s: (s.nb * s.bs, s.nl, s.nh, s.d), lambda a, s, l, k, b, t, h: a[k][b * s.bs + t, l, h]
    ),
    ("page_first_direct", 2): PagedOracle(
        lambda s: 2, lambda s: (s.nb, s.nl, s.bs, s.nh, s.d), lambda a, s, l, k, b, t, h: a[k][b, l, t, h]
    ),
    ("page_head", 2): PagedOracle(
        lambda s: 2, lambda s: (s.nb, s.nh, s.bs, s.nl, s.d), lambda a, s, l, k, b, t, h: a[k][b, h, t, l]
    ),
    ("layer_first_mla", 1): PagedOracle(
        one, lambda s: (s.nl, s.nb * s.bs, s.d), lambda a, s, l, k, b, t, h: a[0][l, b * s.bs + t]
    ),
    ("page_first_mla", 1): PagedOracle(
        one, lambda s: (s.nb * s.bs, s.nl, s.d), lambda a, s, l, k, b, t, h: a[0][b * s.bs + t, l]
    ),
    ("page_first_direct_mla", 1): PagedOracle(
        one, lambda s: (s.nb, s.nl, s.bs, s.d), lambda a, s, l, k, b, t, h: a[0][b, l, t]
    ),
}
MLA = {3, 5, "layer_first_mla", "page_first_mla", "page_first_direct_mla"}
PADDABLE = {0, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 16, 18}  # blocks are the outermost axis


def chunk_shape(layout: str, s: Shape, tokens: int) -> tuple[int, ...]:
    return {
        "2LTD": (s.planes, s.nl, tokens, s.nh * s.d),
        "T2D": (tokens, s.nl, s.planes, s.nh * s.d),
        "L2TD": (s.nl, s.planes, tokens, s.nh * s.d),
    }[layout]


def chunk_at(layout: str, array: np.ndarray, s: Shape, l: int, k: int, t: int, h: int) -> np.ndarray:
    row = {"2LTD": lambda: array[k, l, t], "T2D": lambda: array[t, l, k], "L2TD": lambda: array[l, k, t]}[layout]()
    return row[h * s.d : (h + 1) * s.d]


def move(
    format: int | str,
    s: Shape,
    paged: list[np.ndarray],
    chunks: list[np.ndarray],
    layout: str,
    chunk_tokens: int,
    direction: str,
    by: str,
    ids: list[int],
    skip: int,
) -> None:
    """Do the store or load in place."""
    where = PAGED[(format, s.planes)].at
    for position, index in enumerate(ids):
        if position < skip or index < 0:
            continue
        tokens = [(position, *divmod(index, s.bs))] if by == "slot" else [
            (position * s.bs + t, index, t) for t in range(s.bs)
        ]  # fmt: skip
        for (row, block, token), l, k, h in itertools.product(tokens, range(s.nl), range(s.planes), range(s.nh)):
            chunk, at = divmod(row, chunk_tokens)
            a = where(paged, s, l, k, block, token, h)
            b = chunk_at(layout, chunks[chunk], s, l, k, at, h)
            if direction == "store":
                b[:] = a
            else:
                a[:] = b
