"""Cases of the conformance suite: a cache and chunks laid into two arenas of random bytes, guards between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.helpers import oracle

GUARD = 96


@dataclass(frozen=True)
class Case:
    """One store or load. `off` and `chunk_off` shift every base by so many bytes from a multiple of 64."""

    format: int | str
    planes: int
    nl: int = 2
    nb: int = 5
    bs: int = 4
    nh: int = 3
    hs: int = 8
    element: int = 2
    direction: str = "store"
    by: str = "block"
    ids: tuple[int, ...] = ()
    skip: int = 0
    chunk_tokens: int = 8
    layout: str = "2LTD"
    off: int = 0
    chunk_off: int = 0
    pad: int = 0  # bytes between blocks
    seed: int = 0

    @property
    def shape(self) -> oracle.Shape:
        nh = 1 if self.format in oracle.MLA else self.nh
        return oracle.Shape(self.nl, self.nb, self.bs, nh, self.hs * self.element, self.planes)

    @property
    def chunks(self) -> int:
        per_chunk = self.chunk_tokens if self.by == "slot" else self.chunk_tokens // self.bs
        return -(-len(self.ids) // per_chunk)


@dataclass
class Arena:
    """Bytes of one side, and where its tensors lie in them."""

    data: np.ndarray
    offsets: list[int] = field(default_factory=list)


def _place(count: int, nbytes: int, off: int, rng: np.random.Generator) -> Arena:
    step = -(-(nbytes + GUARD) // 64) * 64 + 64
    data = rng.integers(0, 256, GUARD + step * count + 128, dtype=np.uint8)
    return Arena(data, [128 + k * step + off for k in range(count)])


@dataclass
class Laid:
    """A case laid out: both arenas as they are before, and as they must be after."""

    case: Case
    paged: Arena
    chunks: Arena
    paged_after: np.ndarray
    chunks_after: np.ndarray
    chunk_bytes: int
    block_stride: int


def lay(case: Case) -> Laid:
    rng = np.random.default_rng(case.seed)
    s = case.shape
    row = oracle.PAGED[(case.format, case.planes)]
    shape = row.shape(s)
    strides = list(np.ndarray(shape, np.uint8, np.empty(max(int(np.prod(shape)), 1), np.uint8)).strides)
    block_stride = 0
    if case.pad:
        assert case.format in oracle.PADDABLE
        assert shape[0] == s.nb
        strides[0] += case.pad
        block_stride = strides[0]
    extent = sum((n - 1) * st for n, st in zip(shape, strides, strict=True)) + 1 if min(shape) else 0
    paged = _place(row.tensors(s), extent, case.off, rng)
    chunk_shape = oracle.chunk_shape(case.layout, s, case.chunk_tokens)
    chunk_bytes = int(np.prod(chunk_shape))
    chunks = _place(case.chunks, chunk_bytes, case.chunk_off, rng)
    paged_after, chunks_after = paged.data.copy(), chunks.data.copy()
    oracle.move(
        case.format,
        s,
        [np.ndarray(shape, np.uint8, paged_after, o, strides) for o in paged.offsets],
        [np.ndarray(chunk_shape, np.uint8, chunks_after, o) for o in chunks.offsets],
        case.layout,
        case.chunk_tokens,
        case.direction,
        case.by,
        list(case.ids),
        case.skip,
    )
    return Laid(case, paged, chunks, paged_after, chunks_after, chunk_bytes, block_stride)


def _ids(rng: np.random.Generator, count: int, bound: int) -> tuple[int, ...]:
    """Distinct ids in random order, both ends among them."""
    ids = rng.permutation(bound)[:count]
    if count >= 2 and bound >= 2:
        rest = [i for i in ids if i not in (0, bound - 1)][: count - 2]
        ids = rng.permutation([0, bound - 1, *rest])
    return tuple(int(i) for i in ids)


def all_cases() -> list[Case]:
    """Every format, both directions, both modes, and the sizes and alignments that break kernels."""
    rng = np.random.default_rng(7)
    out: list[Case] = []

    def add(format: int | str, planes: int, **more: object) -> None:
        base = Case(format, planes, seed=len(out), **more)  # type: ignore[arg-type]
        for direction in ("store", "load"):
            for by in ("block", "slot"):
                c = Case(**{**base.__dict__, "direction": direction, "by": by})
                bound = c.nb if by == "block" else c.nb * c.bs
                ids = c.ids or _ids(rng, min(bound, 5 if by == "block" else 13), bound)
                skip = c.skip if by == "block" else c.skip * c.bs
                if by == "slot" and len(ids) > 4:
                    ids = (*ids[:2], -1, *ids[3:])
                out.append(Case(**{**c.__dict__, "ids": ids, "skip": min(skip, len(ids))}))

    for format, planes in oracle.PAGED:
        add(format, planes)
        add(format, planes, element=1, hs=7, nh=1, off=1, chunk_off=3)  # odd head, odd bases, one head
        add(format, planes, element=4, hs=16, off=16, skip=1)  # skip ends inside the first chunk
        add(
            format, planes, element=8, hs=5, bs=1, chunk_tokens=2, nl=1, skip=2
        )  # skip of one whole chunk, block size 1
        add(format, planes, element=2, hs=33, off=2, chunk_off=6, skip=3)
    for format in sorted(oracle.PADDABLE - {4, 5}, key=str):
        planes = 1 if (format, 2) not in oracle.PAGED else 2
        add(format, planes, pad=24)
    for layout in ("T2D", "L2TD"):
        for format, planes in ((1, 2), (7, 2), (3, 1), (10, 2)):
            add(format, planes, layout=layout, skip=1)
    add(1, 2, hs=576, element=2, nh=1, bs=16, chunk_tokens=32, nb=9)  # runs that split into segments
    add(3, 1, hs=656, element=1, bs=64, chunk_tokens=64)
    add(6, 2, hs=128, element=2, nh=8, bs=16, chunk_tokens=32, nb=7)  # 256-byte runs
    add(2, 2, hs=1031, element=1, off=5)  # a prime run, one byte at a time
    out += [Case(1, 2, direction=d, by=b) for d in ("store", "load") for b in ("block", "slot")]  # no ids at all
    add(1, 2, hs=3, element=4, nh=1, off=4, chunk_off=12)  # accesses of 4 bytes
    return out


def draw_case(pick: Callable[[list[Any]], Any]) -> Case:
    """A case of random geometry; `pick` chooses from a list (a random generator's choice, or hypothesis')."""
    format, planes = pick(list(oracle.PAGED))
    bs, per = pick([1, 2, 4, 16]), pick([1, 2, 3])
    by = pick(["block", "slot"])
    chunk_tokens = bs * per if by == "block" else pick([1, 3, 8])
    nb = pick([1, 2, 5, 9])
    bound = nb if by == "block" else nb * bs
    seed = pick(list(range(10_000)))
    rng = np.random.default_rng(seed)
    ids = _ids(rng, min(pick([0, 1, 2, 7, 40]), bound), bound)
    if by == "slot" and ids and pick([False, True]):
        ids = (*ids[:-1], pick([-1, -(2**63)]))
    element, hs = pick([1, 2, 4, 8]), pick([1, 3, 8, 16, 33, 128])
    skip = pick([0, 0, 1, 2, 5])
    return Case(
        format,
        planes,
        nl=pick([1, 2, 3]),
        nb=nb,
        bs=bs,
        nh=pick([1, 2, 3]),
        hs=hs,
        element=element,
        direction=pick(["store", "load"]),
        by=by,
        ids=ids,
        skip=min(skip, len(ids)),
        chunk_tokens=chunk_tokens,
        layout=pick(["2LTD", "T2D", "L2TD"]),
        off=pick([0, 0, 1, 2, 4, 8, 16]),
        chunk_off=pick([0, 0, 1, 2, 4, 8, 16]),
        pad=pick([0, 8, 40]) if format in oracle.PADDABLE - {4, 5} else 0,
        seed=seed,
    )
