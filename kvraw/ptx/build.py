"""Builds the committed PTX and its manifest with NVRTC (a development need, never a user's).

Run ``python -m kvraw.ptx.build`` after a change to a source; it needs the wheel named by `NVRTC_WHEEL`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NVRTC_WHEEL = (
    "nvidia-cuda-nvrtc-cu12==12.0.140"  # its PTX carries .version 8.0, which every CUDA 12 and 13 driver takes
)
TARGET = "compute_75"
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Artifact:
    """One PTX file: the sources, the definitions and the target that it is built from and for."""

    name: str
    source: str
    headers: tuple[str, ...] = ()
    defines: tuple[str, ...] = ()
    target: str = TARGET


_CODEC = ("codec_args.h", "arith.h")
_QUANTIZE = ("quantize_args.h", "arith.h")
_ROPE = ("rope_args.h", "arith.h")


def _rope(name: str, vector: int, neighbours: bool = False) -> Artifact:
    kernel = f"rope_{name}_v{vector}{'_neighbours' * neighbours}"
    # Arithmetic in bf16 came with compute capability 8.0; without it, rounding takes longer than memory does.
    native = name == "bf16" and vector == 16
    kind = {"fp32": 32, "fp16": 16, "bf16": 191}[name]
    options = {"NAME": f"kvraw_{kernel}", "TYPE": kind, "VECTOR": vector, "NATIVE": int(native)}
    defines = tuple(f"{key}={value}" for key, value in (options | {"NEIGHBOURS": int(neighbours)}).items())
    return Artifact(f"{kernel}.ptx", "rope.cu", _ROPE, defines, "compute_80" if native else TARGET)


def _copy(width: int, paced: bool) -> Artifact:
    defines = (f"VEC={width}", *["PACED"] * paced)
    return Artifact(f"copy{'_paced' * paced}_v{width}.ptx", "copy.cu", ("copy_args.h",), defines)


ARTIFACTS = (
    *(_copy(width, paced) for paced in (False, True) for width in (16, 8, 4, 2, 1)),
    *(
        Artifact(f"codec_{what}_a{alphabet}.ptx", f"codec_{what}.cu", _CODEC, (f"ALPHABET={alphabet}",))
        for what in ("cdf", "encode", "decode")
        for alphabet in (32, 64, 256)
    ),
    Artifact("codec_pack.ptx", "codec_pack.cu", _CODEC),
    Artifact("quantize.ptx", "quantize.cu", _QUANTIZE, ("BACK=0",)),
    Artifact("dequantize.ptx", "quantize.cu", _QUANTIZE, ("BACK=1",)),
    *(_rope(*variant) for variant in (("fp32", 4), ("fp16", 2), ("bf16", 2))),
    *(_rope(name, 16, neighbours) for name in ("fp32", "fp16", "bf16") for neighbours in (False, True)),
)


def _nvrtc() -> ctypes.CDLL:
    import importlib.metadata

    try:
        files = importlib.metadata.files(NVRTC_WHEEL.split("==")[0]) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith("libnvrtc.so"):
            lib = ctypes.CDLL(str(file.locate()))
            major, minor = ctypes.c_int(), ctypes.c_int()
            lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
            if (major.value, minor.value) == (12, 0):
                return lib
    raise ModuleNotFoundError(f"building PTX needs {NVRTC_WHEEL} installed in this environment")


def compile_ptx(artifact: Artifact) -> str:
    """Compile one artifact in memory and return the PTX text.

    Raises
    ------
    ModuleNotFoundError
        The pinned NVRTC wheel is not installed.
    RuntimeError
        The source does not compile; carries NVRTC's log.
    """
    lib = _nvrtc()
    program = ctypes.c_void_p()
    texts = [(HERE / h).read_bytes() for h in artifact.headers]
    bodies = (ctypes.c_char_p * len(texts))(*texts)
    names = (ctypes.c_char_p * len(texts))(*(h.encode() for h in artifact.headers))
    source = (HERE / artifact.source).read_bytes()
    lib.nvrtcCreateProgram(ctypes.byref(program), source, artifact.source.encode(), len(texts), bodies, names)
    flags = [f"--gpu-architecture={artifact.target}", "--std=c++17", *(f"-D{d}" for d in artifact.defines)]
    failed = lib.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags)))
    size = ctypes.c_size_t()
    if failed:
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{artifact.source} {artifact.defines}: {log.value.decode()}")
    lib.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetPTX(program, text)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    # NVRTC 12.0 leaves the unused constants of its own <nv/target> in every module.
    lines = (line.rstrip() for line in text.value.decode().splitlines() if "nv6target" not in line)
    return "\n".join(lines).strip() + "\n"


def describe(artifact: Artifact, text: str) -> dict[str, object]:
    """The manifest entry of one artifact: digests, target and entry signatures."""
    sources = (artifact.source, *artifact.headers)
    version, target = (re.search(rf"^\.{key} (\S+)", text, re.M) for key in ("version", "target"))
    if version is None or target is None:
        raise RuntimeError(f"{artifact.name}: no .version or .target")
    return {
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "version": version[1],
        "target": target[1],
        "entries": dict(entries(text)),
        "sources": {name: hashlib.sha256((HERE / name).read_bytes()).hexdigest() for name in sources},
        "defines": list(artifact.defines),
    }


def entries(text: str) -> Iterator[tuple[str, list[str]]]:
    """Name and parameter declarations of each kernel in a PTX text."""
    for name, params in re.findall(r"\.entry (\w+)\s*\((.*?)\)", text, re.S):
        yield name, [" ".join(p.split()) for p in params.split(",") if p.strip()]


def main() -> None:
    """Write every artifact and the manifest."""
    manifest = {}
    for artifact in ARTIFACTS:
        text = compile_ptx(artifact)
        (HERE / artifact.name).write_text(text)
        manifest[artifact.name] = describe(artifact, text)
    (HERE / "manifest.json").write_text(json.dumps({"compiler": NVRTC_WHEEL, "artifacts": manifest}, indent=1) + "\n")


if __name__ == "__main__":
    main()
