"""The wheel: what is in it, what it asks for, and that nothing in it is a binary."""

from __future__ import annotations

import configparser
import email
import email.message
import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import kvraw
from kvraw.adapters.engines import ENGINES

ROOT = Path(__file__).parents[2]
CORE = {"numpy", "numba", "cuda-python"}
BINARY_SUFFIXES = {".so", ".cubin", ".fatbin", ".o", ".a", ".pyd", ".dll", ".dylib", ".pyc"}
BINARY_MAGIC = (b"\x7fELF", bytes.fromhex("50ed55ba"))  # ELF (cubins too), fatbin


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the sources, so that the checkout stays as it is."""
    pytest.importorskip("build", reason="building the wheel needs the package `build`, which is not installed")
    tree = folder / "tree"
    shutil.copytree(ROOT / "kvraw", tree / "kvraw", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    try:
        ready = Version(importlib.metadata.version("setuptools")) >= Version("77")
    except importlib.metadata.PackageNotFoundError:
        ready = False
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder)]
    if ready:  # else `build` fetches setuptools itself
        command.append("--no-isolation")
    done = subprocess.run([*command, str(tree)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def files(wheel: Path) -> dict[str, bytes]:
    """Every file of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def dist_info(files: dict[str, bytes], name: str) -> str:
    return files[f"kvraw-{kvraw.__version__}.dist-info/{name}"].decode()


@pytest.fixture(scope="module")
def metadata(files: dict[str, bytes]) -> email.message.Message:
    return email.message_from_string(dist_info(files, "METADATA"))


def test_files(files: dict[str, bytes]) -> None:
    artifacts = json.loads(files["kvraw/ptx/manifest.json"])["artifacts"]
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "kvraw").rglob("*.py")}
    expected |= {"kvraw/py.typed", "kvraw/ptx/manifest.json"}
    for name, artifact in artifacts.items():
        expected |= {f"kvraw/ptx/{file}" for file in (name, *artifact["sources"])}
    assert {name for name in files if ".dist-info/" not in name} == expected


def test_artifacts_are_those_of_the_manifest(files: dict[str, bytes]) -> None:
    artifacts = json.loads(files["kvraw/ptx/manifest.json"])["artifacts"]
    assert artifacts
    for name, artifact in artifacts.items():
        for file, digest in {name: artifact["sha256"], **artifact["sources"]}.items():
            assert hashlib.sha256(files[f"kvraw/ptx/{file}"]).hexdigest() == digest, file


def test_no_binary(files: dict[str, bytes]) -> None:
    for name, data in files.items():
        assert Path(name).suffix not in BINARY_SUFFIXES, name
        assert not data.startswith(BINARY_MAGIC), name
        assert b"\0" not in data, name


def test_tag(wheel: Path, files: dict[str, bytes]) -> None:
    assert wheel.name == f"kvraw-{kvraw.__version__}-py3-none-any.whl"
    fields = email.message_from_string(dist_info(files, "WHEEL"))
    assert fields["Root-Is-Purelib"] == "true"
    assert fields.get_all("Tag") == ["py3-none-any"]


def test_metadata(files: dict[str, bytes], metadata: email.message.Message) -> None:
    assert metadata["Version"] == kvraw.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert dist_info(files, "licenses/LICENSE").strip()
    python = SpecifierSet(metadata["Requires-Python"])
    assert "3.10" in python
    assert "3.9" not in python


def test_requirements(metadata: email.message.Message) -> None:
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    core = {r.name: r for r in requirements if r.marker is None}
    assert set(core) == CORE
    assert all(r.marker is None or "extra ==" in str(r.marker) for r in requirements)
    assert {v: v in core["cuda-python"].specifier for v in ("12.7", "12.8.0", "13.5.0", "14.0")} == {
        "12.7": False,
        "12.8.0": True,
        "13.5.0": True,
        "14.0": False,
    }


def test_command_and_what_engines_find(files: dict[str, bytes]) -> None:
    points = configparser.ConfigParser(delimiters="=")
    points.read_string(dist_info(files, "entry_points.txt"))
    found = {group: dict(points[group]) for group in points.sections()}
    assert found.pop("console_scripts") == {"kvraw": "kvraw.cli.main:main"}
    assert found == {engine.group: {"kvraw": engine.entry} for engine in ENGINES.values()}
    assert "kvraw/cli/main.py" in files
