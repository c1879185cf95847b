"""The direct operations of `kvraw.adapters.sglang`: whole pages or runs of tokens, by the copy engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvraw.adapters import tensors
from kvraw.arrays import I64, U64, IndexVector
from kvraw.engines.device_state import device_state
from kvraw.engines.operands import Operands
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.plan import CopyPlan, Side
from kvraw.prepared import PreparedCopy
from kvraw.runtime.context import DeviceScope

__all__ = ["copy_pages", "copy_tokens", "device_of", "page_indices"]

NAMES = ("src_indices", "dst_indices")
Bases = list[tuple[int, bool]]


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


class _Part(NamedTuple):
    """A copy made ready for tensors at their places, and the addresses of it that are host memory."""

    copy: PreparedCopy
    src: U64
    dst: U64
    on_host: list[int]


def _part(copy: PreparedCopy, src: Bases, dst: Bases) -> _Part:
    """Of each side: addresses, and whether each is on a GPU."""
    on_host = [a for side in (src, dst) for a, is_cuda in side if not is_cuda]
    bases = [np.array([a for a, _ in side], np.uint64) for side in (src, dst)]
    return _Part(copy, bases[0], bases[1], on_host)


def _run(part: _Part, src_index: I64, dst_index: I64, refs: object) -> None:
    """Copy with indices that were checked."""
    copy, count, device = part.copy, len(src_index), part.copy.device
    at, to = IndexVector(src_index, 0, count), IndexVector(dst_index, 0, count)
    if device is None:
        copy(part.src, part.dst, count, src_index=at, dst_index=to)
        return
    stream = tensors.current_stream(device)
    with DeviceScope(device):
        pageable = not tensors.all_pinned(part.on_host)
        ends = Operands(part.src, at), Operands(part.dst, to)
        copy.batch(device_state(device), ends[0], ends[1], count, stream, pageable=pageable, refs=refs)


def _bounded(name: str, values: I64, most: int, step: int = 1) -> None:
    # As unsigned numbers, negative ones are above every limit: one pass tells for both ends.
    if int(np.maximum.reduce(values.view(np.uint64))) < most:
        return
    at = int(np.argmax((values < 0) | (values >= most)))
    what = "" if step == 1 else f", with the {step} tokens of a page"
    raise BoundsError(f"{name}[{at * step}] is {values[at]}{what}, must be in [0, {most})")


def _ascends(values: I64, page_size: int) -> np.ndarray[Any, Any]:
    """Which pages of indices ascend by one."""
    pages = values.reshape(-1, page_size)
    ascends: np.ndarray[Any, Any] = (pages[:, 1:] - pages[:, :-1] == 1).all(1)
    return ascends


def copy_tokens(src: Sequence[Any], dst: Sequence[Any], index: tuple[I64, I64], page_size: int) -> None:
    """Copy rows along the first axis, of each pair of tensors; pairs of one geometry go together."""
    if not len(index[0]) or not src:
        return
    device = device_of(src, dst)
    groups: dict[tuple[int, int, int], list[int]] = {}
    views = _all_rows("src_layers", src, 1), _all_rows("dst_layers", dst, 1)
    for k, (a, b, x, y) in enumerate(zip(src, dst, *views, strict=True)):
        if x.row != y.row or a.dtype != b.dtype:
            raise LayoutError(
                f"a token of src_layers[{k}] has {x.row} bytes, of dst_layers[{k}] {y.row}, or types differ"
            )
        if x.row:
            groups.setdefault((x.row, x.steps[0], y.steps[0]), []).append(k)
    for name, values, rows in zip(NAMES, index, views, strict=True):  # all is checked before anything moves
        _bounded(name, values, min(v.sizes[0] for v in rows))
    tokens = 1
    if page_size > 1 and _ascends(index[0], page_size).all() and _ascends(index[1], page_size).all():
        # Whole pages: one item each, not one per token.
        tokens = page_size
        index = np.ascontiguousarray(index[0][::page_size]), np.ascontiguousarray(index[1][::page_size])
    for (row, step, to), members in groups.items():
        count = len(members)
        sides = [Side(outer=s, token=s, table_layer=1, entries=count) for s in (step, to)]
        copy = _prepared(sides[0], sides[1], count, 1, tokens, row, device)
        bases = [[(side[k].data_ptr(), side[k].is_cuda) for k in members] for side in (src, dst)]
        _run(_part(copy, *bases), *index, (src, dst))


def _first_of_pages(name: str, values: I64, page_size: int, aligned: bool) -> I64:
    """First index of each page, once its pages are known to be pages."""
    right = _ascends(values, page_size)
    first = np.ascontiguousarray(values[::page_size])
    if aligned:
        right &= first % page_size == 0
    if not right.all():
        at = int(np.argmin(right)) * page_size
        rule = f"start at a multiple of {page_size} and ascend by 1" if aligned else "ascend by 1"
        raise BoundsError(f"{name}[{at}:{at + page_size}] is {values[at : at + page_size]}, a page; must {rule}")
    return first


class _Pages(NamedTuple):
    """What a call of `copy_pages` does that its indices do not change: parts, pages and first tokens allowed."""

    parts: list[_Part]
    pages: int
    tokens: int


_Seen = tuple[int, Any, Any, Any, int, bool]


class _Tensor:
    """A tensor again, from what was seen of it."""

    def __init__(self, seen: _Seen) -> None:
        self.address, self.shape, self._strides, self.dtype, self._size, self.is_cuda = seen

    def stride(self) -> Any:
        """Elements from step to step, by axis."""
        return self._strides

    def element_size(self) -> int:
        """Bytes of an element."""
        return self._size


def _see(group: Sequence[Any]) -> tuple[_Seen, ...]:
    return tuple([(t.data_ptr(), t.shape, t.stride(), t.dtype, t.element_size(), t.is_cuda) for t in group])


@lru_cache(maxsize=512)
def _pages(
    paged_seen: tuple[_Seen, ...],
    layered_seen: tuple[_Seen, ...],
    names: tuple[str, str],
    first_layer: int,
    page_size: int,
    to_pages: bool,
    device: int | None,
) -> _Pages:
    paged, layered = [_Tensor(s) for s in paged_seen], [_Tensor(s) for s in layered_seen]
    if len(paged) not in (1, 2) or len(layered) % len(paged):
        raise LayoutError(
            f"{names[0]} has {len(paged)} buffers, must have 1 or 2; {names[1]} has {len(layered)}, a multiple"
        )
    layers = len(layered) // len(paged)
    groups: dict[tuple[_Rows, int], list[int]] = {}
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
        groups.setdefault((p, steps.pop()[0]), []).append(plane)
    parts = []
    for (p, step), planes in groups.items():
        per_page = Side(outer=p.steps[0], layer=p.steps[1], token=p.steps[2], table_plane=1, entries=len(planes))
        per_layer = Side(outer=step, token=step, table_layer=1, table_plane=layers, entries=layers * len(planes))
        pages = [(paged[k].address + first_layer * p.steps[1], paged[k].is_cuda) for k in planes]
        tokens = [(t.address, t.is_cuda) for k in planes for t in layered[k * layers : (k + 1) * layers]]
        ends = [(per_page, pages), (per_layer, tokens)]
        (src, reads), (dst, writes) = ends[::-1] if to_pages else ends
        parts.append(_part(_prepared(src, dst, layers, len(planes), page_size, p.row, device), reads, writes))
    return _Pages(parts, min(most_pages, default=0), min(most_tokens, default=0))


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
    device = device_of(paged, layered)
    ready = _pages(_see(paged), _see(layered), names, first_layer, page_size, to_pages, device)
    if not len(paged_indices) or not ready.parts:
        return
    pages = _first_of_pages(index_names[0], paged_indices, page_size, aligned=True)
    tokens = _first_of_pages(index_names[1], layered_indices, page_size, aligned=False)
    _bounded(index_names[0], pages, ready.pages * page_size, page_size)
    _bounded(index_names[1], tokens, ready.tokens, page_size)
    pages = pages // page_size  # never in place: the indices may be the caller's own memory
    for part in ready.parts:
        _run(part, *((tokens, pages) if to_pages else (pages, tokens)), (paged, layered))
