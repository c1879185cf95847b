"""`kvraw bench --beside decode`: its doors on the CPU, and the command with a loop that is made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvraw
from kvraw.bench.beside import arrivals, rows
from kvraw.bench.beside.decode import Steps
from kvraw.bench.beside.ground import Case, Ground, Lane
from kvraw.bench.beside.peers import OWN, peers
from kvraw.bench.beside.rows import DOORS, Selection, Wanted, maker_of, select
from kvraw.bench.plot import draw_beside
from kvraw.cli import beside
from kvraw.cli.main import main
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
    assert 0 < good["gb_per_s"] <= min(good["store_gb_per_s"], good["load_gb_per_s"])
    assert bad["error"].startswith("PlacementError: ")
    assert "error: PlacementError" in beside.line(bad)
    assert last["error"] is None
    # warm-up, then beside between alone; what was measured behind a row is ahead of the next
    one = [rows.WARM, rows.ALONE, *[0.5, rows.ALONE] * 3]
    assert loop.calls == one * 2


def test_a_row_around_which_the_decode_changed_is_measured_again(ground: Ground) -> None:
    alone = iter([4.0, 4.1, 4.1, 4.2, 4.3, 4.4])

    class Drifting(Loop):
        def steps(self, seconds: float, beside: Any = None, step: float | None = None) -> Steps:
            steps = super().steps(seconds, beside, step)
            return steps if beside else Steps([next(alone)] * 100)

    wanted = [Wanted("copy", "kvraw", "store", MIB, MIB)] * 2
    loop: Any = Drifting()
    settled, drifting = rows.measure(loop, ground, wanted, {}, 0.5, 1, lambda text: None)
    assert settled["alone_p50_milliseconds"] == [4.1, 4.1]
    assert settled["p50_percent"] == pytest.approx(0.0)
    assert drifting["alone_p50_milliseconds"] == [4.3, 4.4]  # the last of three attempts, and both are there to see


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
    assert document["options"]["neighbour"] == "idle"
    assert not os.environ["KVRAW_NEIGHBOUR"]  # as it was
    assert main([*FEW, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["options"]["neighbour"]) == (True, "busy")


@pytest.mark.usefixtures("on_the_cpu")
def test_rows_are_printed_where_only_errors_go_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes its console for a terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main([*FEW]) == 0
    assert beside.HEADER in capsys.readouterr().out.splitlines()


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
    # A machine that is busy with other tests may be late for every step: such a row says so, and has no figures.
    late = [row for row in document["rows"] if "host was late" in (row["error"] or "")]
    assert [row for row in document["rows"] if row["error"] and row not in late] == []
    assert len(late) < len(document["rows"]) / 2
    for row in (row for row in document["rows"] if row not in late):
        assert row["gb_per_s"] > 0
        assert row["p50_percent"] > -10


def test_adapters_in_the_place_of_peers_are_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs() -> None:
        """An operation of another module."""

    for package in ("lmcache", "sgl_kernel"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    served, own = ModuleType("lmcache.c_ops"), ModuleType("sgl_kernel.kvcacheio")
    served.multi_layer_block_kv_transfer = OWN["lmcache"].multi_layer_block_kv_transfer  # type: ignore[attr-defined]
    own.transfer_kv_all_layer = theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, served.__name__, served)
    monkeypatch.setitem(sys.modules, own.__name__, own)
    assert peers() == {"sglang": own}
