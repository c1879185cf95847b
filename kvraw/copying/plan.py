"""A copy between two affine sides, folded into as few and as long runs as both sides allow.

For every (item, layer, plane, token, head) one run of contiguous bytes moves. On each side::

    index        = side index of the item, or the item itself
    outer, inner = divmod(index, page)
    base         = bases[outer*table_outer + layer*table_layer + plane*table_plane]
    address      = base + outer*outer_stride + inner*inner_stride + layer*... + plane*... + token*... + head*...

Nothing here knows a driver; base addresses and indices come at call time, as `Operands`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import gcd, prod

from kvraw.errors import LayoutError

MAX_DIMS = 4  # layer, plane, token, head


@dataclass(frozen=True, slots=True)
class Side:
    """Byte strides of one side of a copy, table strides in entries, and the bounds of its index.

    Attributes
    ----------
    limit : int
        Indices are in ``[0, limit)``.
    entries : int
        Length of the base table; 0 where it grows with the items (one base per chunk).
    outer, inner, page : int
        From one page to the next, from one item of a page to the next, and items of a page.
    layer, plane, token, head : int
        From one layer, plane, token or head to the next.
    table_outer, table_layer, table_plane : int
        The same for the base table, in entries.
    skip_negative : bool
        An index below zero leaves the item out instead of being an error.

    Examples
    --------
    Rows of 64 bytes by number, eight of them:

    >>> kvraw.Side(outer=64, limit=8).strides()
    (0, 0, 0, 0)
    """

    outer: int
    inner: int = 0
    page: int = 1
    layer: int = 0
    plane: int = 0
    token: int = 0
    head: int = 0
    table_outer: int = 0
    table_layer: int = 0
    table_plane: int = 0
    limit: int = 2**62
    entries: int = 1
    skip_negative: bool = False

    def strides(self) -> tuple[int, int, int, int]:
        """Byte strides of the inner dimensions.

        Returns
        -------
        tuple of int
            Those of layer, plane, token and head.
        """
        return self.layer, self.plane, self.token, self.head

    def table_strides(self) -> tuple[int, int, int, int]:
        """Table strides of the inner dimensions, in entries.

        Returns
        -------
        tuple of int
            Those of layer, plane, token and head.
        """
        return self.table_layer, self.table_plane, 0, 0


@dataclass(frozen=True, slots=True)
class Dim:
    """One folded dimension: its size and, on each side, its byte stride and its table stride."""

    size: int
    src: int
    dst: int
    src_table: int = 0
    dst_table: int = 0

    def merged(self, inner: Dim) -> Dim | None:
        """The one dimension that equals this one around `inner`, or None where there is none."""
        n = inner.size
        if (self.src, self.dst, self.src_table, self.dst_table) == (
            inner.src * n,
            inner.dst * n,
            inner.src_table * n,
            inner.dst_table * n,
        ):
            return replace(inner, size=self.size * n)
        return None


def _flat(side: Side) -> Side:
    """The side without its page split where the split changes nothing."""
    if side.page > 1 and side.table_outer == 0 and side.outer == side.inner * side.page:
        return replace(side, page=1, outer=side.inner, inner=0)
    return side


def _fold(dims: list[Dim], run: int) -> tuple[tuple[Dim, ...], int]:
    """Merge dimensions into each other and into the run; innermost dimension first in the result."""
    dims = [d for d in dims if d.size != 1]
    changed = True
    while changed:
        changed = False
        for d in dims:
            if d.src == d.dst == run and not (d.src_table or d.dst_table):
                run *= d.size
                dims.remove(d)
                changed = True
                break
        for a in dims:
            for b in dims:
                both = None if a is b else a.merged(b)
                if both is not None and not changed:
                    dims = [d for d in dims if d is not a and d is not b] + [both]
                    changed = True
            if changed:
                break
    # Innermost is the dimension that advances least, on the side where it advances more: neighbours stay together.
    dims.sort(key=lambda d: (d.src_table != 0 or d.dst_table != 0, max(d.src, d.dst)))
    return tuple(dims), run


@dataclass(frozen=True)
class CopyPlan:
    """Two sides, the counts, and the run; folded on construction.

    Parameters
    ----------
    src, dst : Side
        Where runs come from and go to.
    layers, planes, tokens, heads : int
        Counts of the inner dimensions of an item.
    run : int
        Contiguous bytes per (item, layer, plane, token, head).

    Raises
    ------
    LayoutError
        A count or the run is not positive.

    Attributes
    ----------
    dims, run_bytes : tuple of Dim, int
        The inner dimensions and the run after folding, innermost first.
    src_flat, dst_flat : Side
        The sides, without a page split that changes nothing.
    runs_per_item, item_bytes : int
        Runs and bytes that one item moves, after folding.

    Examples
    --------
    Two layers of 64 bytes that are neighbours on both sides fold into one run:

    >>> rows = kvraw.Side(outer=128, layer=64, limit=8)
    >>> kvraw.CopyPlan(rows, rows, layers=2, planes=1, tokens=1, heads=1, run=64).run_bytes
    128
    """

    src: Side
    dst: Side
    layers: int
    planes: int
    tokens: int
    heads: int
    run: int
    dims: tuple[Dim, ...] = field(init=False)
    run_bytes: int = field(init=False)
    src_flat: Side = field(init=False)
    dst_flat: Side = field(init=False)
    stride_alignment: int = field(init=False)
    runs_per_item: int = field(init=False)
    item_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("layers", "planes", "tokens", "heads", "run")}
        for name, value in counts.items():
            if value <= 0:
                raise LayoutError(f"{name} is {value}, must be positive")
        sizes = (self.layers, self.planes, self.tokens, self.heads)
        s, d = self.src, self.dst
        dims = [
            Dim(*row) for row in zip(sizes, s.strides(), d.strides(), s.table_strides(), d.table_strides(), strict=True)
        ]
        folded, run = _fold(dims, self.run)
        src, dst = _flat(s), _flat(d)
        strides = [x for dim in folded for x in (dim.src, dim.dst)] + [src.outer, src.inner, dst.outer, dst.inner]
        for name, value in {
            "dims": folded,
            "run_bytes": run,
            "src_flat": src,
            "dst_flat": dst,
            "stride_alignment": gcd(run, *strides),
            "runs_per_item": prod(d.size for d in folded),
            "item_bytes": prod(d.size for d in folded) * run,
        }.items():
            object.__setattr__(self, name, value)

    def width(self, *addresses: int) -> int:
        """Widest access that the strides, the run and these addresses allow.

        Parameters
        ----------
        *addresses : int
            Base addresses, or all of them or-ed together.

        Returns
        -------
        int
            16, 8, 4, 2 or 1 bytes.
        """
        return gcd(16, self.stride_alignment, *addresses)
