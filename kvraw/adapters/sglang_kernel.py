"""The kernel operations of `kvraw.adapters.sglang`: rows of tokens between two layouts, one row of data each."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, NamedTuple

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
    layers: int = 1
    first: int = 0
    page: int = 1
    heads: int = 1


class End(NamedTuple):
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


class _Seen(NamedTuple):
    """What of a tensor decides how it is used: one key of the cache of ready copies."""

    address: int
    values: int
    dtype: Any
    nbytes: int
    is_cuda: bool
    dense: bool


_Fields = tuple[int, int, Any, int, bool, bool]  # a plain tuple: made four times in every call


def _see(tensor: Any) -> _Fields:
    """The fields of `_Seen`."""
    dense, count = tensor.is_contiguous(), tensor.numel()
    nbytes = count * tensor.element_size() if dense else tensors.reach(tensor)
    return tensor.data_ptr(), count, tensor.dtype, nbytes, tensor.is_cuda, dense


class _Side(NamedTuple):
    """One side of a ready copy.

    Attributes
    ----------
    side : Side
        Its strides.
    bases : numpy.ndarray
        Addresses as the host knows them; empty where a table lies on the device.
    mapped : numpy.ndarray
        As the device saw them when the copy was made ready.
    pinned : tuple of (int, int)
        Addresses of host memory and what the device saw there: asked anew at each call, for it may have been unpinned.
    table : tuple of (int, int) or None
        Address and length of a table on the device.
    """

    side: Side
    bases: U64
    mapped: U64
    pinned: tuple[tuple[int, int], ...] = ()
    table: tuple[int, int] | None = None


class _Ready(NamedTuple):
    copy: PreparedCopy
    src: _Side
    dst: _Side


def _limit(layout: str, dim: int, seen: tuple[_Seen, ...], rows: Rows) -> int:
    """Tokens that an end holds."""
    held = min(t.nbytes for t in seen)
    if layout == "lf":
        return (held - rows.item) // (dim or rows.item) + 1 if held >= rows.item else 0
    return held // (dim * rows.page) * rows.page


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


def _check_tables(name: str, seen: tuple[_Seen, ...], rows: Rows, device: int | None) -> None:
    for t, plane in zip(seen, "kv", strict=False):
        dtype = str(t.dtype).removeprefix("torch.")
        if dtype not in ("uint64", "int64"):
            raise TypeError(f"the {name} {plane} table holds {dtype}, must hold uint64")
        if t.values < rows.layers:
            raise BoundsError(f"the {name} {plane} table has {t.values} addresses, must have {rows.layers}")
        if t.is_cuda != seen[0].is_cuda or not t.dense:
            raise PlacementError(f"the {name} tables of k and v must be dense and lie at one place")
        if t.is_cuda and device is None:
            raise PlacementError(f"the {name} table lies on a GPU, the indices do not")


def _end(name: str, layout: str, dim: int, fields: tuple[_Fields, ...], rows: Rows, device: int | None) -> _Side:
    seen = tuple(_Seen(*t) for t in fields)
    _check_rows(name, layout, dim, rows)
    steps = _STRIDES["lf" if layout == "table" else layout](rows.item, dim, rows.page, rows.heads)
    outer, inner, layer, head = steps
    planes, is_table = len(seen), layout == "table"
    table_plane = planes - 1
    if is_table:
        _check_tables(name, seen, rows, device)
        # On the device K's table and V's are one: what lies between them is the stride from plane to plane.
        table_plane = (seen[-1].address - seen[0].address) // 8 if seen[0].is_cuda else rows.layers * (planes - 1)
    side = Side(
        outer=outer,
        inner=inner,
        page=rows.page if layout in _PAGED else 1,
        layer=layer,
        head=head,
        table_layer=int(is_table),
        table_plane=table_plane,
        limit=NO_LIMIT if is_table else _limit(layout, dim, seen, rows),
        entries=rows.layers * planes if is_table else planes,
    )
    if is_table:
        return _Side(side, _NONE, _NONE, table=(seen[0].address, seen[0].values) if seen[0].is_cuda else None)
    offset = rows.first * layer
    bases = np.array([t.address + offset for t in seen], np.uint64)
    if device is None:
        return _Side(side, bases, bases)
    pinned = tuple((t.address, tensors.mapped_address(name, t.address)) for t in seen if not t.is_cuda)
    known = dict(pinned)
    mapped = np.array([known.get(t.address, t.address) + offset for t in seen], np.uint64)
    return _Side(side, bases, mapped, pinned)


@lru_cache(maxsize=2048)
def _ready(
    src: tuple[str, int, tuple[_Fields, ...]],
    dst: tuple[str, int, tuple[_Fields, ...]],
    rows: Rows,
    ctas: int,
    threads: int,
    device: int | None,
) -> _Ready:
    """A copy made ready for tensors at these places: all that does not change from call to call."""
    ends = _end("src", *src, rows, device), _end("dst", *dst, rows, device)
    plan = CopyPlan(
        ends[0].side,
        ends[1].side,
        layers=rows.layers or 1,
        planes=len(src[2]),
        tokens=1,
        heads=rows.heads,
        run=rows.item // rows.heads,
    )
    copy = PreparedCopy(
        plan,
        device=device,
        engine="auto" if device is None else "kernel",
        ctas=ctas,
        threads=threads,
        index_names=("src_indices", "dst_indices"),
        errors=None if device is None else tensors.errors_of[device],
    )
    return _Ready(copy, *ends)


def _host_tables(end: End, rows: Rows) -> U64:
    return np.concatenate([tensors.table_array(t)[: rows.layers] for t in end.tensors])


def _operands(
    end: End, side: _Side, rows: Rows, index: IndexVector, state: DeviceState, stream: int
) -> Operands | None:
    """An end as the kernel takes it; None where pinned memory is no longer what it was."""
    if side.table is not None:
        bits = 0
        for t in end.tensors:
            bits |= tensors.device_table_bits(t, state, stream)
        return Operands(_NONE, index, DeviceTable(side.table[0], side.table[1], bits))
    if end.layout == "table":
        found = locate_all(_host_tables(end, rows))
        if found.pageable:
            raise PlacementError(f"{end.name}: an address in its table is pageable host memory")
        return Operands(found.seen, index)
    for address, mapped in side.pinned:
        if tensors.mapped_address(end.name, address) != mapped:
            return None
    return Operands(side.mapped, index)


_NONE: U64 = np.zeros(0, np.uint64)


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
    if names[0] not in dtypes or names[1] not in dtypes:
        which = "Destination" if names[0] in dtypes else "Source"
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
    device = src_indices.get_device() if on_gpu else None
    seen = [(end.layout, end.dim, tuple([_see(t) for t in end.tensors])) for end in (src, dst)]
    key = seen[0], seen[1], rows, quota, warps * 32, device
    if device is None:
        ready = _ready(*key)
        if count and rows.layers:
            bases = [
                r.bases if len(r.bases) else _host_tables(e, rows) for e, r in ((src, ready.src), (dst, ready.dst))
            ]
            index = tensors.index_array(src_indices), tensors.index_array(dst_indices)
            ready.copy(bases[0], bases[1], count, src_index=index[0], dst_index=index[1])
        return
    if dst_indices.get_device() != device:
        raise PlacementError(f"src_indices lie on device {device}, dst_indices on {dst_indices.get_device()}")
    stream = tensors.current_stream(device)
    with DeviceScope(device):
        ready = _ready(*key)
        if not count or not rows.layers:
            return
        state = device_state(device)
        at = _on_device(src_indices, names[0], count, device), _on_device(dst_indices, names[1], count, device)
        ends = (
            _operands(src, ready.src, rows, at[0], state, stream),
            _operands(dst, ready.dst, rows, at[1], state, stream),
        )
        if ends[0] is not None and ends[1] is not None:
            ready.copy.launch(state, ends[0], ends[1], count, stream, link=True, refs=(src, dst, at))
            return
    _ready.cache_clear()  # host memory was unpinned, or pinned elsewhere, since
    transfer(src, dst, src_indices, dst_indices, rows, quota, warps, dtypes)


def _on_device(index: Any, dtype: str, count: int, device: int) -> IndexVector:
    if not index.is_contiguous():
        index = index.contiguous()
    return IndexVector(None, index.data_ptr(), count, 4 if dtype == "int32" else 8, device, index)
