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
from kvraw.adapters.sglang_batch import enqueue
from kvraw.addresses import require_addresses
from kvraw.arrays import I64, U64
from kvraw.batch import memcpy_batch
from kvraw.engines import copy_engine
from kvraw.engines.copy_engine import Descriptors
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.plain import require_plain
from kvraw.runtime.context import DeviceScope, at_reset

__all__ = ["bounded", "copy_pages", "copy_tokens", "device_of", "first_of_pages", "page_indices"]

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


class _Group(NamedTuple):
    """Copies that differ by their index and their bases alone.

    Attributes
    ----------
    src, dst : numpy.ndarray of uint64
        [n, 1] bases of both sides.
    row : int
        Bytes of a token.
    rows : numpy.ndarray of uint64
        The same, [n, 1].
    steps : tuple of int
        Of source and destination: bytes from token to token.
    pages : int
        Bytes from page to page, on the side that has pages.
    """

    src: U64
    dst: U64
    row: int
    rows: U64
    steps: tuple[int, int]
    pages: int = 0

    @property
    def dense(self) -> bool:
        """Whether tokens that follow each other are one run of bytes, on both sides."""
        return self.steps == (self.row, self.row)


class _Ready(NamedTuple):
    """What is known of tensors: what a call does that its indices do not change.

    Attributes
    ----------
    groups : list
        Those that go together.
    most : tuple of int
        What indices of the source (of pages) and of the destination (of tokens) must be below.
    device : int or None
        The GPU that takes part.
    on_host : list of (int, int)
        The ranges of host memory, asked about anew at each call: they may have been unpinned, or pinned otherwise.
    """

    groups: list[_Group]
    most: tuple[int, int]
    device: int | None
    on_host: list[tensors.Span]


def _group(src: list[int], dst: list[int], row: int, steps: tuple[int, int], pages: int = 0) -> _Group:
    columns = [np.array(side, np.uint64).reshape(-1, 1) for side in (src, dst)]
    return _Group(columns[0], columns[1], row, np.full_like(columns[0], row), steps, pages)


def _ready(groups: list[_Group], most: tuple[int, int], *tensor_groups: Sequence[Any]) -> _Ready:
    device = device_of(*tensor_groups)
    if device is None:
        for g in groups:  # ranges that indices reach end where memory does
            for name, bases in (("src", g.src), ("dst", g.dst)):
                require_addresses(name, bases.ravel(), 1)
        return _Ready(groups, most, None, [])
    with DeviceScope(device):
        on_host = tensors.host_spans(t for group in tensor_groups for t in group)
        return _Ready(groups, most, device, on_host)


_FEW, _MOST, _LONG = 8, 512, 1 << 20
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
    return [x for group in (src, dst) for t in group for x in (t.data_ptr(), t.get_device(), t.numel(), t.stride())]


def _send(ready: _Ready, copies: list[tuple[U64, U64, U64]], refs: object) -> None:
    """Do copies, each destinations, sources and sizes of a group."""
    vectors = copies[0] if len(copies) == 1 else tuple(np.concatenate(v) for v in zip(*copies, strict=True))
    d = Descriptors(*vectors)
    if ready.device is None:
        memcpy_batch(d.dst, d.src, d.sizes)
        return
    enqueue(d, ready.device, on_host=ready.on_host, refs=refs)


def bounded(name: str, values: I64, most: int, step: int = 1) -> None:
    """Check indices against their limit; `step` is the tokens that each stands for."""
    # As unsigned numbers, negative ones are above every limit: one pass tells for both ends.
    if int(np.maximum.reduce(values.view(np.uint64))) < most:
        return
    at = int(np.argmax((values < 0) | (values >= most)))
    what = "" if step == 1 else f", with the {step} tokens of a page"
    raise BoundsError(f"{name}[{at * step}] is {values[at]}{what}, must be in [0, {most})")


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


def _token_groups(src: Sequence[Any], dst: Sequence[Any]) -> _Ready:
    members: dict[tuple[int, tuple[int, int]], list[tuple[int, int]]] = {}
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
            kind = run, (int(a.stride()[0]) * size, int(b.stride()[0]) * size)
            members.setdefault(kind, []).extend((bases[0] + i, bases[1] + j) for i, j in begins)
    groups = [
        _group([at for at, _ in ends], [to for _, to in ends], run, steps) for (run, steps), ends in members.items()
    ]
    most = min(int(t.shape[0]) for t in src), min(int(t.shape[0]) for t in dst)
    return _ready(groups, most, src, dst)


def copy_tokens(src: Sequence[Any], dst: Sequence[Any], index: tuple[I64, I64]) -> None:
    """Copy rows along the first axis, of each pair of tensors; rows that follow each other go in one piece."""
    if not len(index[0]) or not src:
        return
    ready = _known(("tokens",), _LAYERS, src, dst, lambda: _token_groups(src, dst))
    for name, values, most in zip(NAMES, index, ready.most, strict=True):  # all is checked before anything moves
        bounded(name, values, most)
    singles = Descriptors(index[1].view(np.uint64), index[0].view(np.uint64), np.ones(len(index[0]), np.uint64))
    runs = copy_engine.merge(singles)
    copies = []
    for g in ready.groups:
        d, step = runs if g.dense else singles, np.array(g.steps, np.uint64)
        copies.append(
            ((g.dst + d.dst * step[1]).ravel(), (g.src + d.src * step[0]).ravel(), (g.rows * d.sizes).ravel())
        )
    if copies:
        _send(ready, copies, (src, dst))


_Pages = tuple[bytes, I64, I64]
_last: dict[tuple[int, bool], _Pages] = {}  # indices that were looked at last: those of all layers are the same


def first_of_pages(name: str, values: I64, page_size: int, aligned: bool) -> tuple[I64, I64]:
    """First index of each page, once its pages are known to be pages; and the page, where they are `aligned`."""
    seen, last = values.tobytes(), _last.get((page_size, aligned))
    if last is not None and last[0] == seen:
        return last[1:]
    first, number = _look_at_pages(name, values, page_size, aligned)
    first.flags.writeable = number.flags.writeable = False
    if len(seen) <= _LONG:
        if len(_last) >= _FEW:
            _last.clear()
        _last[(page_size, aligned)] = seen, first, number
    return first, number


def _look_at_pages(name: str, values: I64, page_size: int, aligned: bool) -> tuple[I64, I64]:
    pages = values.reshape(-1, page_size)
    first = values[::page_size].copy()
    number, rest = np.divmod(first, page_size) if aligned else (first, None)
    whole = page_size == 1 or not np.count_nonzero(pages[:, 1:] - pages[:, :-1] != 1)
    if whole and (rest is None or not np.count_nonzero(rest)):
        return first, number
    right = (pages[:, 1:] - pages[:, :-1] == 1).all(1)
    if rest is not None:
        right &= rest == 0
    at = int(np.argmin(right)) * page_size
    rule = f"start at a multiple of {page_size} and ascend by 1" if aligned else "ascend by 1"
    raise BoundsError(f"{name}[{at}:{at + page_size}] is {values[at : at + page_size]}, a page; must {rule}")


def _page_groups(
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
    groups = []
    for (p, step), planes in members.items():
        numbers = range(first_layer, first_layer + layers)
        pages = [paged[k].data_ptr() + layer * p.steps[1] for k in planes for layer in numbers]
        tokens = [t.data_ptr() for k in planes for t in layered[k * layers : (k + 1) * layers]]
        ends = ((tokens, step), (pages, p.steps[2])) if to_pages else ((pages, p.steps[2]), (tokens, step))
        if p.row:
            groups.append(_group(ends[0][0], ends[1][0], p.row, (ends[0][1], ends[1][1]), p.steps[0]))
    most = min(most_pages, default=0) * page_size, min(most_tokens, default=0)
    return _ready(groups, most, paged, layered)


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
    ready = _known(
        (first_layer, page_size, to_pages),
        names,
        paged,
        layered,
        lambda: _page_groups(paged, layered, names, first_layer, page_size, to_pages),
    )
    if not len(paged_indices) or not ready.groups:
        return
    at_page, page = first_of_pages(index_names[0], paged_indices, page_size, aligned=True)
    tokens, _ = first_of_pages(index_names[1], layered_indices, page_size, aligned=False)
    bounded(index_names[0], at_page, ready.most[0], page_size)
    bounded(index_names[1], tokens, ready.most[1], page_size)
    copies = []
    for g in ready.groups:
        sides = (g.dst, g.src) if to_pages else (g.src, g.dst)
        steps = g.steps[::-1] if to_pages else g.steps
        pages, at, nbytes = page.view(np.uint64) * np.uint64(g.pages), tokens.view(np.uint64), g.row * page_size
        if not g.dense:
            inner, nbytes = np.arange(page_size, dtype=np.uint64), g.row
            pages = (pages[:, None] + inner * np.uint64(steps[0])).ravel()
            at = (at[:, None] + inner).ravel()
        ends = (sides[0] + pages).ravel(), (sides[1] + at * np.uint64(steps[1])).ravel()
        dst, src = ends if to_pages else ends[::-1]
        sizes = np.empty(len(dst), np.uint64)
        sizes.fill(nbytes)
        copies.append((dst, src, sizes))
    _send(ready, copies, (paged, layered))
