"""Why the driver does not start, in words: what hides cuda-python, which libcuda was loaded, what its error means."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

__all__ = ["hiding_file", "kind_of", "loaded_libcuda", "meaning"]

_MEANING = {
    34: "the library is a stub for linking; take its directory off LD_LIBRARY_PATH",
    100: "there is no GPU for this process; see CUDA_VISIBLE_DEVICES",
    802: "the system is not ready: start the fabric manager, and wait for it",
    803: "the library and the kernel module are of different versions: reboot, or take another libcuda off "
    "LD_LIBRARY_PATH",
    804: "the compat library does not support this GPU; take its directory off LD_LIBRARY_PATH",
}


def hiding_file() -> str | None:
    """The file of a module or package ``cuda`` that is not cuda-python's and stands before it on the path."""
    module = sys.modules.get("cuda")
    try:
        spec = module.__spec__ if module is not None else importlib.util.find_spec("cuda")
    except (ImportError, ValueError, AttributeError):
        return getattr(module, "__file__", None)
    # cuda-python's is a namespace without a file of its own.
    origin = None if spec is None else spec.origin
    if origin is None or spec is None:
        return None
    return None if any(Path(at, "bindings").is_dir() for at in spec.submodule_search_locations or ()) else origin


def loaded_libcuda(maps: str = "/proc/self/maps") -> str | None:
    """Path of the libcuda that this process has loaded."""
    try:
        found = re.search(r"\s(/\S*/libcuda\.so[.\d]*)$", Path(maps).read_text(), re.M)
    except OSError:
        return None
    return found[1] if found else None


def kind_of(libcuda: str | None) -> str | None:
    """The kind of a libcuda by its path: "stub" or "compat"; None: neither."""
    parts = Path(libcuda or "").parts
    return "stub" if "stubs" in parts else "compat" if "compat" in parts else None


def meaning(code: int, name: str) -> str:
    """An error of the driver's start, what it means, and which library gave it."""
    libcuda = loaded_libcuda()
    text = f"cuInit returned {name} ({code})"
    text += f": {_MEANING[code]}" if code in _MEANING else ""
    return f"{text} [{libcuda}]" if libcuda else text
