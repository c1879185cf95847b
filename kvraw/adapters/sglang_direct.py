"""The direct operations of `kvraw.adapters.sglang`: whole pages or runs of tokens, by the copy engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from kvraw.adapters import tensors
from kvraw.adapters.copies import bound_copies, copy_items
from kvraw.arrays import I64
from kvraw.copying.bound_copies import BoundCopies
from kvraw.copying.given import page_starts
from kvraw.copying.plan import CopyPlan, Side
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.plain import require_plain
from kvraw.runtime.context import at_reset

__all__ = ["copy_pages", "copy_tokens", "device_of", "page_indices"]

NAMES = ("src_indices", "dst_indices")
_LAYERS = ("src_layers", "dst_layers")


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor as rows along its first axes: bytes from row to row, and what one row takes."""

    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    row: int


def _rows(name: str, tensor: Any, axes: int) -> _Rows:
    """A tensor whose axes behind the first `axes` lie without gaps."""
    shape, strides, size = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.element_size())
    if len(shape) < axes:
        raise LayoutError(f"{name} has shape {shape}, must have at least {axes} axes")
    row = size
    for n, step in zip(reversed(shape[axes:]), reversed(strides[axes:]), strict=True):
        if n != 1 and step * size != row:
            raise LayoutError(f"{name} has shape {shape}, strides {strides}: gaps inside a token's bytes")
        row *= int(n)
    return _Rows(tuple(int(s) * size for s in strides[:axes]), tuple(int(n) for n in shape[:axes]), row)


def _all_rows(name: str, group: Sequence[Any], axes: int) -> list[_Rows]:
    """`_rows` of many tensors, most of which are alike."""
    out: list[_Rows] = []
    last = None
    for k, t in enumerate(group):
        alike = last is not None and t.shape == last.shape and t.stride() == last.stride() and t.dtype == last.dtype
        out.append(out[-1] if alike else _rows(f"{name}[{k}]", t, axes))
        last = t
    return out


def device_of(*groups: Sequence[Any]) -> int | None:
    """The GPU that some of these tensors lie on; None where all lie on the host."""
    found = {int(t.get_device()) for group in groups for t in group if t.is_cuda}
    if len(found) > 1:
        raise PlacementError(f"tensors lie on devices {sorted(found)}, must lie on one and the host")
    return found.pop() if found else None


def page_indices(src_indices: Any, dst_indices: Any, page_size: int) -> tuple[I64, I64]:
    """Both indices on the host, checked as the operations' own checks go."""
    count = src_indices.numel()
    if count != dst_indices.numel():
        raise RuntimeError("Source and destination indices must have the same length")
    if page_size <= 0:
        raise RuntimeError("Page size must be positive")
    if count % page_size:
        raise RuntimeError("Source indices size must be divisible by page size")
    for which, t in (("Source", src_indices), ("Destination", dst_indices)):
        if tensors.dtype_name(t) != "int64":
            raise RuntimeError(f"{which} indices must be of type long")
    return tensors.host_values(src_indices, "src_indices"), tensors.host_values(dst_indices, "dst_indices")


class _Ready(NamedTuple):
    """What is known of tensors: what a call does that its indices do not change.

    Attributes
    ----------
    device : int or None
        The GPU that takes part.
    copies : BoundCopies
        The copies of one item each, a token or a page.
    most : tuple of int
        What indices of the source (of pages) and of the destination (of tokens) must be below.
    """

    device: int | None
    copies: BoundCopies
    most: tuple[int, int]


def _side(step: int, count: int, token: int = 0) -> Side:
    return Side(outer=step, token=token, table_layer=1, entries=count)


_FEW, _MOST = 8, 512
_by_value: dict[tuple[object, ...], _Ready] = {}
_by_identity: dict[tuple[object, ...], tuple[list[object], _Ready, object]] = {}
at_reset(_by_value.clear)
at_reset(_by_identity.clear)
_fields = attrgetter("shape", "dtype")


def _require_plain(names: tuple[str, str], *groups: Sequence[Any]) -> None:
    for name, group in zip(names, groups, strict=True):
        for k, t in enumerate(group):
            require_plain(f"{name}[{k}]", t)


def _known(
    kind: tuple[object, ...],
    names: tuple[str, str],
    src: Sequence[Any],
    dst: Sequence[Any],
    make: Callable[[], _Ready],
) -> _Ready:
    """What is known of these tensors, by their fields; the lists of all layers, which live long, by identity."""
    many = len(src) + len(dst) > _FEW
    if many:
        who = (kind, tuple(map(id, src)), tuple(map(id, dst)))
        entry = _by_identity.get(who)
        if entry is not None and entry[0] == _places(src, dst):
            return entry[1]
    try:
        key = (
            kind,
            *[tuple([(t.data_ptr(), t.get_device(), t.stride(), *_fields(t)) for t in group]) for group in (src, dst)],
        )
    except (RuntimeError, NotImplementedError):  # one without memory
        _require_plain(names, src, dst)
        raise
    ready = _by_value.get(key)
    if ready is None:
        _require_plain(names, src, dst)
        if len(_by_value) >= _MOST:
            _by_value.clear()
        ready = _by_value[key] = make()
    if many:
        if len(_by_identity) >= _MOST:
            _by_identity.clear()
        forget = partial(_forget, who)
        _by_identity[who] = _places(src, dst), ready, [weakref.ref(t, forget) for t in (*src, *dst)]
    return ready


def _forget(who: tuple[object, ...], _: object) -> None:
    _by_identity.pop(who, None)  # one of these tensors is gone, and its identity free


def _places(src: Sequence[Any], dst: Sequence[Any]) -> list[object]:
    """What changes where a tensor is given other memory, or another shape, in place."""
    return [(t.data_ptr(), t.numel(), t.stride()) for group in (src, dst) for t in group]


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


def _token_copies(src: Sequence[Any], dst: Sequence[Any]) -> _Ready:
    members: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for k, (a, b) in enumerate(zip(src, dst, strict=True)):
        if len(a.shape) > 0 and a.shape[1:] == b.shape[1:] and a.dtype == b.dtype:
            run, begins = _runs(a.shape, a.stride(), b.stride(), a.element_size())
        else:
            x, y = _rows(f"src_layers[{k}]", a, 1), _rows(f"dst_layers[{k}]", b, 1)
            run, begins = x.row, [(0, 0)]
            if x.row != y.row or a.dtype != b.dtype:
                raise LayoutError(
                    f"a token of src_layers[{k}] has {x.row} bytes, of dst_layers[{k}] {y.row}, or types differ"
                )
        if run and begins:
            size, bases = int(a.element_size()), (int(a.data_ptr()), int(b.data_ptr()))
            kind = run, int(a.stride()[0]) * size, int(b.stride()[0]) * size
            members.setdefault(kind, []).extend((bases[0] + i, bases[1] + j) for i, j in begins)
    copies = bound_copies([*src, *dst])
    for (run, *steps), ends in members.items():
        sides = [_side(step, len(ends)) for step in steps]
        plan = CopyPlan(sides[0], sides[1], layers=len(ends), planes=1, tokens=1, heads=1, run=run)
        copies.add(plan, [at for at, _ in ends], [to for _, to in ends])
    return _Ready(device_of(src, dst), copies, (min(int(t.shape[0]) for t in src), min(int(t.shape[0]) for t in dst)))


def copy_tokens(src: Sequence[Any], dst: Sequence[Any], index: tuple[I64, I64]) -> None:
    """Copy rows along the first axis, of each pair of tensors; rows that follow each other go in one piece."""
    if not len(index[0]) or not src:
        return
    device, copies, most = _known(("tokens",), _LAYERS, src, dst, lambda: _token_copies(src, dst))
    at, to = (page_starts(NAMES[k], index[k], 1, most[k], aligned=False) for k in (0, 1))
    if copies:
        copy_items(copies, device, at, to, (src, dst))


def _page_copies(
    paged: Sequence[Any],
    layered: Sequence[Any],
    names: tuple[str, str],
    first_layer: int,
    page_size: int,
    to_pages: bool,
) -> _Ready:
    if len(paged) not in (1, 2) or len(layered) % len(paged):
        raise LayoutError(
            f"{names[0]} has {len(paged)} buffers, must have 1 or 2; {names[1]} has {len(layered)}, a multiple"
        )
    layers = len(layered) // len(paged)
    members: dict[tuple[_Rows, int], list[int]] = {}
    most_pages, most_tokens = [], []
    for plane, buffer in enumerate(paged if layers else ()):
        p = _rows(f"{names[0]}[{plane}]", buffer, 3)
        rows = set(_all_rows(names[1], layered[plane * layers : (plane + 1) * layers], 1))
        steps = {r.steps for r in rows}
        if len(steps) != 1 or {r.row for r in rows} != {p.row}:
            raise LayoutError(f"tokens of {names[1]} must have one stride, and {p.row} bytes as in {names[0]}")
        if p.sizes[2] != page_size or not 0 <= first_layer <= p.sizes[1] - layers:
            raise BoundsError(
                f"{names[0]}[{plane}] has pages of {p.sizes[1]} layers and {p.sizes[2]} tokens; must hold layers "
                f"{first_layer} to {first_layer + layers}, and page_size, {page_size}, tokens"
            )
        most_pages.append(p.sizes[0])
        most_tokens.append(max(min(r.sizes[0] for r in rows) - page_size + 1, 0))
        members.setdefault((p, steps.pop()[0]), []).append(plane)
    copies = bound_copies([*paged, *layered])
    for (p, step), planes in members.items():
        numbers = range(first_layer, first_layer + layers)
        pages = [int(paged[k].data_ptr()) + layer * p.steps[1] for k in planes for layer in numbers]
        tokens = [int(t.data_ptr()) for k in planes for t in layered[k * layers : (k + 1) * layers]]
        sides = [_side(p.steps[0], len(pages), p.steps[2]), _side(step, len(tokens), step)]
        bases = [pages, tokens]
        if to_pages:
            sides, bases = sides[::-1], bases[::-1]
        if p.row:
            counts = {"layers": len(pages), "planes": 1, "tokens": page_size, "heads": 1}
            copies.add(CopyPlan(sides[0], sides[1], **counts, run=p.row), *bases)
    return _Ready(
        device_of(paged, layered), copies, (min(most_pages, default=0) * page_size, min(most_tokens, default=0))
    )


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
    device, copies, most = _known(
        (first_layer, page_size, to_pages),
        names,
        paged,
        layered,
        lambda: _page_copies(paged, layered, names, first_layer, page_size, to_pages),
    )
    if not len(paged_indices) or not copies:
        return
    pages = page_starts(index_names[0], paged_indices, page_size, most[0], aligned=True)
    tokens = page_starts(index_names[1], layered_indices, page_size, most[1], aligned=False)
    copy_items(copies, device, *((tokens, pages) if to_pages else (pages, tokens)), (paged, layered))
