"""The command line: arguments, exit codes, and that demo tells a wrong byte from a right one."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.cli import demo, doctor
from kvraw.cli.main import main
from kvraw.cli.models import MODELS
from kvraw.errors import DriverNotFoundError
from tests.helpers.cli import clear_variables, no_driver, python


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_variables(monkeypatch)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    no_driver(monkeypatch, DriverNotFoundError("no CUDA driver: none here"))


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--version"], 0, f"kvraw {kvraw.__version__}"),
        (["--help"], 0, "doctor"),
        ([], 2, "command"),
        (["demo", "--model", "gpt-1"], 2, "gpt-1"),
        (["demo", "--mib", "0"], 2, "must be a positive integer, at most 1048576, is 0"),
        (["demo", "--mib", "9" * 20], 2, f"must be a positive integer, at most 1048576, is {'9' * 20}"),
        (["demo", "--mib", "x"], 2, "must be a positive integer, at most 1048576, is x"),
        (["demo", "--device", "-1"], 2, "must be an integer >= 0"),
    ],
)
def test_arguments(argv: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == code
    out = capsys.readouterr()
    assert says in (out.err if code else out.out)


def test_as_a_module() -> None:
    done = python("-m", "kvraw", "--version")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"kvraw {kvraw.__version__}", "")


def test_the_command_loads_what_it_uses_only() -> None:
    heavy = ("rich", "numba", "torch", "cuda", "zmq", "msgspec", "prometheus_client")
    code = f"import sys, kvraw.cli.main; print([m for m in {heavy} if m in sys.modules])"
    assert python("-c", code).stdout.strip() == "[]"


def test_rich_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(doctor, "rows", lambda report: [("GPU 0", "[not markup]"), ("long", "word " * 40)])
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "[not markup]" in lines[0]
    assert len(lines) == 4
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["doctor"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_table_of_models() -> None:
    known = {  # bytes per token of one rank, from the models' own papers and cards
        "llama-3.1-8b": 131072,
        "llama-3.1-70b": 81920,
        "qwen3-32b": 262144,
        "deepseek-v3": 70272,
        "gpt-oss-20b": 49152,
    }
    assert {name: model.geometry(1).token_bytes for name, model in MODELS.items()} == known


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("model", list(MODELS))
def test_demo(model: str, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", model, "--mib", "8", "--engine", engine, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["difference"] is None
    assert report["engine"] == engine
    assert 4 << 20 <= report["bytes"]["moved"] <= 8 << 20
    assert report["blocks"]["guard"] >= 2
    assert set(report["speed"]) == {"store", "load"}


@pytest.mark.gpu
@pytest.mark.parametrize("model", list(MODELS))
def test_demo_on_a_gpu(model: str, gpu: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", model, "--mib", "8", "--device", str(gpu), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["engine"], report["device"], report["plain_copy"]) == ("kernel", gpu, "cuMemcpyAsync")


def test_demo_text(capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    assert main(["demo", "--mib", "4", "--seed", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 25
    assert any("no GPU can be used here" in line and "none here" in line for line in lines)
    assert any(line.startswith("store") and "GB/s" in line and "of one memmove" in line for line in lines)
    assert lines[-1].startswith("result")
    assert "every byte is equal" in lines[-1]


@pytest.mark.parametrize("extra", [["--engine", "kernel"], ["--device", "0"], ["--device", "0", "--engine", "cpu"]])
def test_demo_of_what_is_not_there(extra: list[str], capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    assert main(["demo", "--mib", "2", *extra]) == 1
    out = capsys.readouterr()
    assert out.out == ""
    assert "none here" in out.err or "takes a cache in host memory" in out.err
    assert main(["demo", "--mib", "2", "--json", *extra]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


Place = Callable[[Any, Any, Any], tuple[int, str]]


def stored_block(cache: Any, chunks: Any, ids: Any) -> tuple[int, str]:
    block = cache.geometry.block_size * 8 * 128 * 2
    at = int(cache.bases[3]) + block * (cache.geometry.blocks + int(ids[-1])) + 5
    return at, f"cache layer 3, plane 1, block {ids[-1]}, token 0, byte 5:"


def guard_block(cache: Any, chunks: Any, ids: Any) -> tuple[int, str]:
    guard = int(np.setdiff1d(np.arange(cache.geometry.blocks), ids)[-1])
    at = int(cache.bases[0]) + 2048 * (16 * guard + 15) + 2047
    return at, f"cache layer 0, plane 0, block {guard} (a guard block), token 15, byte 2047:"


def guard_bytes(cache: Any, chunks: Any, ids: Any) -> tuple[int, str]:
    return int(cache.bases[2]) - 1, "guard bytes before layer 2, byte 4095:"


def last_guard_byte(cache: Any, chunks: Any, ids: Any) -> tuple[int, str]:
    end = int(cache.bases[-1]) + cache.layout.tensor_bytes() + 4095
    return end, f"guard bytes before layer {cache.geometry.layers}, byte 4095:"


def stored_chunk(cache: Any, chunks: Any, ids: Any) -> tuple[int, str]:
    return chunks[0].address + 2048 + 7, "chunk 0, plane 0, layer 0, token 1, byte 7:"


def unused_chunk(cache: Any, chunks: Any, ids: Any) -> tuple[int, str]:
    return chunks[0].address + chunks[0].nbytes - 1, "chunk 0, plane 1, layer 31, token 255, byte 2047:"


@pytest.mark.parametrize("place", [stored_block, guard_block, guard_bytes, last_guard_byte, stored_chunk, unused_chunk])
@pytest.mark.parametrize("way", ["store", "load"])
def test_one_wrong_byte(
    way: str, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = getattr(kvraw, way)
    seen: list[tuple[int, str]] = []
    calls = iter(range(1, 100))

    def sabotaged(cache: Any, chunks: Any, ids: Any, **options: Any) -> Any:
        done = real(cache, chunks, ids, **options)
        if next(calls) == demo.ROUNDS + 1:  # the last: what was wrong before, later rounds may put right
            at, text = place(cache, chunks, ids)
            byte = ctypes.c_uint8.from_address(at)
            byte.value ^= 1
            seen.append((byte.value, text))
        return done

    monkeypatch.setattr(kvraw, way, sabotaged)
    assert main(["demo", "--mib", "8", "--engine", "cpu"]) == 1
    ((wrong, text),) = seen
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"WRONG, after the {way}: {text} is {wrong:#04x}, must be {wrong ^ 1:#04x}" in last


@pytest.mark.parametrize("way", ["store", "load"])
def test_a_copy_that_does_nothing(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = getattr(kvraw, way)
    monkeypatch.setattr(kvraw, way, lambda cache, chunks, ids, **options: real(cache, chunks, [], **options))
    assert main(["demo", "--mib", "8", "--engine", "cpu", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["difference"].startswith(f"after the {way}")


def test_demo_leaves_no_files_and_needs_little(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('cuda', 'torch', 'rich')));"
        "from kvraw.cli.main import main; sys.exit(main(['demo', '--mib', '4']))"
    )
    temporary = tmp_path / "tmp"
    here = tmp_path / "here"
    temporary.mkdir()
    here.mkdir()
    done = python("-c", code, cwd=here, TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "cuda-python cannot be imported" in done.stdout
    assert list(here.iterdir()) == list(temporary.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("command", [["doctor"], ["doctor", "--json"]], ids=" ".join)
def test_output_that_cannot_be_written(command: list[str]) -> None:
    full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    code = f"{full}; from kvraw.cli.main import main; raise SystemExit(main({command}))"
    done = python("-c", code)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "kvraw doctor: the output cannot be written: [Errno 28] No space left on device"
    )
    assert "Traceback" not in done.stderr
