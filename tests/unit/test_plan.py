"""Folding, widths and the kernel's arithmetic, against the formula written out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvraw
from kvraw.copying.kernel import _arrangement, launch_shape
from kvraw.copying.kernel_args import WORDS, divider
from kvraw.copying.plan import CopyPlan, Side
from kvraw.errors import LayoutError
from kvraw.layouts.geometry import Geometry
from tests.helpers.profile import examples

strides = st.integers(0, 6).map(lambda k: k * 8) | st.integers(0, 400)


@st.composite
def sides(draw: st.DrawFn) -> Side:
    return Side(
        outer=draw(strides),
        inner=draw(strides),
        page=draw(st.integers(1, 4)),
        layer=draw(strides),
        plane=draw(strides),
        token=draw(strides),
        head=draw(strides),
        table_outer=draw(st.integers(0, 1)),
        table_layer=draw(st.integers(0, 4)),
        table_plane=draw(st.integers(0, 4)),
    )


def written_out(plan: CopyPlan, item: int) -> list[tuple[int, int, int, int]]:
    """(source entry, source offset, destination entry, destination offset) of every byte, by the formula."""
    out = []
    for l, k, t, h in itertools.product(*map(range, (plan.layers, plan.planes, plan.tokens, plan.heads))):
        ends = []
        for s in (plan.src, plan.dst):
            outer, inner = divmod(item, s.page)
            ends.append(outer * s.table_outer + l * s.table_layer + k * s.table_plane)
            ends.append(outer * s.outer + inner * s.inner + l * s.layer + k * s.plane + t * s.token + h * s.head)
        out += [(ends[0], ends[1] + b, ends[2], ends[3] + b) for b in range(plan.run)]
    return out


def folded(plan: CopyPlan, item: int) -> list[tuple[int, int, int, int]]:
    out = []
    for at in itertools.product(*(range(d.size) for d in plan.dims)):
        ends = []
        for s, name in ((plan.src_flat, "src"), (plan.dst_flat, "dst")):
            outer, inner = divmod(item, s.page)
            entry, offset = outer * s.table_outer, outer * s.outer + inner * s.inner
            for x, d in zip(at, plan.dims, strict=True):
                entry += x * getattr(d, f"{name}_table")
                offset += x * getattr(d, name)
            ends += [entry, offset]
        out += [(ends[0], ends[1] + b, ends[2], ends[3] + b) for b in range(plan.run_bytes)]
    return out


counts = st.integers(1, 3)


@given(sides(), sides(), counts, counts, counts, counts, st.integers(1, 9), st.integers(0, 9))
@settings(max_examples=examples(400), deadline=None)
def test_folding_keeps_every_byte(src: Side, dst: Side, l: int, k: int, t: int, h: int, run: int, item: int) -> None:
    plan = CopyPlan(src, dst, l, k, t, h, run)
    assert sorted(folded(plan, item)) == sorted(written_out(plan, item))
    assert plan.item_bytes == l * k * t * h * run


@given(st.permutations("LKTH"), counts, counts, counts, counts, st.integers(1, 9))
def test_a_dense_copy_folds_into_one_run(order: list[str], l: int, k: int, t: int, h: int, run: int) -> None:
    sizes, stride, unit = dict(zip("LKTH", (l, k, t, h), strict=True)), {}, run
    for axis in order:
        stride[axis], unit = unit, unit * sizes[axis]
    side = Side(unit, layer=stride["L"], plane=stride["K"], token=stride["T"], head=stride["H"])
    plan = CopyPlan(side, side, l, k, t, h, run)
    assert plan.dims == ()
    assert plan.run_bytes == unit


def test_a_slot_split_that_changes_nothing_is_dropped() -> None:
    paged = Side(outer=64 * 16, inner=64, page=16)
    plan = CopyPlan(paged, paged, 1, 1, 1, 1, 64)
    assert (plan.src_flat.page, plan.src_flat.outer, plan.src_flat.inner) == (1, 64, 0)


@pytest.mark.parametrize(
    ("run", "stride", "address", "width"),
    [
        (576, 576, 0, 16),
        (584, 584, 0, 8),
        (656, 656, 0, 16),
        (24, 24, 0, 8),
        (6, 6, 0, 2),
        (16, 16, 4, 4),
        (7, 7, 0, 1),
    ],
)
def test_width_is_as_wide_as_alignment_allows(run: int, stride: int, address: int, width: int) -> None:
    side = Side(stride)
    assert CopyPlan(side, side, 1, 1, 1, 1, run).width(1 << 20 | address, 1 << 21) == width


@pytest.mark.parametrize("name", ["layers", "planes", "tokens", "heads", "run"])
def test_counts_must_be_positive(name: str) -> None:
    counts = {"layers": 1, "planes": 1, "tokens": 1, "heads": 1, "run": 1, name: 0}
    with pytest.raises(LayoutError, match=f"{name} is 0"):
        CopyPlan(Side(1), Side(1), **counts)


@given(st.integers(1, 2**63 - 1) | st.integers(1, 4096), st.integers(0, 2**63 - 1), st.integers(-1, 1))
@settings(max_examples=examples(2000))
def test_division_by_multiplication_is_exact(d: int, n: int, near: int) -> None:
    n = min(max(n // d * d + near, 0), 2**63 - 1)
    magic, shift = divider(d)
    assert magic < 2**64
    assert ((n * 2 * magic) >> 64) >> shift == n // d


@given(st.integers(1, 2**40), st.integers(1, 300))
def test_launch_shape_covers_and_stays_within(segments: int, most: int) -> None:
    ctas, threads = launch_shape(segments, most)
    assert 1 <= ctas <= most
    assert threads % 32 == 0
    assert 32 <= threads <= 1024
    assert ctas * threads <= max(-(-segments // 32) * 32 + threads, threads)


@given(st.lists(st.integers(-1, 600), min_size=4, max_size=4))
def test_arrangement_never_overlaps_and_fits(lengths: list[int]) -> None:
    pieces, upload_words = _arrangement(tuple(lengths))  # type: ignore[arg-type]
    for inline in (True, False):
        taken = [(p.at, p.at + lengths[p.side + 2 * p.is_index]) for p in pieces if p.inline is inline]
        taken = sorted(t for t in taken if t[0] != t[1])
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
        if inline:
            assert all(end <= WORDS for _, end in taken)
        else:
            assert all(end <= upload_words for _, end in taken)
    assert len(pieces) == sum(n >= 0 for n in lengths)


SIZES = {"layers": 2, "blocks": 6, "block_size": 4, "heads": 2, "head_size": 8, "element_size": 2}


@pytest.mark.parametrize("name", [*SIZES, "planes", "block_stride"])
def test_sizes_of_a_geometry_are_plain_integers(name: str) -> None:
    for value in (2.0, "2", None, True, np.float64(2), np.bool_(True)):
        with pytest.raises(TypeError, match=f"geometry: {name} is .*, must be an integer"):
            Geometry(**{**SIZES, name: value})
    given = Geometry(**{**SIZES, name: np.int8(2)})
    assert given == Geometry(**{**SIZES, name: 2})
    assert type(getattr(given, name)) is int


@pytest.mark.parametrize("name", [*SIZES, "block_stride"])
def test_a_geometry_beyond_any_memory(name: str) -> None:
    with pytest.raises(kvraw.LayoutError, match=rf"{name}={2**62}.* takes \d+ bytes, must be fewer than {2**63}"):
        Geometry(**{**SIZES, name: 2**62})


def test_narrow_integers_do_not_overflow() -> None:
    """Byte strides beyond 2**31, of counts that numpy holds in 32 bits."""
    blocks = 65537
    tensor = np.zeros((2, blocks, 16, 8, 128), np.int16)  # pages that nobody touches are not backed
    tensor[1, 3] = np.arange(16 * 8 * 128).reshape(16, 8, 128)
    sizes = (np.int32(n) for n in (1, blocks, 16, 8, 128, 2))
    cache = kvraw.PagedCache.from_pointers([tensor.ctypes.data], 1, Geometry(*sizes))
    chunk = np.zeros((2, 1, 16, 1024), np.int16)
    tokens = np.int32(16)
    assert type(cache.chunk_bytes(tokens)) is int
    kvraw.store(cache, [chunk], [3], chunk_tokens=tokens)  # type: ignore[arg-type]
    np.testing.assert_array_equal(chunk[1, 0], tensor[1, 3].reshape(16, 1024))
    assert not chunk[0].any()
    for bad in (0, 2**60):
        with pytest.raises(kvraw.BoundsError, match=rf"tokens is {bad}, must be in \[1, "):
            cache.chunk_bytes(bad)
    with pytest.raises(TypeError, match=r"chunk_tokens is 16\.0, must be an integer"):
        kvraw.TransferPlan(cache, "store", chunk_tokens=16.0)  # type: ignore[arg-type]
