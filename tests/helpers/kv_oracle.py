"""What the peers' operations must do, by indexing shaped arrays: shares no code with kvraw."""

from __future__ import annotations

import numpy as np


def shape(layout: str, layers: int, tokens: int, page: int, heads: int, dim: int, groups: int = 1) -> tuple[int, ...]:
    """Shape of one plane in a layout, in bytes."""
    pages = tokens // page
    return {
        "lf": (layers, tokens, heads, dim),
        "pf": (tokens, layers, heads, dim),
        "ph": (pages, heads, page, layers, dim),
        "hg": (pages, groups, layers, page, heads // groups, dim),
        "pfd": (pages, layers, page, heads, dim),
    }[layout]


def row(array: np.ndarray, layout: str, token: int, layer: int, page: int) -> np.ndarray:
    """All heads of one token of one layer, as a view."""
    at, inner = token // page, token % page
    if layout == "lf":
        return array[layer, token]
    if layout == "pf":
        return array[token, layer]
    if layout == "ph":
        return array[at, :, inner, layer]
    if layout == "hg":
        return array[at, :, layer, inner]
    return array[at, layer, inner]


def move(
    src: np.ndarray,
    src_layout: str,
    dst: np.ndarray,
    dst_layout: str,
    src_tokens: list[int],
    dst_tokens: list[int],
    layers: list[int],
    page: int,
) -> None:
    for a, b in zip(src_tokens, dst_tokens, strict=True):
        for layer in layers:
            to = row(dst, dst_layout, b, layer, page)
            to[...] = row(src, src_layout, a, layer, page).reshape(to.shape)
