"""The direct operations of `kvraw.adapters.sglang`: whole pages or runs of tokens, by the copy engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from kvraw.adapters import tensors
from kvraw.arrays import I64, IndexVector
from kvraw.engines.device_state import device_state
from kvraw.engines.operands import Operands
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.plan import CopyPlan, Side
from kvraw.prepared import PreparedCopy
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.memory import locate_all

__all__ = ["copy_pages", "copy_tokens", "device_of", "page_indices"]

NAMES = ("src_indices", "dst_indices")


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
    if src_indices.numel() != dst_indices.numel():
        raise RuntimeError("Source and destination indices must have the same length")
    if page_size <= 0:
        raise RuntimeError("Page size must be positive")
    if src_indices.numel() % page_size:
        raise RuntimeError("Source indices size must be divisible by page size")
    for which, t in (("Source", src_indices), ("Destination", dst_indices)):
        if tensors.dtype_name(t) != "int64":
            raise RuntimeError(f"{which} indices must be of type long")
    return tensors.host_values(src_indices), tensors.host_values(dst_indices)


@lru_cache(maxsize=1024)
def _prepared(
    src: Side, dst: Side, layers: int, planes: int, tokens: int, row: int, device: int | None
) -> PreparedCopy:
    plan = CopyPlan(src, dst, layers=layers, planes=planes, tokens=tokens, heads=1, run=row)
    return PreparedCopy(plan, device=device, engine="auto" if device is None else "copy", index_names=NAMES)


def _run(
    copy: PreparedCopy,
    src: tuple[Sequence[Any], list[int]],
    dst: tuple[Sequence[Any], list[int]],
    index: tuple[I64, I64],
    refs: object,
) -> None:
    """Copy with indices that were checked; each side is its tensors, and where the copy finds their bytes."""
    ids = [IndexVector(i, 0, len(i)) for i in index]
    bases = [np.array(side[1], np.uint64) for side in (src, dst)]
    device = copy.device
    if device is None:
        copy(bases[0], bases[1], len(index[0]), src_index=ids[0], dst_index=ids[1])
        return
    stream = tensors.current_stream(device)
    on_host = [at for group, addresses in (src, dst) for t, at in zip(group, addresses, strict=True) if not t.is_cuda]
    with DeviceScope(device):
        pageable = bool(on_host) and not locate_all(np.array(on_host, np.uint64))[0].all()
        ends = [Operands(b, i) for b, i in zip(bases, ids, strict=True)]
        copy.batch(device_state(device), ends[0], ends[1], len(index[0]), stream, pageable=pageable, refs=refs)


def copy_tokens(src: Sequence[Any], dst: Sequence[Any], index: tuple[I64, I64]) -> None:
    """Copy rows along the first axis, of each pair of tensors; pairs of one geometry go together."""
    if not len(index[0]) or not src:
        return
    device = device_of(src, dst)
    groups: dict[tuple[int, int, int], list[int]] = {}
    views = list(zip(_all_rows("src_layers", src, 1), _all_rows("dst_layers", dst, 1), strict=True))
    for k, (a, b, (x, y)) in enumerate(zip(src, dst, views, strict=True)):
        if x.row != y.row or tensors.dtype_name(a) != tensors.dtype_name(b):
            raise LayoutError(
                f"a token of src_layers[{k}] has {x.row} bytes, of dst_layers[{k}] {y.row}, or types differ"
            )
        if x.row:
            groups.setdefault((x.row, x.steps[0], y.steps[0]), []).append(k)
    # All is checked before anything moves.
    for which, name, values in ((0, NAMES[0], index[0]), (1, NAMES[1], index[1])):
        held = min(v[which].sizes[0] for v in views)
        bad = (values < 0) | (values >= held)
        if bad.any():
            at = int(np.argmax(bad))
            raise BoundsError(f"{name}[{at}] is {values[at]}, must be in [0, {held})")
    for (row, step, to), members in groups.items():
        count = len(members)
        sides = (Side(outer=s, table_layer=1, entries=count) for s in (step, to))
        copy = _prepared(*sides, count, 1, 1, row, device)
        ends = [([side[k] for k in members], [side[k].data_ptr() for k in members]) for side in (src, dst)]
        _run(copy, ends[0], ends[1], index, (src, dst))


def _first_of_pages(name: str, values: I64, page_size: int, aligned: bool) -> I64:
    """First index of each page, once its pages are known to be pages."""
    pages = values.reshape(-1, page_size)
    first = pages[:, 0]
    wrong = (pages != first[:, None] + np.arange(page_size)).any(1)
    if aligned:
        wrong |= first % page_size != 0
    if wrong.any():
        at = int(np.argmax(wrong)) * page_size
        rule = f"start at a multiple of {page_size} and ascend by 1" if aligned else "ascend by 1"
        raise BoundsError(f"{name}[{at}:{at + page_size}] is {values[at : at + page_size]}, a page; must {rule}")
    return np.ascontiguousarray(first)


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
    names = (("dst_ptrs", "src_ptrs"), (NAMES[1], NAMES[0])) if to_pages else (("src_ptrs", "dst_ptrs"), NAMES)
    if len(paged) not in (1, 2) or len(layered) % max(len(paged), 1):
        raise LayoutError(
            f"{names[0][0]} has {len(paged)} buffers, must have 1 or 2; {names[0][1]} has {len(layered)}, a multiple"
        )
    layers = len(layered) // len(paged)
    pages = _first_of_pages(names[1][0], paged_indices, page_size, aligned=True) // page_size
    tokens = _first_of_pages(names[1][1], layered_indices, page_size, aligned=False)
    if not len(pages) or not layers:
        return
    device = device_of(paged, layered)
    parts: dict[tuple[_Rows, int], list[int]] = {}
    for plane, buffer in enumerate(paged):
        p = _rows(f"{names[0][0]}[{plane}]", buffer, 3)
        rows = set(_all_rows(names[0][1], layered[plane * layers : (plane + 1) * layers], 1))
        steps, held = {r.steps for r in rows}, min(r.sizes[0] for r in rows)
        if len(steps) != 1 or {r.row for r in rows} != {p.row}:
            raise LayoutError(f"tokens of {names[0][1]} must have one stride, and {p.row} bytes as in {names[0][0]}")
        if p.sizes[2] != page_size or not 0 <= first_layer <= p.sizes[1] - layers:
            raise BoundsError(
                f"{names[0][0]}[{plane}] has pages of {p.sizes[1]} layers and {p.sizes[2]} tokens; must hold layers "
                f"{first_layer} to {first_layer + layers}, and page_size, {page_size}, tokens"
            )
        for name, values, most in ((names[1][0], pages, p.sizes[0]), (names[1][1], tokens, held - page_size + 1)):
            bad = (values < 0) | (values >= most)
            if bad.any():
                at = int(np.argmax(bad))
                unit = f"page {values[at]}, must be below {most}" if most == p.sizes[0] else f"{values[at]} + a page"
                raise BoundsError(f"{name}[{at * page_size}] lies outside its buffer: {unit}")
        parts.setdefault((p, steps.pop()[0]), []).append(plane)
    for (p, step), planes in parts.items():
        per_page = Side(outer=p.steps[0], layer=p.steps[1], token=p.steps[2], table_plane=1, entries=len(planes))
        per_layer = Side(outer=step, token=step, table_layer=1, table_plane=layers, entries=layers * len(planes))
        buffers = [paged[k] for k in planes]
        others = [t for k in planes for t in layered[k * layers : (k + 1) * layers]]
        from_pages = buffers, [t.data_ptr() + first_layer * p.steps[1] for t in buffers]
        from_layers = others, [t.data_ptr() for t in others]
        ends = [(per_page, from_pages, pages), (per_layer, from_layers, tokens)]
        (src, reads, source), (dst, writes, target) = ends[::-1] if to_pages else ends
        copy = _prepared(src, dst, layers, len(planes), page_size, p.row, device)
        _run(copy, reads, writes, (source, target), (paged, layered))
