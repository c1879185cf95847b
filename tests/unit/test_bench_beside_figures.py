"""`kvraw bench --beside decode`: the loop's books, rates and percents; GPUs, clocks and events are made up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvraw.bench.beside import decode, rows
from kvraw.bench.beside.decode import DECODERS, DecodeLoop, Steps, percentile
from kvraw.bench.beside.rows import DOORS, Flow, Selection, Wanted, figures, median_row, run_flows, select
from kvraw.cli import beside
from kvraw.cli.models import MODELS
from kvraw.errors import LayoutError

MIB = 1 << 20


def test_percentiles() -> None:
    values = [float(k) for k in range(1, 201)]
    assert percentile(values[::-1], 99) == 198.0
    assert Steps(values).p50 == 100.5
    assert Steps(values).p99 == 198.0
    assert Steps([3.0]).p99 == 3.0


def test_decoders_are_the_models() -> None:
    for name, decoder in DECODERS.items():
        model = MODELS[name]
        assert (decoder.layers, decoder.keys) == (model.layers, model.heads * model.head_size)
    assert 13.5e9 < DECODERS["llama-3.1-8b"].weight_bytes < 14.5e9  # 8B less the embeddings


# The loop's own books: which steps count.


class Event:
    """An event that is reached when the test says so."""

    def __init__(self, at: Callable[[], float], **_: object) -> None:
        self._at, self.time = at, 0.0

    def query(self) -> bool:
        return self.time <= self._at()

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return other.time - self.time


class World:
    """A GPU whose steps take 4 ms, and a host whose replays take as long as the test says."""

    def __init__(self, late: set[int]) -> None:
        self.now, self.free, self.late, self.replays = 0.0, 0.0, late, 0
        self.most_ahead = 0.0

    def replay(self) -> None:
        if self.replays in self.late:
            self.now += 100.0
        self.free = max(self.free, self.now) + 4.0
        self.replays += 1
        self.most_ahead = max(self.most_ahead, self.free - self.now)

    def event(self, **_: object) -> Event:
        world = self

        class Recorded(Event):
            def record(self, stream: object) -> None:
                self.time = max(world.free, world.now)

        return Recorded(lambda: world.now)


def wait_while(going: Callable[[], bool]) -> None:
    while going():
        pass


def loop_of(world: World, monkeypatch: pytest.MonkeyPatch) -> DecodeLoop:
    from contextlib import nullcontext
    from types import SimpleNamespace

    def sleep(seconds: float) -> None:
        world.now += seconds * 1e3

    monkeypatch.setattr(time, "sleep", sleep)
    loop = object.__new__(DecodeLoop)
    cuda = SimpleNamespace(
        Event=lambda **_: world.event(), device=lambda *_: nullcontext(), stream=lambda *_: nullcontext()
    )
    values: dict[str, Any] = {"_torch": SimpleNamespace(cuda=cuda), "_place": None, "_graph": world, "_events": []}
    for name, value in (values | {"stream": None, "step_seconds": 0.004}).items():
        setattr(loop, name, value)
    return loop


def test_steps_of_a_loop_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(set())
    asked = []

    def beside(going: Callable[[], bool]) -> None:
        asked.append(going())

    steps = loop_of(world, monkeypatch).steps(0.2, beside)
    assert steps == Steps([4.0] * 50, 0)
    assert world.replays == 50 + decode.SETTLE
    assert world.most_ahead <= 4.0 * (decode.AHEAD + 1)
    assert asked


def test_steps_that_the_host_was_late_for_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = loop_of(World({1, 20, 30}), monkeypatch).steps(0.2)
    assert steps == Steps([4.0] * 48, 2)


def test_an_error_of_the_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(set())
    loop = loop_of(world, monkeypatch)

    def failing() -> None:
        raise RuntimeError("the graph is gone")

    monkeypatch.setattr(world, "replay", failing)
    with pytest.raises(RuntimeError, match="the graph is gone"):
        loop.steps(0.2, wait_while)


# Transfers one after another.


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Pending:
    def __init__(self, clock: Clock, end: float) -> None:
        self._clock, self._end = clock, end

    def done(self) -> bool:
        return self._clock.now >= self._end


class OneByOne:
    """A lane whose transfers take a millisecond each, one behind the other."""

    way = "store"
    moved = 32 * MIB

    def __init__(self, clock: Clock) -> None:
        self._clock, self._free, self.under_way = clock, 0.0, 0
        self.order: list[int] = []

    def call(self, at: int) -> Pending:
        self.order.append(at)
        self._free = max(self._free, self._clock.now) + 1e-3
        return Pending(self._clock, self._free)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_flow(in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    lane: Any = OneByOne(clock)
    flow = Flow(lane, in_flight, clock)

    def sleep(_: float) -> None:
        clock.now += 0.25e-3

    monkeypatch.setattr(time, "sleep", sleep)
    run_flows([flow], lambda: clock.now < 0.1)
    assert flow.idle
    assert flow.calls == len(lane.order) == 100 + in_flight - 1
    assert lane.order == list(range(len(lane.order)))
    assert flow.gb_per_s == pytest.approx(lane.moved / 1e-3 / 1e9, rel=1e-3)
    run_flows([flow], lambda: clock.now < 0.2)  # counts anew
    assert flow.calls <= 100 + in_flight
    assert lane.order == list(range(len(lane.order)))


def test_both_directions_wait_for_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "sleep", lambda _: setattr(clock, "now", clock.now + 0.25e-3))
    flows = [Flow(lane, 1, clock) for lane in (OneByOne(clock), OneByOne(clock))]  # type: ignore[arg-type]
    run_flows(flows, lambda: clock.now < 0.1)
    assert [flow.calls for flow in flows] == [100, 100]


def test_figures() -> None:
    clock = Clock()
    flow = Flow(OneByOne(clock), 1, clock)  # type: ignore[arg-type]
    flow.calls, flow.host, flow.seconds = 10, [1e-6, 3e-6, 2e-6], 10e-3
    wanted = Wanted("plan", "auto", "store", 32 * MIB, 32 << 10)
    around = (Steps([4.0] * 200), Steps([4.2] * 199 + [9.0]))
    row = figures(wanted, [flow], Steps([4.51] * 99 + [5.25], 1), around)
    assert row["gb_per_s"] == row["store_gb_per_s"] == pytest.approx(33.554432)
    assert row["load_gb_per_s"] is None
    assert row["host_p50_microseconds"] == pytest.approx(2.0)
    assert row["p50_percent"] == pytest.approx(10.0)  # over 4.1, the mean of 4.0 and 4.2
    assert row["p99_percent"] == pytest.approx(100 * (4.51 / 4.2 - 1))
    assert (row["steps"], row["starved"], row["calls"]) == (100, 1, 10)
    other, third = (dict(row, p50_percent=p, gb_per_s=g) for p, g in ((1.0, 50.0), (2.0, 40.0)))
    middle = median_row([row, other, third])
    assert (middle["p50_percent"], middle["gb_per_s"], middle["steps"], middle["starved"]) == (2.0, 40.0, 300, 3)
    assert "auto" in beside.line(row)
    assert "(host late for 1 of 101 steps)" in beside.line(row)


# The selection.


def test_the_default_selection_has_every_door() -> None:
    chosen = select(Selection())
    assert {one.door for one in chosen} == set(DOORS)
    assert len(chosen) <= 64  # less than a second each
    for door in DOORS:
        mine = [one for one in chosen if one.door == door]
        assert {one.way for one in mine} == set(DOORS[door].ways)
    autos = [one for one in chosen if (one.door, one.engine) == ("plan", "auto")]
    assert {one.row for one in autos} == set(rows.ROWS)
    assert {one.nbytes >> 20 for one in autos} == set(rows.SIZES)
    assert {one.engine for one in chosen if one.door == "plan"} == set(rows.ENGINES)


def test_selections() -> None:
    chosen = select(Selection(("sglang",), sizes=(1, 8), rows=(256, 2048), ways=("load",), in_flight=(1, 2)))
    assert {one.door for one in chosen} == {name for name in DOORS if name.startswith("sglang.")}
    assert len(chosen) == len(set(chosen)) == 5 * 2 * 2 * 2
    chosen = select(Selection(("plan",), engines=("kernel x2", "copy"), rows=(2 * MIB,), sizes=(1, 32)))
    assert {(one.engine, one.nbytes) for one in chosen} == {("kernel x2", 32 * MIB), ("copy", 32 * MIB)}
    assert {one.engine for one in select(Selection(("lmcache",)), ("lmcache",))} == {"kvraw", "lmcache"}


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        (Selection(("cache",)), "door 'cache' is unknown; there are copy, plan"),
        (Selection(engines=("fast",)), "engine 'fast' is unknown"),
        (Selection(ways=("up",)), "way 'up' is unknown"),
        (Selection(rows=(100,)), "row 100 is unknown"),
        (Selection(("pool",), ways=("both",)), "no door has such"),
    ],
)
def test_selections_that_there_are_not(chosen: Selection, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        select(chosen)
