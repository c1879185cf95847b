"""`kvraw bench --beside decode`: its arithmetic with loops, clocks and events made up, its doors on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvraw
from kvraw.bench.beside import arrivals, decode, rows
from kvraw.bench.beside.decode import DECODERS, DecodeLoop, Steps, percentile
from kvraw.bench.beside.ground import Case, Ground, Lane
from kvraw.bench.beside.rows import DOORS, Flow, Selection, Wanted, figures, maker_of, median_row, run_flows, select
from kvraw.bench.plot import draw_beside
from kvraw.cli import beside
from kvraw.cli.main import main
from kvraw.cli.models import MODELS
from kvraw.errors import LayoutError
from tests.emulator.fake_driver import FakeDriver

MIB = 1 << 20
ALONE = Steps([4.0] * 99 + [5.0])


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def ground(torch: Any) -> Any:
    made = Ground(torch, None, 4 * MIB, 4 * MIB)
    yield made
    made.close()


class Loop:
    """A decode loop whose steps are made up: 4 ms alone, 4.1 beside transfers."""

    def __init__(self, *_: object) -> None:
        self.calls: list[float] = []

    def steps(
        self, seconds: float, beside: Callable[[Callable[[], bool]], None] | None = None, step: float | None = None
    ) -> Steps:
        assert step in (None, 4.1)
        self.calls.append(seconds)
        if beside is None:
            return ALONE
        end = time.perf_counter() + 1e-3
        beside(lambda: time.perf_counter() < end)
        return Steps([4.1] * 100)


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


# The doors, on the CPU: what they move is what they say.


@pytest.mark.parametrize(
    ("door", "row"), [(name, row) for name, door in DOORS.items() for row in (door.rows if door.rows[0] else (256,))]
)
def test_doors_move_the_right_bytes(door: str, row: int, ground: Ground) -> None:
    ways = [way for way in DOORS[door].ways if way != "both"]
    for wanted in select(Selection((door,), ("auto",), ways, (2,), (row,))):
        (lane,) = rows.lanes(ground, wanted, maker_of(wanted, {}))
        assert lane.moved == 2 * MIB
        for at in (0, 3):
            lane.verify(at)
        lane.close()


def test_wrong_bytes_are_no_row(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("copy", "kvraw", "store", MIB, MIB)
    lane = DOORS["copy"].maker(ground, case)
    right: Callable[[int], None] = lane._enqueue

    def one_byte(at: int) -> None:
        right(at)
        lane.part(at)[7] += 1

    for wrong in (str, lambda at: right(at + 1), one_byte):
        monkeypatch.setattr(lane, "_enqueue", wrong)
        with pytest.raises(RuntimeError, match="moved other bytes"):
            lane.verify()


def test_measure(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    loop: Any = Loop()
    wanted = [Wanted("copy", "kvraw", "both", MIB, MIB, 2), Wanted("plan", "kernel", "load", MIB, 256)]
    wanted.append(Wanted("lmcache.slots", "kvraw", "store", MIB, 2048))
    good, bad, last = rows.measure(loop, ground, wanted, {}, 0.5, 3, lambda text: None)
    assert good["error"] is None
    assert good["p50_percent"] == pytest.approx(2.5)
    assert good["p99_percent"] == pytest.approx(100 * (4.1 / 4.0 - 1))
    assert good["gb_per_s"] == pytest.approx(min(good["store_gb_per_s"], good["load_gb_per_s"]), rel=0.5)
    assert bad["error"].startswith("PlacementError: ")
    assert "error: PlacementError" in beside.line(bad)
    assert last["error"] is None
    # warm-up, then beside between alone; what was measured behind a row is ahead of the next
    one = [rows.WARM, rows.ALONE, *[0.5, rows.ALONE] * 3]
    assert loop.calls == one * 2


# The command.


@pytest.fixture
def on_the_cpu(torch: Any, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with a made-up loop, and host memory for the device's."""
    monkeypatch.setattr(beside, "require_torch", lambda device, what: torch)
    monkeypatch.setattr(beside, "DecodeLoop", Loop)
    monkeypatch.setattr(beside, "Ground", lambda torch, device, *sizes: Ground(torch, None, 4 * MIB, 4 * MIB))
    monkeypatch.setattr(kvraw, "warm_up", lambda device: None)
    monkeypatch.setattr(beside, "peers", lambda *asked: {})


FEW = ("bench", "--beside", "decode", "--sizes", "1", "--doors", "copy,vllm.batch", "--seconds", "0")


@pytest.mark.usefixtures("on_the_cpu")
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVRAW_NEIGHBOUR", "")
    file = tmp_path / "rows.json"
    assert main([*FEW, "--json", str(file), "--neighbour", "idle"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == beside.HEADER
    assert len(lines) == 1 + 6 + 2
    assert all("+2.5" in line for line in lines[1:7])
    assert "llama-3.1-8b, batch 32, bf16: a step alone 4.000 ms" in lines[-1]
    document = json.loads(file.read_text())
    assert set(document) == {"ok", "machine", "options", "decode", "rows", "queue", "first", "seconds"}
    assert [row["way"] for row in document["rows"]] == ["store", "load", "both"] * 2
    assert os.environ["KVRAW_NEIGHBOUR"] == "idle"
    assert main([*FEW, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


@pytest.mark.usefixtures("on_the_cpu")
def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a plot needs matplotlib (kvraw[cli])")
    picture = tmp_path / "rows.png"
    assert main([*FEW, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_picture_without_a_row(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a plot needs matplotlib (kvraw[cli])")
    report = {"rows": [{"error": "none"}], "machine": {"name": "a"}, "decode": {}}
    with pytest.raises(ValueError, match="no row to draw"):
        draw_beside(report, tmp_path / "rows.png")


@pytest.mark.usefixtures("on_the_cpu")
def test_what_arrives_late(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(arrivals, "QUEUED", 4 * MIB)
    monkeypatch.setattr(arrivals, "STORE", MIB)
    monkeypatch.setattr(arrivals, "LOAD", MIB)
    found = {"door": "plan", "way": "store", "first_milliseconds": 0.5, "second_milliseconds": 0.1, "error": None}
    found |= {"copy_milliseconds": 0.05, "longest_copy_milliseconds": 0.06}
    monkeypatch.setattr(beside, "first_calls", lambda device: [found])
    assert main(["bench", "--beside", "decode", "--queue", "--first", "--engines", "auto"]) == 0
    out = capsys.readouterr().out
    assert "a load of 1 MiB behind 4 MiB of stores, auto: waits" in out
    assert "first call beside a busy GPU, plan store: enqueued in 0.50 ms" in out
    assert beside.HEADER not in out  # rows only where doors are named


def test_first_calls_that_fail_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        returncode, stdout, stderr = 1, "", "Traceback\nRuntimeError: no GPU is here\n"

    monkeypatch.setattr(subprocess, "run", lambda *args, **options: Ended())
    assert arrivals.first_calls(0) == [{"door": "first calls", "error": "RuntimeError: no GPU is here"}]


def beside_says(capsys: pytest.CaptureFixture[str], *extra: str) -> str:
    assert main(["bench", "--beside", "decode", *extra]) == 1
    err = capsys.readouterr().err
    assert err.startswith("kvraw bench: ")
    assert len(err.splitlines()) == 1
    return err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--cpu"], "--beside decode needs a GPU"),
        (["--model", "deepseek-v3"], "--model deepseek-v3 has no decode loop; there are llama-3.1-8b"),
        (["--sizes", "512"], "--sizes 512 is out of bounds, must be in [1, 256] MiB"),
        (["--depth", "33"], "--depth 33 is out of bounds, must be in [1, 32]"),
        (["--doors", "nothing"], "door 'nothing' is unknown"),
        (["--lmcache", "/no/c_ops.so"], "/no/c_ops.so"),
        (["--sglang", "no_such_module"], "no_such_module"),
        (["--json", "/no/where.json"], "/no/where.json"),
    ],
)
@pytest.mark.usefixtures("fake")
def test_what_does_not_fit(
    argv: list[str], says: str, torch: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(beside, "require_torch", lambda device, what: torch)
    assert says in beside_says(capsys, *argv)


@pytest.mark.usefixtures("fake")
def test_no_torch_and_one_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if "torch" in sys.modules or pytest.importorskip("torch"):
        assert "--beside decode needs a torch that sees the GPU" in beside_says(capsys)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "--beside decode needs torch, which cannot be imported" in beside_says(capsys)


def test_lanes_end_where_one_cannot_be_made(ground: Ground) -> None:
    made: list[Any] = []

    class Closing(Lane):
        closed = False

        def _close(self) -> None:
            self.closed = True

    def maker(ground: Ground, case: Case) -> Lane:
        if made:
            raise RuntimeError("no memory")
        made.append(Closing(ground, case))
        return made[0]  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match="no memory"):
        rows.lanes(ground, Wanted("copy", "kvraw", "both", MIB, MIB), maker)
    assert made[0].closed


@pytest.mark.gpu
def test_gpu(gpu: int, torch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--beside", "decode", "--sizes", "8", "--seconds", "0.1", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row for row in document["rows"] if row["error"]] == []
    for row in document["rows"]:
        assert row["gb_per_s"] > 0
        assert row["p50_percent"] > -10
