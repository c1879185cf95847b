"""The direct operations of `kvraw.adapters.sglang`: whole pages or runs of tokens, by the copy engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from kvraw.adapters import tensors
from kvraw.adapters.copies import Plan, bound_copies, copy_items
from kvraw.arrays import I64
from kvraw.copying.bound_copies import BoundCopies
from kvraw.copying.given import page_starts
from kvraw.copying.plan import CopyPlan, Side
from kvraw.errors import BoundsError, LayoutError
from kvraw.memo import Memo
from kvraw.plain import require_plain
from kvraw.runtime.context import at_reset

__all__ = ["Known", "copy_pages", "copy_ranges", "copy_tokens", "known", "page_indices"]

T = TypeVar("T")
NAMES = ("src_indices", "dst_indices")
_LAYERS = ("src_layers", "dst_layers")


def _row(name: str, tensor: Any, axes: int) -> tuple[int, tuple[int, ...]]:
    """Bytes of what lies behind a tensor's first axes, without gaps, and bytes from step to step along those."""
    size, strides = int(tensor.element_size()), tuple(tensor.stride())
    row, _ = tensors.row_of(name, tuple(tensor.shape), strides, axes)
    return row * size, tuple(int(s) * size for s in strides[:axes])


def page_indices(src_indices: Any, dst_indices: Any, page_size: int) -> tuple[I64, I64]:
    """Both indices on the host, checked as the operations' own checks go."""
    count = src_indices.numel()
    if count != dst_indices.numel():
        raise RuntimeError("Source and destination indices must have the same length")
    if page_size <= 0:
        raise RuntimeError("Page size must be positive")
    if count % page_size:
        raise RuntimeError("Source indices size must be divisible by page size")
    if src_indices.dtype not in _long or dst_indices.dtype not in _long:
        for which, t in (("Source", src_indices), ("Destination", dst_indices)):
            if tensors.dtype_name(t) != "int64":
                raise RuntimeError(f"{which} indices must be of type long")
            _long.add(t.dtype)
    at = (tensors.host_values if src_indices.is_cuda else tensors.index_array)(src_indices, NAMES[0])
    return at, (tensors.host_values if dst_indices.is_cuda else tensors.index_array)(dst_indices, NAMES[1])


_long: set[object] = set()  # torch's int64


class Known(NamedTuple):
    """What a call on some tensors does that its indices do not change.

    Attributes
    ----------
    device : int or None
        The GPU that takes part.
    copies : BoundCopies or None
        The copies of one item each, a token or a page; None where there is nothing to copy.
    most : tuple of int
        What indices of the source (of pages) and of the destination (of tokens) must be below.
    """

    device: int | None
    copies: BoundCopies | None
    most: tuple[int, int]


def _side(step: int, count: int, token: int = 0) -> Side:
    return Side(outer=step, token=token, table_layer=1, entries=count)


_FEW = 8
_by_value: Memo[tuple[object, ...], Any] = Memo(512)
_by_identity: Memo[tuple[object, ...], tuple[list[object], Any, object]] = Memo(512)
at_reset(_by_value.clear)
at_reset(_by_identity.clear)
_fields = attrgetter("shape", "dtype")


def _require_plain(names: tuple[str, str], *groups: Sequence[Any]) -> None:
    for name, group in zip(names, groups, strict=True):
        for k, t in enumerate(group):
            require_plain(f"{name}[{k}]", t)


def known(
    kind: tuple[object, ...],
    names: tuple[str, str],
    src: Sequence[Any],
    dst: Sequence[Any],
    make: Callable[[], T],
) -> T:
    """What was made for these tensors, by their fields; for lists of all layers, which live long, by identity."""
    many = len(src) + len(dst) > _FEW
    if many:
        who = (kind, tuple(map(id, src)), tuple(map(id, dst)))
        entry = _by_identity.get(who)
        if entry is not None and entry[0] == _places(src, dst):
            return cast(T, entry[1])
    try:
        key = (
            kind,
            len(src),
            *[(t.data_ptr(), t.get_device(), t.stride(), *_fields(t)) for t in (*src, *dst)],
        )
    except (RuntimeError, NotImplementedError):  # one without memory
        _require_plain(names, src, dst)
        raise
    ready: T | None = _by_value.get(key)
    if ready is None:
        _require_plain(names, src, dst)
        ready = _by_value.keep(key, make())
    if many:
        forget = partial(_forget, who)
        _by_identity.keep(who, (_places(src, dst), ready, [weakref.ref(t, forget) for t in (*src, *dst)]))
    return ready


def _forget(who: tuple[object, ...], _: object) -> None:
    _by_identity.pop(who, None)  # one of these tensors is gone, and its identity free


def _places(src: Sequence[Any], dst: Sequence[Any]) -> list[object]:
    """What changes where a tensor is given other memory, or another shape, in place."""
    return [(t.data_ptr(), t.numel(), t.stride()) for t in (*src, *dst)]


@lru_cache(maxsize=256)
def _runs(
    shape: tuple[int, ...], src_strides: tuple[int, ...], dst_strides: tuple[int, ...], size: int
) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of the runs that a token is on both sides, and where they begin in it; `size` is bytes of an element."""
    at, steps = len(shape), [[int(s) * size for s in strides] for strides in (src_strides, dst_strides)]
    run = size
    while at > 1 and (shape[at - 1] == 1 or steps[0][at - 1] == steps[1][at - 1] == run):
        at -= 1
        run *= int(shape[at])
    if at <= 1:
        return run, [(0, 0)]
    inner = np.indices(shape[1:at]).reshape(at - 1, prod(shape[1:at]))
    begins = [(np.array(side[1:at], np.int64) @ inner).tolist() for side in steps]
    return run, list(zip(*begins, strict=True))


def _token_copies(src: Sequence[Any], dst: Sequence[Any]) -> Known:
    members: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for k, (a, b) in enumerate(zip(src, dst, strict=True)):
        if len(a.shape) > 0 and a.shape[1:] == b.shape[1:] and a.dtype == b.dtype:
            run, begins = _runs(a.shape, a.stride(), b.stride(), a.element_size())
        else:
            (run, _), (other, _) = _row(f"src_layers[{k}]", a, 1), _row(f"dst_layers[{k}]", b, 1)
            begins = [(0, 0)]
            if run != other or a.dtype != b.dtype:
                raise LayoutError(
                    f"a token of src_layers[{k}] has {run} bytes, of dst_layers[{k}] {other}, or types differ"
                )
        if run and begins:
            size, bases = int(a.element_size()), (int(a.data_ptr()), int(b.data_ptr()))
            kind = run, int(a.stride()[0]) * size, int(b.stride()[0]) * size
            members.setdefault(kind, []).extend((bases[0] + i, bases[1] + j) for i, j in begins)
    plans = list[Plan]()
    for (run, *steps), ends in members.items():
        sides = [_side(step, len(ends)) for step in steps]
        plan = CopyPlan(sides[0], sides[1], layers=len(ends), planes=1, tokens=1, heads=1, run=run)
        plans.append((plan, [at for at, _ in ends], [to for _, to in ends]))
    most = min(int(t.shape[0]) for t in src), min(int(t.shape[0]) for t in dst)
    return Known(tensors.device_of(src, dst), bound_copies([*src, *dst], plans), most)


def copy_tokens(src: Sequence[Any], dst: Sequence[Any], index: tuple[I64, I64]) -> None:
    """Copy rows along the first axis, of each pair of tensors; rows that follow each other go in one piece."""
    if not len(index[0]) or not src:
        return
    device, copies, most = known(("tokens",), _LAYERS, src, dst, lambda: _token_copies(src, dst))
    at = page_starts(NAMES[0], index[0], 1, most[0], aligned=False)
    to = page_starts(NAMES[1], index[1], 1, most[1], aligned=False)
    if copies is not None:
        copy_items(copies, device, at, to, (src, dst))


def _row_copies(src: Any, dst: Any) -> Known:
    if not src.is_contiguous() or not dst.is_contiguous():
        raise LayoutError("src and dst must lie without gaps")
    (row, _), (other, _) = _row("src", src, 1), _row("dst", dst, 1)
    if row != other:
        raise LayoutError(f"a row of src has {row} bytes, of dst {other}")
    plans, side = list[Plan](), _side(row, 1)
    if row:
        plan = CopyPlan(side, side, layers=1, planes=1, tokens=1, heads=1, run=row)
        plans.append((plan, [int(src.data_ptr())], [int(dst.data_ptr())]))
    most = int(src.shape[0]), int(dst.shape[0])
    return Known(tensors.device_of((src, dst)), bound_copies((src, dst), plans), most)


def copy_ranges(src: Any, dst: Any, starts: tuple[I64, I64], counts: I64) -> None:
    """Copy ranges of rows of one tensor to ranges of another, both without gaps."""
    group = (src,), (dst,)
    device, copies, most = known(("rows",), ("src", "dst"), *group, lambda: _row_copies(src, dst))
    if not len(starts[0]) == len(starts[1]) == len(counts):
        raise BoundsError(f"{len(starts[0])} src_starts, {len(starts[1])} dst_starts and {len(counts)} lengths differ")
    for name, at, end in zip(("src_starts", "dst_starts"), starts, most, strict=True):
        bad = (at < 0) | (counts < 0) | (counts > end - at)
        if bad.any():
            k = int(np.argmax(bad))
            raise BoundsError(f"{name}[{k}] is {at[k]} with {counts[k]} rows, must end by {end}")
    total = int(counts.sum())
    if total and copies is not None:
        within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = [np.repeat(begin, counts) + within for begin in starts]
        copy_items(copies, device, rows[0], rows[1], group)


def _page_copies(
    paged: Sequence[Any],
    layered: Sequence[Any],
    names: tuple[str, str],
    first_layer: int,
    page_size: int,
    to_pages: bool,
) -> Known:
    if len(paged) not in (1, 2) or len(layered) % len(paged):
        raise LayoutError(
            f"{names[0]} has {len(paged)} buffers, must have 1 or 2; {names[1]} has {len(layered)}, a multiple"
        )
    layers = len(layered) // len(paged)
    members: dict[tuple[int, tuple[int, ...], int], list[int]] = {}
    most_pages, most_tokens = [], []
    for plane, buffer in enumerate(paged if layers else ()):
        name, group = f"{names[0]}[{plane}]", layered[plane * layers : (plane + 1) * layers]
        row, steps = _row(name, buffer, 3)
        rows = {_row(f"{names[1]}[{k}]", t, 1) for k, t in enumerate(group, plane * layers)}
        if len(rows) != 1 or min(rows)[0] != row:
            raise LayoutError(f"tokens of {names[1]} must have one stride, and {row} bytes as in {names[0]}")
        pages, held, tokens = map(int, buffer.shape[:3])
        if tokens != page_size or not 0 <= first_layer <= held - layers:
            raise BoundsError(
                f"{name} has pages of {held} layers and {tokens} tokens; must hold layers {first_layer} to "
                f"{first_layer + layers}, and page_size, {page_size}, tokens"
            )
        most_pages.append(pages)
        most_tokens.append(max(min(int(t.shape[0]) for t in group) - page_size + 1, 0))
        members.setdefault((row, steps, rows.pop()[1][0]), []).append(plane)
    plans = list[Plan]()
    for (row, (page, layer_step, token), step), planes in members.items():
        numbers = range(first_layer, first_layer + layers)
        bases = [
            [int(paged[k].data_ptr()) + layer * layer_step for k in planes for layer in numbers],
            [int(t.data_ptr()) for k in planes for t in layered[k * layers : (k + 1) * layers]],
        ]
        count = len(bases[0])
        sides = [_side(page, count, token), _side(step, count, step)]
        if to_pages:
            sides, bases = sides[::-1], bases[::-1]
        if row:
            plan = CopyPlan(sides[0], sides[1], layers=count, planes=1, tokens=page_size, heads=1, run=row)
            plans.append((plan, bases[0], bases[1]))
    most = min(most_pages, default=0) * page_size, min(most_tokens, default=0)
    return Known(tensors.device_of(paged, layered), bound_copies([*paged, *layered], plans), most)


def copy_pages(
    paged: Sequence[Any],
    layered: Sequence[Any],
    paged_indices: I64,
    layered_indices: I64,
    first_layer: int,
    page_size: int,
    to_pages: bool,
) -> None:
    """Copy pages between page-major buffers [page, layer, token, ...] and per-layer buffers [token, ...]."""
    names, index_names = (("dst_ptrs", "src_ptrs"), NAMES[::-1]) if to_pages else (("src_ptrs", "dst_ptrs"), NAMES)
    device, copies, most = known(
        (first_layer, page_size, to_pages),
        names,
        paged,
        layered,
        lambda: _page_copies(paged, layered, names, first_layer, page_size, to_pages),
    )
    if not len(paged_indices) or copies is None:
        return
    pages = page_starts(index_names[0], paged_indices, page_size, most[0], aligned=True)
    tokens = page_starts(index_names[1], layered_indices, page_size, most[1], aligned=False)
    copy_items(copies, device, *((tokens, pages) if to_pages else (pages, tokens)), (paged, layered))
