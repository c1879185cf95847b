"""`kvraw doctor`: what it finds, what it calls broken, and its exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvraw
from kvraw.cli.limits import cgroup_limit
from kvraw.cli.main import main
from kvraw.errors import DriverNotFoundError, UnsupportedDriverError
from kvraw.ptx import loader
from tests.helpers.cli import ROOT, clear_variables, no_driver, python
from tests.helpers.leaks import segments


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_variables(monkeypatch)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    no_driver(monkeypatch, DriverNotFoundError("no CUDA driver: none here"))


def doctor_json(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    return code, report


def test_doctor_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = doctor_json(capsys)
    assert code == 0, report["problems"]
    assert list(report["engines"]) == ["kernel", "cpu", "reference"]
    assert report["engines"]["cpu"]["runs"]
    assert report["engines"]["reference"]["runs"]
    assert report["engines"]["kernel"]["runs"] is (report["engines"]["kernel"]["why_not"] is None)
    assert report["numba"]["version"]
    assert report["cpu"]["threads"] <= report["cpu"]["usable_cores"]
    assert set(report["ptx"]) == set(loader.manifest())
    assert all(x["error"] is None and x["version"] == "8.0" for x in report["ptx"].values())
    assert {x["target"] for x in report["ptx"].values()} == {"sm_75", "sm_80"}
    assert 0 < report["memory"]["available_bytes"] <= report["memory"]["total_bytes"]
    keys = "memlock_soft_bytes memlock_hard_bytes cgroup_limit_bytes transparent_huge_pages huge_pages shm_free_bytes"
    assert set(keys.split()) <= set(report["memory"])
    keys = "kvraw python platform numpy cuda_python driver devices batch_memcpy variables problems hints"
    assert set(keys.split()) <= set(report)


def test_doctor_tells_what_memory_it_got(capsys: pytest.CaptureFixture[str]) -> None:
    before = segments()
    _, report = doctor_json(capsys)
    memory = report["host_memory"]
    assert memory["kinds"]["anonymous"] is None
    assert memory["sample"]["pinned"] is False
    assert memory["sample"]["nbytes"] == 8 << 20
    assert set(memory["kinds"]) == {"anonymous", "huge-2MiB", "huge-1GiB", "shared"}
    for why in (memory["kinds"]["huge-2MiB"], memory["kinds"]["huge-1GiB"]):
        assert why is None or "to change: " in why
    assert memory["populate_threads"] >= 1
    assert main(["doctor"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("host memory"))
    assert "transparent huge pages obtained" in row
    assert segments() == before


def test_doctor_where_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    def refused(*args: object, **options: object) -> int:
        raise OSError(1, "refused")

    for call in ("map_anonymous", "map_file", "bind", "advise"):
        with monkeypatch.context() as patch:
            patch.setattr(f"kvraw.runtime.host.libc.{call}", refused)
            main(["doctor"])
        assert "host memory" in capsys.readouterr().out


def test_the_variables_of_the_tests_are_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    for name in ("KVRAW_TEST_DEVICE", "KVRAW_REQUIRE_GPU", "KVRAW_ENGIN"):
        monkeypatch.setenv(name, "1")
    _, report = doctor_json(capsys)
    unknown = [x["what"] for x in report["hints"] if "which kvraw does not know" in x["what"]]
    assert unknown == ["KVRAW_ENGIN is set, which kvraw does not know"]


def test_doctor_text(capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 25
    assert lines[-1].endswith("cpu, reference can run; nothing is broken")
    assert any(line.startswith("driver") and "none here" in line for line in lines)


def test_doctor_in_a_process_of_its_own() -> None:
    done = python("-m", "kvraw", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
    done = python("-m", "kvraw", "doctor", KVRAW_CPU_THREADS="many")
    assert done.returncode == 1
    assert "KVRAW_CPU_THREADS='many'" in done.stdout


def test_a_bad_variable_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVRAW_CPU_THREADS", "-2")
    monkeypatch.setenv("KVRAW_CTAS", "8")
    monkeypatch.setenv("KVRAW_THREADS", "8")
    code, report = doctor_json(capsys)
    assert code == 1
    (problem,) = report["problems"]
    assert "KVRAW_CPU_THREADS='-2'" in problem["what"]
    assert "unset KVRAW_CPU_THREADS" in problem["change"]
    assert not report["engines"]["cpu"]["runs"]
    assert report["variables"] == {"KVRAW_CPU_THREADS": "-2", "KVRAW_CTAS": "8", "KVRAW_THREADS": "8"}
    assert any("KVRAW_THREADS" in hint["what"] for hint in report["hints"])


def test_an_engine_that_is_set_and_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    monkeypatch.setenv("KVRAW_ENGINE", "kernel")
    code, report = doctor_json(capsys)
    assert code == 1
    assert "KVRAW_ENGINE is kernel" in report["problems"][0]["what"]


@pytest.fixture
def altered_ptx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    here = tmp_path / "ptx"
    shutil.copytree(ROOT / "kvraw" / "ptx", here, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(loader, "_ROOT", here)
    for cached in (loader.manifest, loader.read_ptx):
        cached.cache_clear()
    yield here
    for cached in (loader.manifest, loader.read_ptx):
        cached.cache_clear()


def test_altered_artifacts_are_problems(altered_ptx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (altered_ptx / "copy_v4.ptx").write_bytes((altered_ptx / "copy_v4.ptx").read_bytes().replace(b"sm_75", b"sm_90"))
    (altered_ptx / "copy_v8.ptx").unlink()
    code, report = doctor_json(capsys)
    assert code == 1
    assert [p["change"] for p in report["problems"]] == ["reinstall kvraw"] * 2
    assert "sha256" in report["ptx"]["copy_v4.ptx"]["error"]
    assert "copy_v8.ptx" in report["ptx"]["copy_v8.ptx"]["error"]
    assert report["ptx"]["copy_v16.ptx"]["error"] is None


def test_no_manifest(altered_ptx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (altered_ptx / "manifest.json").unlink()
    assert main(["doctor"]) == 1
    assert "manifest.json cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DriverNotFoundError("no CUDA driver: libcuda.so.1 cannot be loaded"), 0),
        (DriverNotFoundError("the CUDA driver does not start: cuInit returned CUDA_ERROR_NO_DEVICE"), 0),
        (DriverNotFoundError("the CUDA driver does not start: cuInit returned CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"), 1),
        (UnsupportedDriverError("the CUDA driver is 11080, must be 12000 or newer"), 1),
    ],
)
def test_no_driver_is_no_problem_but_a_broken_one_is(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_driver(monkeypatch, error)
    assert main(["doctor"]) == code
    assert str(error) in capsys.readouterr().out


class FakeDriver:
    """What doctor asks a driver."""

    def __init__(self, capability: tuple[int, int], version: int) -> None:
        self.numbers = dict(zip(("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR"), capability, strict=True))
        self.numbers |= {"MULTIPROCESSOR_COUNT": 132, "ASYNC_ENGINE_COUNT": 3, "CAN_MAP_HOST_MEMORY": 1}
        self.version = lambda: version

    def device_count(self) -> int:
        return 1

    def batch_supported(self) -> bool:
        return self.version() >= 12080

    def device_attribute(self, device: int, name: str) -> int:
        return self.numbers[name]

    def device_name(self, device: int) -> str:
        return "NVIDIA [fake]"

    def device_memory(self, device: int) -> int:
        return 80 << 30

    def library_load(self, image: bytes) -> int:
        return 1

    def library_unload(self, library: int) -> None:
        pass


def test_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kvraw.cli.doctor.driver", lambda: FakeDriver((9, 0), 13010))
    code, report = doctor_json(capsys)
    assert code == 0
    assert report["driver"]["cuda"] == "13.1"
    assert report["batch_memcpy"]["supported"]
    assert report["engines"]["kernel"] == {"runs": True, "why_not": None}
    (device,) = report["devices"]
    assert device["compute_capability"] == "9.0"
    assert set(device["ptx"]) == set(loader.manifest())
    assert main(["doctor"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("GPU 0"))
    assert "NVIDIA [fake], compute 9.0, 132 SMs, 80.0 GiB, 3 copy engines, maps host memory" in row


@pytest.mark.parametrize("where", ["variable", 221, 222, 223])
def test_a_driver_that_compiles_nothing(
    where: int | str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeDriver((9, 0), 13010)
    monkeypatch.setattr("kvraw.cli.doctor.driver", lambda: fake)
    if isinstance(where, int):

        def refused(image: bytes) -> int:
            raise kvraw.DriverError("CUDA_ERROR_NAME", where, "cuLibraryLoadData")

        fake.library_load = refused  # type: ignore[method-assign]
    else:
        monkeypatch.setenv("CUDA_DISABLE_PTX_JIT", "1")
    code, report = doctor_json(capsys)
    assert code == 1
    (problem,) = report["problems"]
    assert "compiles no kernels" in problem["what"]
    assert "copy engine alone" in problem["what"]
    assert problem["change"]
    assert not report["engines"]["kernel"]["runs"]


def test_a_device_too_old_for_the_ptx(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kvraw.cli.doctor.driver", lambda: FakeDriver((7, 0), 12020))
    code, report = doctor_json(capsys)
    assert code == 0  # nothing to mend, and the CPU engine runs
    assert report["devices"][0]["ptx"] == []
    assert "no device takes the PTX" in report["engines"]["kernel"]["why_not"]
    assert report["batch_memcpy"] == {"supported": False, "reason": "needs CUDA 12.8, the driver has 12.2"}


def test_a_broken_numba(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise SystemError("numba needs another numpy")

    monkeypatch.setattr(kvraw, "warm_up", broken)
    code, report = doctor_json(capsys)
    assert code == 1
    assert "numba needs another numpy" in report["engines"]["cpu"]["why_not"]
    assert report["engines"]["reference"]["runs"]


def test_cgroup_limit(tmp_path: Path) -> None:
    listing = tmp_path / "cgroup"
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "memory.max").write_text("max\n")
    (tmp_path / "a" / "memory.max").write_text("4294967296\n")
    listing.write_text("0::/a/b\n")
    assert cgroup_limit(str(tmp_path), str(listing)) == 4 << 30
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1073741824")
    listing.write_text("4:memory:/outside\n3:cpuset:/a/b\n")
    assert cgroup_limit(str(tmp_path), str(listing)) == 1 << 30
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert cgroup_limit(str(tmp_path), str(listing)) is None
    assert cgroup_limit(str(tmp_path), str(tmp_path / "none")) is None


FULL = """
import logging, resource
logging.basicConfig()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file takes a byte
import numpy as np, kvraw
from kvraw.cli.main import main
tensor = np.random.default_rng(0).integers(0, 2**15, (2, 6, 4, 2, 8), dtype=np.int16)
cache = kvraw.PagedCache.from_tensors([tensor], axes="PBTHD")
chunk = np.zeros((2, 1, 4, 16), np.int16)
kvraw.store(cache, [chunk], [3]).wait()
assert (chunk[:, 0] == tensor[:, 3].reshape(2, 4, 16)).all()
code = main(["doctor"])
assert code == 0, code
"""


def test_a_full_disk_costs_the_kernels_kept_on_it_only(tmp_path: Path) -> None:
    done = python("-c", FULL, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"compiled kernels cannot be kept in {tmp_path}" in done.stderr
    hints = [line for line in done.stdout.splitlines() if line.startswith("hint")]
    assert any("cannot be kept in" in line and "to another directory" in line for line in hints), done.stdout
    assert "numba fails" not in done.stdout
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_kernels_that_are_not_compiled_are_a_hint() -> None:
    done = python("-m", "kvraw", "doctor", "--json", NUMBA_DISABLE_JIT="1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["engines"]["cpu"]["runs"]
    assert report["numba"]["compiled"] is False
    assert any("NUMBA_DISABLE_JIT is set" in hint["what"] for hint in report["hints"])
