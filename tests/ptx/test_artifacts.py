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
from kvraw.codec import args as codec_args
from kvraw.copying import kernel_args as ka
from kvraw.errors import ArtifactError
from kvraw.ptx import build, loader
from kvraw.rope import args as rope_args

ROOT = Path(kvraw.ptx.__file__).parent
NAMES = [a.name for a in build.ARTIFACTS]
TARGETS = (75, 80, 86, 89, 90, 100, 120)
TARGET_OF = {a.name: int(a.target.removeprefix("compute_")) for a in build.ARTIFACTS}
# By header: argument block, table of its offsets in the PTX, module with the header's enumerators.
BLOCKS = {
    "copy_args.h": (ka.ARGS, "kvraw_copy_layout", ka),
    "codec_args.h": (codec_args.CODEC, "kvraw_codec_layout", codec_args),
    "quantize_args.h": (codec_args.QUANTIZE, "kvraw_quantize_layout", codec_args),
    "rope_args.h": (rope_args.ROPE, "kvraw_rope_layout", rope_args),
}


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
    assert entry["target"] == f"sm_{TARGET_OF[name]}"
    assert dict(build.entries(text)) == entry["entries"]


@pytest.mark.parametrize("artifact", build.ARTIFACTS, ids=lambda a: a.name)
def test_rebuilding_gives_the_committed_bytes(artifact: build.Artifact) -> None:
    try:
        text = build.compile_ptx(artifact)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    assert text == (ROOT / artifact.name).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_no_load_is_incoherent(name: str) -> None:
    """The cache is written by other streams, and in place: a load past coherence could bring old bytes."""
    code = re.sub(r"//[^\n]*", "", loader.read_ptx(name).decode())
    opcodes = set(re.findall(r"\b((?:ld|tex|tld4|suld|ldu)(?:\.[\w:]+)+)", code))
    assert opcodes
    coherent = re.compile(r"ld\.(param|shared|global)(?!.*\.nc)(\.L1::no_allocate)?(\.v[24])?\.[busf](8|16|32|64)")
    assert not {o for o in opcodes if not coherent.fullmatch(o)}


def test_only_a_faster_twin_needs_a_newer_target() -> None:
    newer = {name: target for name, target in TARGET_OF.items() if target != 75}
    # Older devices take rope_bf16_v2.ptx, as tests/emulator/test_rope_newer_device.py shows.
    assert newer == {"rope_bf16_v16.ptx": 80, "rope_bf16_v16_neighbours.ptx": 80}


@pytest.mark.parametrize(("name", "target"), [(n, t) for n in NAMES for t in TARGETS if t >= TARGET_OF[n]])
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


@pytest.mark.parametrize("artifact", build.ARTIFACTS, ids=lambda a: a.name)
def test_argument_block_matches(artifact: build.Artifact) -> None:
    dtype, table, _ = BLOCKS[artifact.headers[0]]
    text = loader.read_ptx(artifact.name).decode()
    (numbers,) = re.findall(rf"{table}\[\d+\] = \{{([\d, ]+)\}}", text)
    compiled = np.array([int(x) for x in numbers.split(",")], np.uint8).view(np.uint32).tolist()
    assert compiled == [*flat_offsets(dtype), dtype.itemsize]
    ((entry, (parameter,)),) = build.entries(text)
    assert entry == f"kvraw_{Path(artifact.name).stem}"
    assert parameter == f".param .align 8 .b8 {entry}_param_0[{dtype.itemsize}]"
    assert dtype.itemsize <= 4096


@pytest.mark.parametrize("header", BLOCKS)
def test_enumerators_match_the_header(header: str) -> None:
    found = re.findall(
        r"^\s+([A-Z][A-Z0-9_]+) = (\d+)|[{,] ([A-Z][A-Z0-9_]+) = (\d+)", (ROOT / header).read_text(), re.M
    )
    values = {a or c: int(b or d) for a, b, c, d in found}
    assert values
    assert {name: getattr(BLOCKS[header][2], name) for name in values} == values


def test_constants_match_the_sources() -> None:
    for file, name, value in (
        ("copy_args.h", "WORDS", ka.WORDS),
        ("quantize_args.h", "LAYERS", codec_args.MOST_LAYERS),
        ("rope.cu", "HEADS", rope_args.HEADS),
    ):
        assert int(re.findall(rf"#define {name} (\d+)", (ROOT / file).read_text())[0]) == value


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
