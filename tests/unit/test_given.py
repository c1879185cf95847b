"""Vectors of callers: the compiled functions find what numpy finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvraw
from kvraw.copying import given as module
from kvraw.copying.copy_engine import Descriptors


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    module.COMPILED.compile()
    assert module.COMPILED.entry is not None


def both(work: Any) -> list[Any]:
    """What `work` gives by the compiled function and by numpy: its result, or the text of its error."""
    found = []
    for slowly in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if slowly:
                patch.setattr(module.COMPILED, "entry", None)
            try:
                found.append(work())
            except kvraw.BoundsError as error:
                found.append(str(error))
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pages(data: st.DataObject) -> None:
    page, aligned = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    numbers = data.draw(st.lists(st.integers(-1, 6), max_size=5))
    values = np.array([n * page + k for n in numbers for k in range(page)], np.int64)
    for at in data.draw(st.sets(st.integers(0, 19), max_size=2)):
        if at < len(values):
            values[at] += data.draw(st.integers(-3, 3))
    limit = data.draw(st.integers(0, 28))
    fast, slow = both(lambda: module.page_starts("ids", values, page, limit, aligned=aligned).tolist())
    assert fast == slow
    if not isinstance(fast, str):
        first = values[::page]
        assert fast == (first // page if aligned else first).tolist()
        assert ((first >= 0) & (first < limit)).all()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_cover(data: st.DataObject) -> None:
    edges = sorted(data.draw(st.sets(st.integers(4096, 4160), max_size=8)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    starts, stops = (np.array([p[k] for p in pairs], np.uint64) for k in (0, 1))
    addresses = data.draw(st.lists(st.integers(4090, 4165), max_size=8))
    one = data.draw(st.booleans())
    sizes = [data.draw(st.integers(0, 9))] if one else [data.draw(st.integers(0, 9)) for _ in addresses]
    begin = data.draw(st.integers(0, len(addresses)))
    inside = [
        next((k for k, (a, b) in enumerate(pairs) if n and a <= at and at + n <= b), -1 if n else None)
        for at, n in zip(addresses, sizes * len(addresses) if one else sizes, strict=False)
    ]
    want = next((k for k in range(begin, len(inside)) if inside[k] == -1), -1)

    def work() -> tuple[int, list[int]]:
        met = np.zeros(len(pairs), np.uint8)
        args = np.array(addresses, np.uint64), np.array(sizes, np.uint64), begin, starts, stops, met
        return module.first_uncovered(*args), met.tolist()

    (fast, met), (slow, met_slowly) = both(work)
    assert fast == slow == want
    marked = {k for k in inside[begin : len(inside) if want < 0 else want] if k is not None}
    assert marked <= {k for k, m in enumerate(met) if m}
    assert marked == {k for k, m in enumerate(met_slowly) if m}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_join(data: st.DataObject) -> None:
    """The same bytes go to the same places, no copy spans a cut, and no two that follow each other are left apart."""
    count = data.draw(st.integers(0, 8))
    sizes = [data.draw(st.integers(0, 3)) for _ in range(count)]
    order = data.draw(st.permutations(range(count)))
    places = np.cumsum([0, *[sizes[k] for k in order]])
    dst = np.zeros(count, np.uint64)
    for rank, k in enumerate(order):
        dst[k] = 5000 + places[rank]
    jumps = [data.draw(st.sampled_from([0, 0, 7])) for _ in range(count)]
    src = dst + np.uint64(4000) + np.array(jumps, np.uint64)
    cuts = np.array(sorted(data.draw(st.sets(st.integers(4998, 5020), max_size=3))), np.uint64)
    given_ = Descriptors(dst, src, np.array(sizes, np.uint64))

    def bytes_of(d: Descriptors) -> list[tuple[int, int]]:
        return sorted((int(t) + k, int(s) + k) for t, s, n in zip(d.dst, d.src, d.sizes, strict=True) for k in range(n))

    fast, slow = both(lambda: module.join(given_, cuts))
    assert bytes_of(fast) == bytes_of(slow) == bytes_of(given_)
    for d in (fast, slow):
        assert (d.sizes > 0).all()
        for cut in cuts:
            assert not ((d.dst < cut) & (cut < d.dst + d.sizes)).any()
            assert not ((d.src < cut) & (cut < d.src + d.sizes)).any()


def test_join_needs_more_room_than_it_guessed() -> None:
    cuts = np.arange(4100, 4200, 10).astype(np.uint64)
    one = np.array([4096], np.uint64)
    for n in (1, 3):
        d = Descriptors(np.repeat(one, n), np.repeat(one + np.uint64(1 << 20), n), np.full(n, 200, np.uint64))
        for found in both(lambda d=d: module.join(d, cuts)):
            assert len(found) == 11 * n


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9))
def test_extremes(values: list[int]) -> None:
    assert both(lambda: module.extremes(np.array(values, np.uint64))) == [(min(values), max(values))] * 2
