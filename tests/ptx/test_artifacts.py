"""The committed PTX: matches its manifest, its sources, the Python argument blocks, and every target's assembler."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import kvraw.ptx
from kvraw.engines import kernel_args as ka
from kvraw.errors import ArtifactError
from kvraw.ptx import build, loader

ROOT = Path(kvraw.ptx.__file__).parent
NAMES = [a.name for a in build.ARTIFACTS]
TARGETS = (75, 80, 86, 89, 90, 100, 120)


def ptxas() -> str | None:
    """From the nvidia-cuda-nvcc wheel, else from the PATH."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(folder).glob("cu*/bin/ptxas")):
            return str(found)
    return shutil.which("ptxas")


def test_manifest_names_exactly_the_artifacts() -> None:
    assert sorted(loader.manifest()) == sorted(NAMES) == sorted(p.name for p in ROOT.glob("*.ptx"))


@pytest.mark.parametrize("name", NAMES)
def test_manifest_matches_artifact_and_sources(name: str) -> None:
    entry = loader.manifest()[name]
    text = loader.read_ptx(name).decode()
    assert hashlib.sha256(text.encode()).hexdigest() == entry["sha256"]
    for source, digest in entry["sources"].items():
        assert hashlib.sha256((ROOT / source).read_bytes()).hexdigest() == digest, f"{source} changed: rebuild the PTX"
    assert entry["version"] == "8.0"
    assert entry["target"] == "sm_75"
    assert dict(build.entries(text)) == entry["entries"]


@pytest.mark.parametrize("artifact", build.ARTIFACTS, ids=lambda a: a.name)
def test_rebuilding_gives_the_committed_bytes(artifact: build.Artifact) -> None:
    try:
        text = build.compile_ptx(artifact)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    assert text == (ROOT / artifact.name).read_text()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_assembles_without_spills(name: str, target: int, tmp_path: Path) -> None:
    tool = ptxas()
    if tool is None:
        pytest.skip("no ptxas: neither the nvidia-cuda-nvcc wheel nor one on the PATH")
    command = [tool, f"-arch=sm_{target}", "-v", str(ROOT / name), "-o", str(tmp_path / "out.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    assert spills, done.stderr
    assert set(spills) == {"0"}, done.stderr
    assert "0 bytes stack frame" in done.stderr


def flat_offsets(dtype: np.dtype, base: int = 0) -> list[int]:
    out: list[int] = []
    assert dtype.fields is not None
    for field, offset in dtype.fields.values():
        out += flat_offsets(field, base + offset) if field.fields else [base + offset]
    return out


@pytest.mark.parametrize("name", NAMES)
def test_argument_block_matches(name: str) -> None:
    text = loader.read_ptx(name).decode()
    (numbers,) = re.findall(r"kvraw_copy_layout\[\d+\] = \{([\d, ]+)\}", text)
    compiled = np.array([int(x) for x in numbers.split(",")], np.uint8).view(np.uint32).tolist()
    assert compiled == [*flat_offsets(ka.ARGS), ka.ARGS.itemsize]
    ((entry, (parameter,)),) = build.entries(text)
    width = re.fullmatch(r"kvraw_copy_v(\d+)", entry)
    assert width is not None
    assert name == f"copy_v{width[1]}.ptx"
    assert parameter == f".param .align 8 .b8 {entry}_param_0[{ka.ARGS.itemsize}]"
    assert ka.ARGS.itemsize <= 4096


def test_flags_match_the_header() -> None:
    header = (ROOT / "copy_args.h").read_text()
    for name in ("INDEX_INLINE", "INDEX_I64", "INDEX_I32", "TABLE_INLINE", "SKIP_NEGATIVE", "CHECK"):
        (value,) = re.findall(rf"\b{name} = (\d+)", header)
        assert getattr(ka, name) == int(value)
    assert int(re.findall(r"#define WORDS (\d+)", header)[0]) == ka.WORDS


def test_an_altered_artifact_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for file in ("manifest.json", "copy_v16.ptx"):
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "copy_v16.ptx").write_text((ROOT / "copy_v16.ptx").read_text().replace("sm_75", "sm_80"))
    monkeypatch.setattr(loader, "_ROOT", tmp_path)
    with pytest.raises(ArtifactError, match=r"copy_v16\.ptx has sha256"):
        loader.read_ptx.__wrapped__("copy_v16.ptx")
    with pytest.raises(ArtifactError, match=r"copy_v8\.ptx cannot be read"):
        loader.read_ptx.__wrapped__("copy_v8.ptx")
    with pytest.raises(ArtifactError, match="not in"):
        loader.read_ptx.__wrapped__("nothing.ptx")
