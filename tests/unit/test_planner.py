"""The planner: its model of time, profiles as files, and what it chooses at typical points."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvraw.arrays import IndexVector
from kvraw.copying.addresses import AddressTable
from kvraw.copying.bound_copy import BoundCopy
from kvraw.copying.call import Call as BoundCall
from kvraw.copying.device_state import device_state
from kvraw.copying.plan import CopyPlan, Side
from kvraw.copying.planner import (
    BUILT_IN,
    DIRECTIONS,
    ENGINES,
    KERNEL_MARGIN,
    Choice,
    Profile,
    RateLimit,
    profile_for,
    profile_path,
)
from kvraw.copying.staged import _joined
from kvraw.errors import PlacementError
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import install
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.profile import examples

FLAT = {f"{e} {d}": ((1000, 1.0), (4000, 3.0)) for e in ENGINES for d in DIRECTIONS}
ZERO = dict.fromkeys(ENGINES, 0.0)


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile_for.cache_clear()
    yield tmp_path
    profile_for.cache_clear()


def test_interpolation() -> None:
    profile = Profile("here", FLAT, ZERO)
    rate = {
        run: 1e9 / profile.seconds("copy", "load", run, 10**9).alone / 1e9 for run in (250, 1000, 2000, 4000, 1 << 30)
    }
    assert rate == pytest.approx({250: 0.25, 1000: 1.0, 2000: 2.0, 4000: 3.0, 1 << 30: 3.0})
    slow = replace(profile, latency={**ZERO, "copy": 7.0})
    assert slow.seconds("copy", "store", 1000, 0).alone == pytest.approx(7e-6)


sizes = st.lists(st.integers(1, 1 << 24), min_size=1, max_size=6, unique=True).map(sorted)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any profile whose bandwidth rises with the run size."""

    def curve() -> tuple[tuple[int, float], ...]:
        runs = draw(sizes)
        rates = sorted(draw(st.lists(st.floats(1e-3, 1e4), min_size=len(runs), max_size=len(runs))))
        return tuple(zip(runs, rates, strict=True))

    curves = {f"{e} {d}": curve() for e in ENGINES for d in DIRECTIONS}
    return Profile("drawn", curves, {e: draw(st.floats(0, 1e4)) for e in ENGINES})


@given(profiles(), st.sampled_from(ENGINES), st.sampled_from(DIRECTIONS), st.data())
@settings(max_examples=examples(150), deadline=None)
def test_more_bytes_take_longer_and_longer_runs_do_not(profile: Profile, engine: str, way: str, data: Any) -> None:
    run, more_run = sorted(data.draw(st.tuples(st.integers(1, 1 << 25), st.integers(1, 1 << 25))))
    few, many = sorted(data.draw(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40))))
    assert profile.seconds(engine, way, run, few).alone <= profile.seconds(engine, way, run, many).alone
    assert profile.seconds(engine, way, more_run, many).alone <= profile.seconds(engine, way, run, many).alone * (
        1 + 1e-9
    )


@given(profiles())
@settings(max_examples=examples(50), deadline=None)
def test_json_round_trip(profile: Profile) -> None:
    assert Profile.loads(profile.dumps()) == profile
    assert Profile.loads(BUILT_IN.dumps()) == BUILT_IN


def broken(**change: Any) -> str:
    return json.dumps({**json.loads(BUILT_IN.dumps()), **change})


NOT_PROFILES = {
    "empty": "",
    "cut short": BUILT_IN.dumps()[:200],
    "a list": "[1]",
    "another version": broken(version=0),
    "no version": json.dumps({"bandwidth": {}}),
    "no curves": broken(bandwidth={}),
    "an empty curve": broken(bandwidth={**BUILT_IN.bandwidth, "copy load": []}),
    "sizes that fall": broken(bandwidth={**BUILT_IN.bandwidth, "copy load": [[10, 1.0], [5, 1.0]]}),
    "no bandwidth at all": broken(bandwidth={**BUILT_IN.bandwidth, "copy load": [[10, 0.0]]}),
    "not a number": broken(bandwidth={**BUILT_IN.bandwidth, "copy load": [[10, math.nan]]}),
    "text for a number": broken(latency={**BUILT_IN.latency, "copy": "fast"}),
    "a latency below zero": broken(latency={**BUILT_IN.latency, "copy": -1}),
    "a missing latency": broken(latency={}),
    "no memory": broken(memory=0),
    "a pace below zero": broken(paced={"store": -1, "load": 40}),
    "a missing pace": broken(paced={"store": 40}),
    "curves as a list": broken(bandwidth=[1]),
}


@pytest.mark.parametrize("text", NOT_PROFILES.values(), ids=NOT_PROFILES)
def test_what_is_no_profile_falls_back_with_one_warning(
    text: str, fake: FakeDriver, cache_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json's own, and ours)
        Profile.loads(text)
    path = profile_path(0)
    assert path is not None
    path.parent.mkdir()
    path.write_text(text)
    with caplog.at_level(logging.DEBUG, "kvraw"):
        assert profile_for(0) is profile_for(0) is BUILT_IN
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(path) in record.getMessage()


def test_a_good_profile_is_taken(fake: FakeDriver, cache_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert profile_for(0) is BUILT_IN  # none there: nothing to warn of
    mine = replace(BUILT_IN, source="mine")
    path = profile_path(0)
    assert path is not None
    path.parent.mkdir()
    path.write_text(mine.dumps())
    assert profile_for(0) is BUILT_IN  # looked up once
    profile_for.cache_clear()
    assert profile_for(0) == mine
    assert profile_for(1) is BUILT_IN  # another device
    assert not caplog.records


def test_profiles_are_kept_apart_by_device_and_driver(fake: FakeDriver, cache_home: Path) -> None:
    first = profile_path(0)
    fake._version = 12080
    assert first != profile_path(0) != profile_path(1)


@pytest.mark.parametrize(
    ("environ", "where"),
    [
        ({"XDG_CACHE_HOME": "/cache", "HOME": "/home/me"}, "/cache/kvraw"),
        ({"HOME": "/home/me"}, "/home/me/.cache/kvraw"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}, "/home/me/.cache/kvraw"),
        ({"XDG_CACHE_HOME": "", "HOME": ""}, None),
        ({"HOME": "relative"}, None),
        ({}, None),
    ],
)
def test_cache_directory(
    environ: dict[str, str], where: str | None, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
        if name in environ:
            monkeypatch.setenv(name, environ[name])
    path = profile_path(0)
    assert (None if path is None else str(path.parent)) == where
    if where is None:
        profile_for.cache_clear()
        assert profile_for(0) is BUILT_IN


IDLE = RateLimit(False)


class Call:
    """A call of a plan of `blocks` blocks of some runs each, between a device and chunks of 16 blocks."""

    PER_CHUNK = 16

    def __init__(self, run: int, runs: int, blocks: int, direction: str = "store", **options: Any) -> None:
        item = run * runs
        # A gap that only the cache has keeps the runs of a block apart.
        gap = 16 if runs > 1 else 0
        skip_negative = options.pop("skip_negative", False)
        paged = Side(item + gap * runs, head=run + gap, limit=1 << 20, skip_negative=skip_negative)
        flat = Side(0, item, page=self.PER_CHUNK, head=run, table_outer=1, entries=0)
        store = direction == "store"
        sides = (paged, flat) if store else (flat, paged)
        plan = CopyPlan(*sides, 1, 1, 1, runs, run)
        assert runs == 1 or plan.run_bytes == run
        bases = np.array([1 << 40], np.uint64)
        options.setdefault("limit", IDLE)
        self.plan, self.store, self.cache = BoundCopy(plan, **options), store, AddressTable(bases, bases, False)
        self.ids = np.random.default_rng(0).permutation(blocks * 3)[:blocks].astype(np.int64)
        self.places = np.arange(1, 2 + blocks // self.PER_CHUNK).astype(np.uint64) << np.uint64(32)

    def choose(
        self,
        *,
        link: bool = True,
        capturing: bool = False,
        on_device: bool = False,
        first: int = 0,
        end: int | None = None,
    ) -> Choice:
        count = len(self.ids) if end is None else end
        index = IndexVector(None, 1 << 41, count, 8, 0) if on_device else IndexVector(self.ids, 0, count)
        chunks = AddressTable(self.places, self.places, link)
        sides = (self.cache, chunks, index, None) if self.store else (chunks, self.cache, None, index)
        call = BoundCall(*sides, first, count - first, capturing)
        with DeviceScope(0):
            return self.plan.choose(device_state(0), call)


@pytest.fixture(autouse=True)
def built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("chooser", "planner"):
        monkeypatch.setattr(f"kvraw.copying.{room}.profile_for", lambda device: BUILT_IN)


KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_choices_by_size(fake: FakeDriver, direction: str) -> None:
    assert Call(256, 64, 1, direction).choose().engine == "kernel"  # 16 KiB, no whole chunk
    assert Call(256, 64, 16, direction).choose().engine == "kernel"  # 256 KiB
    assert Call(256, 512, 512, direction).choose().engine == "staged"  # 64 MiB in small runs
    assert Call(32 * KIB, 64, 32, direction).choose().engine == "staged"  # 64 MiB of blocks
    assert Call(2 * MIB, 1, 512, direction).choose().engine in ("copy", "staged")
    assert Call(2 * MIB, 1, 8, direction).choose().engine == "kernel"  # 16 MiB
    assert Call(4 * MIB, 1, 15, direction).choose().engine == "copy"  # 60 MiB, no whole chunk


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("run", [256, 32 * KIB, 2 * MIB])
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"link": False}, "both sides are device memory"),
        ({"capturing": True}, "a stream capture is in progress"),
    ],
)
def test_only_the_kernel_can(fake: FakeDriver, direction: str, run: int, how: dict[str, bool], why: str) -> None:
    call = Call(run, 1, (64 * MIB) // run if run > 256 else 4096, direction)
    choice = call.choose(**how)
    assert choice.engine == "kernel"
    assert why in choice.reason
    with pytest.raises(PlacementError, match=why):
        Call(run, 1, 64, direction, engine="staged").choose(**how)


def test_ids_on_the_device(fake: FakeDriver) -> None:
    for direction in DIRECTIONS:
        for run, runs, blocks in ((256, 512, 512), (32 * KIB, 64, 32), (2 * MIB, 1, 512)):
            choice = Call(run, runs, blocks, direction).choose(on_device=True)
            assert choice.engine == "staged"
            assert "copy the ids lie on the device" in choice.reason
        # Slots may be negative, which nothing on the host can tell.
        choice = Call(256, 512, 512, direction, skip_negative=True).choose(on_device=True)
        assert choice.engine == ("kernel" if direction == "store" else "staged")
        assert Call(256, 64, 16, direction).choose(on_device=True).engine == "kernel"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_thread_block_at_all(fake: FakeDriver, direction: str) -> None:
    for run, blocks in ((256, 16), (32 * KIB, 512), (2 * MIB, 64)):
        assert Call(run, 4, blocks, direction, ctas=0).choose().engine == "copy"
    with pytest.raises(PlacementError, match="ctas=0 allows no kernel"):
        Call(256, 4, 16, direction, ctas=0, engine="kernel").choose()
    with pytest.raises(PlacementError, match="the ids lie on the device"):
        Call(256, 4, 16, direction, ctas=0).choose(on_device=True)


def test_slots_left_out(fake: FakeDriver) -> None:
    for direction, engine in (("store", "kernel"), ("load", "staged")):
        call = Call(256, 512, 512, direction, skip_negative=True)
        assert call.choose().engine == "staged"
        call.ids[7] = -1
        assert call.choose().engine == engine  # a whole chunk would overwrite what the slot left out
        assert call.choose(first=8).engine == "staged"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_choice_is_kept_for_where_a_call_begins_in_a_chunk(fake: FakeDriver, direction: str) -> None:
    """As many blocks cover a chunk whole or not: what was chosen for one beginning is not taken for another."""
    n, call = Call.PER_CHUNK, Call(2 * KIB, 4096, 4 * Call.PER_CHUNK, direction)
    engines = {}
    for first in (0, n // 2, n, 1, 2 * n, n // 2 + n):
        engines[first] = call.choose(first=first, end=first + n).engine
        assert ("no chunk is covered whole" in call.choose(first=first, end=first + n).reason) == bool(first % n)
    assert {first for first, engine in engines.items() if engine == "staged"} == {0, n, 2 * n}


def test_neighbours_make_long_runs(fake: FakeDriver) -> None:
    def predicted(ids: np.ndarray | None) -> int:
        call = Call(32 * KIB, 1, count)
        if ids is not None:
            call.ids[:] = ids
        choice = call.choose()
        found = re.search(r"copy (\d+) us", choice.reason)
        return int(found[1]) if found else int(choice.microseconds)

    count = 4096
    nbytes = count * 32 * KIB
    alone, joined = (int(BUILT_IN.seconds("copy", "store", run, nbytes).alone * 1e6) for run in (32 * KIB, 512 * KIB))
    assert predicted(None) == pytest.approx(alone, rel=0.01)  # a few follow each other by chance
    assert abs(predicted(np.arange(count)) - joined) <= 1


def test_neighbours_are_not_counted_where_they_cannot_decide(fake: FakeDriver) -> None:
    call = Call(32 * KIB, 1, 64)
    assert call.choose().engine == "kernel"
    assert re.search(r"copy \d+ us at best", call.choose().reason)


def test_a_choice_says_why_and_how_long(fake: FakeDriver) -> None:
    choice = Call(256, 512, 512).choose()
    seconds = {e: BUILT_IN.seconds(e, "store", 256, 64 * MIB).alone for e in ENGINES}
    assert choice.microseconds == pytest.approx(seconds[choice.engine] * 1e6)
    assert BUILT_IN.source in choice.reason
    for engine in {"kernel", "copy"}:
        assert f"{engine} {seconds[engine] * 1e6:.0f} us" in choice.reason
    assert Call(256, 512, 512, engine="copy").choose() == Choice("copy", "asked for", 0.0)


@given(profiles(), st.sampled_from([256, 32 * KIB]), st.sampled_from(DIRECTIONS))
@settings(max_examples=examples(40), deadline=None)
def test_the_fastest_is_chosen_whatever_the_figures(profile: Profile, run: int, direction: str) -> None:
    fake = FakeDriver()
    before = install(fake)  # type: ignore[arg-type]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvraw.copying.chooser.profile_for", lambda device: profile)
            call = Call(run, 4, 64, direction)
            seconds = {e: profile.seconds(e, direction, run, 64 * run * 4).alone for e in ENGINES}
            choice = call.choose()
            assert choice.microseconds == pytest.approx(seconds[choice.engine] * 1e6)
            others = min(seconds["copy"], seconds["staged"])
            assert (choice.engine == "kernel") == (seconds["kernel"] * KERNEL_MARGIN <= others)
            if choice.engine != "kernel":
                assert seconds[choice.engine] == others
    finally:
        install(before)


@given(
    starts=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 130), max_size=4),
    edges=st.lists(st.integers(0, 130), max_size=4),
)
def test_chunks_that_are_copied_with_the_one_before(starts: list[int], cuts: list[int], edges: list[int]) -> None:
    size = 10
    places = np.array([1000 + size * k for k in starts], np.uint64)
    borders = {1000 + e for e in (*cuts, *edges)}
    got, cut = _joined(places, size, sorted({1000 + c for c in cuts}), tuple(1000 + e for e in edges))
    assert cut == any(p < b < p + size for p in places.tolist() for b in borders)
    follows = [False, *(b == a + size for a, b in itertools.pairwise(places.tolist()))]
    assert list(got) == [f and p not in borders for f, p in zip(follows, places.tolist(), strict=True)]
