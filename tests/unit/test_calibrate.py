"""`kvraw calibrate`: what it writes, that plans use it, and what it says where it cannot."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvraw.cli.main import main
from kvraw.copying import calibrate
from kvraw.copying.planner import BUILT_IN, DIRECTIONS, ENGINES, Profile, profile_for, profile_path
from kvraw.errors import DriverNotFoundError
from kvraw.runtime.timing import QUICK
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.cli import clear_variables


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clear_variables(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "PACE", QUICK)
    monkeypatch.setattr(calibrate, "TOTAL", 1 << 16)
    monkeypatch.setattr(calibrate, "BESIDE", 1 << 12)
    monkeypatch.setattr(calibrate, "SHARES", (0.9, 0.5))
    monkeypatch.setattr(calibrate, "RUNS", dict.fromkeys(ENGINES, (64, 4096)))
    profile_for.cache_clear()


def test_it_is_written_and_used(fake: FakeDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile_for(0) is BUILT_IN
    assert main(["calibrate", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"ok", "device", "file", "profile"}
    path = profile_path(0)
    assert path is not None
    assert report["file"] == str(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file is left
    profile = profile_for(0)
    assert profile == Profile.loads(path.read_text())
    assert "Emulated device 0, driver 13000" in profile.source
    assert set(profile.bandwidth) == {f"{e} {d}" for e in ENGINES for d in DIRECTIONS}
    assert set(profile.latency) == set(ENGINES)
    assert fake.live()["pending"] == 0
    assert main(["calibrate"]) == 0
    assert str(path) in capsys.readouterr().out.splitlines()[-1]
    profile_for.cache_clear()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("run", [64, 4096])
def test_what_is_timed_is_the_engine_that_was_named(fake: FakeDriver, engine: str, direction: str, run: int) -> None:
    from contextlib import ExitStack

    from kvraw.runtime.context import DeviceScope

    with DeviceScope(0), ExitStack() as stack:
        transfer = calibrate._Transfer(0, run, 1 << 16, 1 << 15, stack)
        assert transfer.nbytes == 1 << 16
        before = fake.calls.copy()
        transfer.work(engine, direction)().wait()
        used = fake.calls - before
        assert ("launch" in used) == (engine != "copy")
        assert ("memcpy_batch_async" in used) == (engine == "copy")


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out = capsys.readouterr()
    assert out.out == ""
    (line,) = out.err.splitlines()
    assert line.startswith("kvraw calibrate: ")
    return line


def test_no_cache_directory(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    assert main(["calibrate"]) == 1
    assert "neither XDG_CACHE_HOME nor HOME" in one_line(capsys)
    assert fake.calls["launch"] == 0  # told ahead of measuring
    assert main(["calibrate", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_cache_directory_that_cannot_be_written(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["calibrate"]) == 1
    assert str(tmp_path / "file") in one_line(capsys)
    assert profile_for(0) is BUILT_IN
    if os.geteuid():  # root may write everywhere
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        monkeypatch.setenv("XDG_CACHE_HOME", str(closed))
        assert main(["calibrate"]) == 1
        assert "Permission denied" in one_line(capsys)


def test_a_write_that_fails_leaves_the_old_file(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = calibrate.save(BUILT_IN, 0)
    kept = path.read_text()

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(os, "replace", full)
    assert main(["calibrate"]) == 1
    assert "No space left on device" in one_line(capsys)
    assert path.read_text() == kept
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none() -> None:
        raise DriverNotFoundError("no CUDA driver: none here")

    monkeypatch.setattr("kvraw.runtime.context.driver", none)
    assert main(["calibrate"]) == 1
    assert "none here" in one_line(capsys)


def test_no_such_gpu(fake: FakeDriver, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--device", "7"]) == 1
    assert "device is 7, must be in [0, 2)" in one_line(capsys)
