"""Why the driver does not start: files that hide cuda-python, stub and compat libraries, errors in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvraw.runtime import startup
from tests.helpers.cli import python


@pytest.mark.parametrize("text", ["x = 1", "raise AttributeError('mine')", "import nothing_of_this_name"])
@pytest.mark.parametrize("name", ["cuda.py", "cuda/__init__.py"])
def test_a_file_that_hides_cuda_python(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    found = python("-c", "import kvraw; print(kvraw.HostPool(4096).pinned)", cwd=tmp_path)
    assert found.stdout == "False\n", found.stderr
    code = "import kvraw\ntry: kvraw.Stream(0)\nexcept kvraw.DriverNotFoundError as e: print(e)"
    assert f"{file} hides cuda-python" in python("-c", code, cwd=tmp_path).stdout


def test_doctor_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "cuda.py").write_text("")
    done = python("-m", "kvraw", "doctor", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode
    assert [x["change"] for x in report["problems"]] == [f"rename {tmp_path / 'cuda.py'}, or start Python elsewhere"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.1", None),
        ("/usr/local/cuda/lib64/stubs/libcuda.so", "stub"),
        ("/usr/local/cuda/compat/libcuda.so.1", "compat"),
    ],
)
def test_which_library_was_loaded(tmp_path: Path, path: str, kind: str | None) -> None:
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f10 r-xp 0 08:01 1  /usr/lib/libcudart.so.12\n7f10-7f20 r-xp 0 08:01 1       {path}\n")
    assert startup.loaded_libcuda(str(maps)) == path
    assert startup.kind_of(path) == kind
    assert startup.loaded_libcuda(str(tmp_path / "none")) is None
    assert startup.kind_of(None) is None


@pytest.mark.parametrize(
    ("code", "text"), [(34, "stub"), (802, "fabric manager"), (803, "reboot"), (804, "compat"), (999, r"\(999\)$")]
)
def test_errors_of_the_start_in_words(code: int, text: str) -> None:
    import re

    assert re.search(text, startup.meaning(code, "CUDA_ERROR_NAME").partition(" [")[0])
