"""`kvraw bench`: its document, its text and its picture, on the CPU and on the fake driver, at tiny sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import kvraw
from kvraw.bench import bandwidth, latency, report
from kvraw.bench.shapes import DEVICE_SHAPES, SHAPES, Shape
from kvraw.bench.workload import Engine, Workload
from kvraw.cli.main import main
from kvraw.cli.models import MODELS
from kvraw.layouts.geometry import Geometry
from kvraw.runtime.timing import QUICK, Pace
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.cli import clear_variables

RUNS = {"run_bytes", "shape", "direction", "engine", "chosen", "bytes", "gb_per_s", "ratio"}
CHECKS = ("checked_microseconds", "unchecked_microseconds", "cost_percent")
KEYS: dict[str, set[str]] = {
    "runs": RUNS,
    "neighbours": RUNS | {"in_a_row"},
    "bytes": {"run_bytes", "bytes", "direction", "engine", "chosen", "microseconds", "predicted_microseconds"},
    "both": {"run_bytes", "engine", "bytes", "gb_per_s", "ratio"},
    "device": {"run_bytes", "shape", "direction", "bytes", "gb_per_s", "ratio"},
    "host": {
        *("engine", "direction", "chunks", "blocks", "layers", "bytes", "first_microseconds", "microseconds"),
        "in_a_row_microseconds",
    },
    "latency": {"engine", "direction", "chosen", "bytes", "runs", "microseconds"},
    "checks": {"ids", "direction", "run_bytes", "bytes", *CHECKS},
    "driver": {"call", "microseconds"},
    "sustained": {
        *("run_bytes", "engine", "direction", "bytes", "calls", "p50_microseconds", "p99_microseconds", "gb_per_s"),
        "matmul",
    },
}  # fmt: skip
GPU_ENGINES = ["kernel x2", "kernel x16", "copy", "staged", "auto"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clear_variables(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(latency, "CHUNKS", 2)
    monkeypatch.setattr(latency, "STORE", Shape("small", 1, Geometry(2, 1, 4, 1, 16, 2), 8))
    monkeypatch.setattr(latency, "DESCRIPTORS", 16)
    monkeypatch.setattr(bandwidth, "SMALLEST_CALL", 16 << 10)


def bench(capsys: pytest.CaptureFixture[str], *extra: str) -> dict[str, Any]:
    code = main(["bench", "--quick", "--mib", "0.0625", "--json", "-", *extra])
    out = capsys.readouterr()
    assert code == 0, out
    document: dict[str, Any] = json.loads(out.out)
    assert set(document) == {"ok", "machine", "options", "ceilings", *report.PARTS}
    assert set(document["ceilings"]) == {"store", "load", "both", "device"}
    assert set(document["machine"]) == {"device", "kvraw", "python", "name", "driver", "profile"}
    for part in report.PARTS:
        asked = part in document["options"]["parts"]
        assert (document[part] is not None) == asked, part
        for row in (document[part] or ()) if part in KEYS else ():
            assert set(row) == KEYS[part]
    return document


def test_shapes_have_the_runs_they_stand_for() -> None:
    assert {run: shape.run_bytes for run, shape in SHAPES.items()} == {run: run for run in SHAPES}
    assert [shape.run_bytes for shape in DEVICE_SHAPES] == [128, 256, 256, 256, 1152, 32768]
    for shape in (*SHAPES.values(), *DEVICE_SHAPES):
        assert shape.chunk_bytes <= 64 << 20
        fitted = shape.within(1 << 20)
        assert fitted is None or (fitted.chunk_bytes <= 1 << 20 and fitted.run_bytes == shape.run_bytes)
    assert SHAPES[2097152].within(1 << 20) is None


def test_workload_moves_what_it_says() -> None:
    shape = Shape("small", 6, Geometry(2, 1, 4, 2, 16, 2), 8)
    with Workload(shape, 3 * shape.chunk_bytes, None) as work:
        assert (work.count, len(work.ids), len(set(work.ids.tolist()))) == (3, 6, 6)
        before = [c.numpy().copy() for c in work.chunks]
        work.call(work.plan("load", Engine("cpu")))().wait()
        for chunk in work.chunks:
            chunk.numpy()[:] = 0
        work.call(work.plan("store", Engine("reference")))().wait()
        assert all((c.numpy() == b).all() for c, b in zip(work.chunks, before, strict=True))
    with Workload(shape, 4 * shape.chunk_bytes, None, neighbours=4) as work:
        assert sum(b - a == 1 for a, b in zip(work.ids[:-1], work.ids[1:], strict=True)) >= 6
    with pytest.raises(kvraw.ClosedError):
        work.chunks[0].numpy()


def test_pace() -> None:
    pace = Pace(calls=4, rounds=9, seconds=0.12, least=0.004)
    assert pace.plan(1.2e-3) == (4, 9)
    assert pace.plan(20e-6) == (64, 9)
    assert pace.plan(10.0) == (1, 3)
    assert QUICK.plan(1e-6) == (1, 1)


def test_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "--cpu", "--sustained", "0.01", "--mib", "0.25")
    assert found["machine"]["device"] is None
    assert found["options"]["parts"] == ["runs", "bytes", "host", "latency", "checks", "cold", "sustained"]
    assert found["ceilings"]["store"] > 0
    assert found["ceilings"]["device"] is None
    assert {row["run_bytes"] for row in found["runs"]} == {run for run in SHAPES if run <= 32 << 10}
    assert {row["engine"] for row in found["runs"]} == {"cpu"}
    (cold,) = found["cold"]
    assert cold["error"] is None
    assert cold["first_milliseconds"] > 0


def test_fake_driver(fake: FakeDriver, capsys: pytest.CaptureFixture[str]) -> None:
    parts = ",".join(p for p in report.PARTS if p != "cold")
    found = bench(capsys, "--runs", "256,2048", "--sustained", "0.001", "--only", parts)
    assert found["machine"]["name"] == "Emulated device 0"
    for run in (256, 2048):
        for way in ("store", "load"):
            rows = [r for r in found["runs"] if (r["run_bytes"], r["direction"]) == (run, way)]
            assert [r["engine"] for r in rows] == GPU_ENGINES
            assert [r["chosen"] for r in rows] == ["kernel", "kernel", "copy", "staged", "kernel"]
    assert [r["in_a_row"] for r in found["neighbours"]] == [1, 1, 16, 16][: len(found["neighbours"])]
    assert all(r["predicted_microseconds"] > 0 for r in found["bytes"])
    assert {r["ids"] for r in found["checks"]} == {"host", "device"}
    assert set(found["batch"]) == {"descriptors", "bytes_each", "nanoseconds", "bare_nanoseconds", "ratio"}
    assert fake.live()["pending"] == 0


def test_cold_start_where_the_process_finds_no_driver(fake: FakeDriver, capsys: pytest.CaptureFixture[str]) -> None:
    (*_, last) = bench(capsys, "--only", "cold")["cold"]
    assert last["engine"] == "staged"
    assert last["error"] is None or "DriverNotFoundError" in last["error"]


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3"])
def test_model(model: str, fake: FakeDriver, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "--model", model, "--only", "runs,latency", "--mib", "0.25")
    assert {row["shape"] for row in found["runs"]} == {f"{model} on one rank"}
    m = MODELS[model]
    assert {row["run_bytes"] for row in found["runs"]} == {m.block_size * m.heads * m.head_size * 2}


def test_text_and_files(fake: FakeDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert main(["bench", "--quick", "--mib", "0.0625", "--runs", "256", "--only", "runs", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(maxsplit=1)[1] == "Emulated device 0, driver 13000"
    assert any(line.startswith("store 256 B") and "kernel x2" in line and "auto=kernel" in line for line in lines)
    assert json.loads(file.read_text())["ok"]


@pytest.mark.parametrize("place", ["cpu", "fake"])
def test_plot(place: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="a plot needs matplotlib (kvraw[cli])")
    extra = ["--cpu"] if place == "cpu" else []
    if not extra:
        request.getfixturevalue("fake")
    picture = tmp_path / "out.png"
    bench(capsys, "--runs", "256,2048", "--only", "runs", "--plot", str(picture), *extra)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--only", "speed"], "part 'speed' is unknown"),
        (["--only", ""], "part '' is unknown"),
        (["--cpu", "--mib", "0.0001", "--only", "runs"], "--mib is 0.0001, must be at least 0.0"),
        (["--cpu", "--quick", "--mib", "0.0625", "--only", "driver"], "--only driver measures nothing here"),
        (["--runs", "100"], "run size 100 is unknown"),
        (["--plot", "a.png", "--only", "host"], "--plot draws the part runs"),
        (["--matmul"], "--matmul goes with --sustained"),
        (["--cpu", "--device", "0"], "--cpu asks for host memory"),
        (["--cpu", "--sustained", "1", "--matmul", "--only", "sustained"], "the matmul needs a GPU"),
        (["--cpu", "--quick", "--mib", "0.03", "--only", "runs", "--json", "/no/where.json"], "/no/where.json"),
    ],
)  # fmt: skip
def test_what_does_not_fit(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 1
    out = capsys.readouterr()
    assert out.err.startswith("kvraw bench: ")
    assert says in out.err
    assert len(out.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--mib", "0"], "must be a number above 0, at most 1048576, is 0"),
        (["--mib", "inf"], "must be a number above 0, at most 1048576, is inf"),
        (["--mib", "nan"], "must be a number above 0, at most 1048576, is nan"),
        (["--mib", "x"], "must be a number above 0, at most 1048576, is x"),
        (["--model", "none"], "invalid choice: 'none'"),
        (["--runs", "a"], "must be a positive integer, is a"),
        (["--device", "x"], "must be an integer >= 0, is x"),
        (["--sustained", "-1"], "must be a number >= 0, is -1"),
        (["--sustained", "nan"], "must be a number >= 0, is nan"),
    ],
)
def test_arguments(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvraw.cli.bench.measure", lambda *args: pytest.fail("it measures"))
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    for option in ("--json", "--plot"):
        assert main(["bench", "--cpu", option, str(tmp_path / "no" / "where")]) == 1
        assert "No such file or directory" in capsys.readouterr().err
    assert main(["bench", "--cpu", "--json", str(kept), "--plot", str(tmp_path)]) == 1
    assert "Is a directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert kept.read_text() == "{}"


def test_no_torch_and_no_matplotlib(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    tiny = ["bench", "--quick", "--mib", "0.0625", "--runs", "2048"]
    assert main([*tiny, "--only", "sustained", "--sustained", "0.001", "--matmul"]) == 1
    assert "the matmul needs torch" in capsys.readouterr().err
    assert main([*tiny, "--only", "runs", "--plot", str(tmp_path / "a.png")]) == 1
    assert "a plot needs matplotlib" in capsys.readouterr().err


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    tiny = ["bench", "--cpu", "--quick", "--mib", "0.0625", "--runs", "256", "--only", "runs"]
    assert main(tiny) == 0
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    capsys.readouterr()
    assert main(tiny) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.gpu
def test_gpu(gpu: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "--mib", "4", "--sustained", "0.01")
    assert {r["engine"] for r in found["runs"]} == set(GPU_ENGINES)
    assert [r["error"] for r in found["cold"]] == [None] * 3
