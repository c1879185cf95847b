"""The kernel operations of `kvraw.adapters.sglang`: rows of tokens between two layouts, one row of data each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from kvraw.adapters import tensors
from kvraw.arrays import U64, IndexVector
from kvraw.engines.device_state import DeviceState, device_state
from kvraw.engines.operands import DeviceTable, Operands
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.plan import CopyPlan, Side
from kvraw.prepared import PreparedCopy
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.memory import locate_all

__all__ = ["End", "Rows", "default_quota", "transfer"]

NO_LIMIT = 2**62
QUOTA_VARIABLE, QUOTA = "SGLANG_HICACHE_BLOCK_QUOTA", 2


@dataclass(frozen=True, slots=True)
class Rows:
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
    layers: int = 1
    first: int = 0
    page: int = 1
    heads: int = 1


@dataclass(frozen=True, slots=True)
class End:
    """One side of an operation.

    Attributes
    ----------
    name : str
        "src" or "dst".
    layout : str
        A name of `_STRIDES`, or "table": one base address per layer, each as "lf".
    tensors : tuple
        K and V, or one tensor: memory, or tables of addresses.
    dim : int
        Bytes of one token of all layers ("pf", "ph", "hg"), or from one token to the next where that is not the item
        ("lf", "table").
    """

    name: str
    layout: str
    tensors: tuple[Any, ...]
    dim: int = 0


# Byte strides of (outer, inner, layer, head), from the item s, the dim d, the page p and the heads h.
_STRIDES: dict[str, Any] = {
    "lf": lambda s, d, p, h: (d or s, 0, 0, s // h),  # [token, head, dim] of one layer
    "pf": lambda s, d, p, h: (d, 0, s, s // h),  # [token, layer, head, dim]
    "ph": lambda s, d, p, h: (p * d, d // h, s // h, p * d // h),  # [page, head, token, layer, dim]
    "hg": lambda s, d, p, h: (p * d, s // h, p * s // h, p * d // h),  # [page, head group, layer, token, dim]
}
_PAGED = ("ph", "hg")


def default_quota(given: int | None) -> int:
    """Thread blocks where the caller names none: the peer's environment variable, asked at each call, else 2."""
    if given is not None:
        return given
    text = os.environ.get(QUOTA_VARIABLE, "")
    try:
        return int(text or QUOTA)
    except ValueError:
        raise ValueError(f"environment variable {QUOTA_VARIABLE}={text!r} must be a number of thread blocks") from None


def _side(end: tuple[str, int, int, int], rows: Rows, planes: int) -> Side:
    layout, dim, limit, table_plane = end
    outer, inner, layer, head = _STRIDES["lf" if layout == "table" else layout](rows.item, dim, rows.page, rows.heads)
    return Side(
        outer=outer,
        inner=inner,
        page=rows.page if layout in _PAGED else 1,
        layer=layer,
        head=head,
        table_layer=int(layout == "table"),
        table_plane=table_plane,
        limit=limit,
        entries=rows.layers * planes if layout == "table" else planes,
    )


@lru_cache(maxsize=1024)
def _prepared(
    src: tuple[str, int, int, int],
    dst: tuple[str, int, int, int],
    rows: Rows,
    planes: int,
    ctas: int,
    threads: int,
    device: int | None,
) -> PreparedCopy:
    plan = CopyPlan(
        _side(src, rows, planes),
        _side(dst, rows, planes),
        layers=rows.layers,
        planes=planes,
        tokens=1,
        heads=rows.heads,
        run=rows.item // rows.heads,
    )
    return PreparedCopy(
        plan,
        device=device,
        engine="auto" if device is None else "kernel",
        ctas=ctas,
        threads=threads,
        index_names=("src_indices", "dst_indices"),
        errors=None if device is None else tensors.errors_of[device],
    )


def _check_rows(rows: Rows, ends: tuple[End, End]) -> None:
    if rows.item <= 0 or rows.layers < 0 or rows.page <= 0 or rows.heads <= 0:
        raise BoundsError(
            f"item_size is {rows.item}, num_layers {rows.layers}, page_size {rows.page}, head_num {rows.heads}: "
            f"must be positive"
        )
    if rows.item % rows.heads:
        raise LayoutError(f"item_size is {rows.item}, must be a multiple of head_num, {rows.heads}")
    for end in ends:
        if end.layout in ("lf", "table"):
            if end.dim and end.dim < rows.item:
                raise LayoutError(f"the {end.name} stride is {end.dim} bytes, an item takes {rows.item}")
        elif end.dim % rows.item or not 0 <= rows.first <= end.dim // rows.item - rows.layers:
            raise BoundsError(
                f"{end.name}_layout_dim is {end.dim}, must be a multiple of item_size, {rows.item}, that holds layers "
                f"{rows.first} to {rows.first + rows.layers}"
            )


def _limit(end: End, rows: Rows) -> int:
    """Tokens that an end holds."""
    if end.layout == "table":
        return NO_LIMIT
    held = min([tensors.reach(t) for t in end.tensors])
    if end.layout == "lf":
        return (held - rows.item) // (end.dim or rows.item) + 1 if held >= rows.item else 0
    return held // (end.dim * rows.page) * rows.page


def _table_ends(end: End, rows: Rows) -> tuple[int, bool]:
    """Distance from the table of K to that of V in entries, and whether the tables lie on the device."""
    on_device = end.tensors[0].is_cuda
    for t, plane in zip(end.tensors, "kv", strict=False):
        if tensors.dtype_name(t) not in ("uint64", "int64"):
            raise TypeError(f"the {end.name} {plane} table holds {tensors.dtype_name(t)}, must hold uint64")
        if t.numel() < rows.layers:
            raise BoundsError(f"the {end.name} {plane} table has {t.numel()} addresses, must have {rows.layers}")
        if t.is_cuda != on_device or not t.is_contiguous():
            raise PlacementError(f"the {end.name} tables of k and v must be dense and lie at one place")
    if len(end.tensors) == 1:
        return 0, on_device
    if not on_device:
        return rows.layers, False
    return (end.tensors[1].data_ptr() - end.tensors[0].data_ptr()) // 8, True


def _operands(
    end: End, rows: Rows, layer: int, index: IndexVector, state: DeviceState, stream: int, on_device: bool
) -> Operands:
    """An end as the kernel takes it; `layer` is the stride of layers."""
    if end.layout == "table":
        if on_device:
            bits = 0
            for t in end.tensors:
                bits |= tensors.device_table_bits(t, state, stream)
            first = end.tensors[0]
            return Operands(_NONE, index, DeviceTable(first.data_ptr(), first.numel(), bits))
        bases, _ = locate_all(_host_bases(end, rows, layer))
        if not bases.all():
            raise PlacementError(f"{end.name}: an address in its table is pageable host memory")
        return Operands(bases, index)
    offset = rows.first * layer
    return Operands(np.array([tensors.mapped_address(end.name, t) + offset for t in end.tensors], np.uint64), index)


_NONE: U64 = np.zeros(0, np.uint64)


def _host_bases(end: End, rows: Rows, layer: int) -> U64:
    if end.layout == "table":
        return np.concatenate([tensors.table_array(t)[: rows.layers] for t in end.tensors])
    return np.array([t.data_ptr() + rows.first * layer for t in end.tensors], np.uint64)


def transfer(
    src: End,
    dst: End,
    src_indices: Any,
    dst_indices: Any,
    rows: Rows,
    quota: int,
    warps: int,
    dtypes: tuple[str, ...] = ("int64",),
) -> None:
    """Move the rows of these tokens, on the current stream of the GPU that the indices lie on.

    Where nothing at all lies on a GPU, the CPU engine moves them before the call returns.

    Raises
    ------
    RuntimeError
        What the operation has a check for, in its words.
    BoundsError, LayoutError, PlacementError, TypeError
        The rest; or what the kernel of an earlier operation on the device found.
    """
    on_gpu = src_indices.is_cuda
    if not (on_gpu and dst_indices.is_cuda):
        anywhere = (*src.tensors, *dst.tensors, src_indices, dst_indices)
        if any(t.is_cuda for t in anywhere):
            which = "Destination" if on_gpu else "Source"
            raise RuntimeError(f"{which} indices must be a CUDA tensor")
    names = tensors.dtype_name(src_indices), tensors.dtype_name(dst_indices)
    for which, name in zip(("Source", "Destination"), names, strict=True):
        if name not in dtypes:
            raise RuntimeError(f"{which} indices must be of type long")
    count = src_indices.numel()
    if count != dst_indices.numel():
        raise RuntimeError("Source and destination indices must have the same length")
    if rows.item % 8:
        raise RuntimeError("Item byte size must be divisible by 8")
    if quota <= 0 or not 0 < warps <= 32:
        raise BoundsError(
            f"block_quota is {quota}, num_warps_per_block {warps}: must be positive, and at most 32 warps"
        )
    _check_rows(rows, (src, dst))
    specs, at = [], []
    planes = len(src.tensors)
    for end in (src, dst):
        plane, on_device = _table_ends(end, rows) if end.layout == "table" else (planes - 1, False)
        if on_device and not on_gpu:
            raise PlacementError(f"the {end.name} table lies on a GPU, the indices do not")
        specs.append((end.layout, end.dim, _limit(end, rows), plane))
        at.append(on_device)
    if not count or not rows.layers:
        return
    device = int(src_indices.get_device()) if on_gpu else None
    # The plan of one layer serves all: the first layer goes into the addresses.
    kept = Rows(rows.item, rows.layers, 0, rows.page, rows.heads) if rows.first else rows
    copy = _prepared(specs[0], specs[1], kept, planes, quota, warps * 32, device)
    steps = copy.plan.src.layer, copy.plan.dst.layer
    if device is None:
        copy(
            _host_bases(src, rows, steps[0]),
            _host_bases(dst, rows, steps[1]),
            count,
            src_index=tensors.index_array(src_indices),
            dst_index=tensors.index_array(dst_indices),
        )
        return
    if dst_indices.get_device() != device:
        raise PlacementError(f"src_indices lie on device {device}, dst_indices on {dst_indices.get_device()}")
    index = []
    for t, name in zip((src_indices, dst_indices), names, strict=True):
        t = t if t.is_contiguous() else t.contiguous()
        index.append(IndexVector(None, t.data_ptr(), count, 4 if name == "int32" else 8, device, t))
    stream = tensors.current_stream(device)
    with DeviceScope(device):
        state = device_state(device)
        copy.launch(
            _operands(src, rows, steps[0], index[0], state, stream, at[0]),
            _operands(dst, rows, steps[1], index[1], state, stream, at[1]),
            count,
            stream,
            link=True,
            refs=(src, dst, index),
        )
