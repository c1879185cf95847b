"""The layouts of SGLang's kernel operations as sides of a copy plan: one row of data each."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvraw.adapters import tensors
from kvraw.arrays import U64
from kvraw.copying.operands import DeviceTable
from kvraw.copying.plan import Side
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.plain import require_plain
from kvraw.runtime.driver import driver

__all__ = ["End", "Numbers", "PlacedSide", "Rows", "place_end"]

_NONE: U64 = np.zeros(0, np.uint64)


# What every call names is plain tuples: they are made anew each time, and named ones cost several times as much.
End = tuple[str, int, tuple[Any, ...]]
"""One side of an operation: layout, dim and tensors.

The layout is a name of `_STRIDES`, or "table": one base address per layer, each as "lf". The dim is the bytes of one
token of all layers ("pf", "ph", "hg"), or from one token to the next ("lf", "table"; 0: as the tensors' strides have
it, or the item for a table). The tensors are K and V, or one: memory, or tables of addresses.
"""

Numbers = tuple[int, int, int, int, int]
"""The values of `Rows`."""


class Rows(NamedTuple):
    """What moves: per token, layer and head, and K and V alike, ``item / heads`` bytes.

    Attributes
    ----------
    item : int
        Bytes of one token of one layer.
    layers, first : int
        How many layers, and the first of them on sides that hold all layers.
    page, heads : int
        Tokens of a page; heads, or groups of heads, that the layouts keep apart.
    """

    item: int
    layers: int
    first: int
    page: int
    heads: int


# Byte strides of (outer, inner, layer, head), from the item s, the dim d, the page p and the heads h.
_STRIDES: dict[str, Any] = {
    "lf": lambda s, d, p, h: (d or s, 0, 0, s // h),  # [token, head, dim] of one layer
    "pf": lambda s, d, p, h: (d, 0, s, s // h),  # [token, layer, head, dim]
    "ph": lambda s, d, p, h: (p * d, d // h, s // h, p * d // h),  # [page, head, token, layer, dim]
    "hg": lambda s, d, p, h: (p * d, s // h, p * s // h, p * d // h),  # [page, head group, layer, token, dim]
}
_PAGED = ("ph", "hg")


class PlacedSide(NamedTuple):
    """One side of a copy that was made ready.

    Attributes
    ----------
    side : Side
        Its strides.
    bases : numpy.ndarray or DeviceTable
        Addresses as who copies sees them, or a table on the device; none where a table lies on the host.
    pinned : tuple of (int, int)
        Addresses in host memory, and the numbers that the driver gave what is pinned there; 0: none.
    """

    side: Side
    bases: U64 | DeviceTable
    pinned: tuple[tuple[int, int], ...] = ()


def _limit(layout: str, dim: int, group: tuple[Any, ...], rows: Rows, gap: int) -> int:
    """Tokens that an end holds; `gap` is of `tensors.page_gap`."""
    if layout == "lf":
        return min(int(t.numel()) * int(t.element_size()) for t in group) // rows.item
    if gap:
        return min(int(t.shape[0]) for t in group) * rows.page
    return min(tensors.reach(t) for t in group) // (dim * rows.page) * rows.page


def _check_rows(name: str, layout: str, dim: int, rows: Rows) -> None:
    if rows.item <= 0 or rows.layers < 0 or rows.page <= 0 or rows.heads <= 0:
        raise BoundsError(
            f"item_size is {rows.item}, num_layers {rows.layers}, page_size {rows.page}, head_num {rows.heads}: "
            f"must be positive"
        )
    if rows.item % rows.heads:
        raise LayoutError(f"item_size is {rows.item}, must be a multiple of head_num, {rows.heads}")
    if layout in ("lf", "table"):
        if dim and dim < rows.item:
            raise LayoutError(f"the {name} stride is {dim} bytes, an item takes {rows.item}")
    elif dim % rows.item or not 0 <= rows.first <= dim // rows.item - rows.layers:
        raise BoundsError(
            f"{name}_layout_dim is {dim}, must be a multiple of item_size, {rows.item}, that holds layers "
            f"{rows.first} to {rows.first + rows.layers}"
        )


def _table(
    name: str, group: tuple[Any, ...], rows: Rows, device: int | None, bits: int
) -> tuple[U64 | DeviceTable, int]:
    """A table as the kernel takes it, empty where it lies on the host, and its entries from plane to plane."""
    first = group[0]
    for t, plane in zip(group, "kv", strict=False):
        if tensors.dtype_name(t) not in ("uint64", "int64"):
            raise TypeError(f"the {name} {plane} table holds {tensors.dtype_name(t)}, must hold uint64")
        if t.numel() < rows.layers:
            raise BoundsError(f"the {name} {plane} table has {t.numel()} addresses, must have {rows.layers}")
        if t.is_cuda != first.is_cuda or not t.is_contiguous():
            raise PlacementError(f"the {name} tables of k and v must be dense and lie at one place")
        if t.is_cuda and device is None:
            raise PlacementError(f"the {name} table lies on a GPU, the indices do not")
    if not first.is_cuda:
        return _NONE, rows.layers * (len(group) - 1)
    # On the device K's table and V's are one: what lies between them is the stride from plane to plane.
    apart = (int(group[-1].data_ptr()) - int(first.data_ptr())) // 8
    return DeviceTable(int(first.data_ptr()), int(first.numel()), bits), apart


def place_end(name: str, end: End, rows: Rows, device: int | None, bits: int) -> PlacedSide:
    """An end as a side of a plan, with where its memory lies; on a GPU its context is current.

    `bits` is what is known of the addresses in tables on the device.
    """
    layout, dim, group = end
    for t in group:
        require_plain(name, t)
    _check_rows(name, layout, dim, rows)
    if layout == "lf" and not dim:
        dim = tensors.token_stride(name, group, rows.item)
    for t in group:
        if device is not None and t.is_cuda and t.get_device() != device:
            raise PlacementError(f"a {name} tensor lies on device {t.get_device()}, the indices on device {device}")
    is_table, planes = layout == "table", len(group)
    outer, inner, layer, head = _STRIDES["lf" if is_table else layout](rows.item, dim, rows.page, rows.heads)
    if is_table:
        bases, apart = _table(name, group, rows, device, bits)
        side = Side(outer, inner, head=head, table_layer=1, table_plane=apart, entries=rows.layers * planes)
        return PlacedSide(side, bases)
    gap = 0 if layout == "lf" else tensors.page_gap(name, outer, group)
    side = Side(
        gap or outer,
        inner,
        rows.page if layout in _PAGED else 1,
        layer,
        head=head,
        table_plane=planes - 1,
        limit=_limit(layout, dim, group, rows, gap),
        entries=planes,
    )
    places, pinned = [int(t.data_ptr()) for t in group], tuple[tuple[int, int], ...]()
    if device is not None:
        there = dict.fromkeys(a for a, t in zip(places, group, strict=True) if not t.is_cuda)
        pinned = tuple((address, driver().pointer_number(address)) for address in there)
        mapped = {address: tensors.mapped_address(name, address) for address in there}
        places = [mapped.get(address, address) for address in places]
    return PlacedSide(side, np.array(places, np.uint64) + np.uint64(rows.first * layer), pinned)
