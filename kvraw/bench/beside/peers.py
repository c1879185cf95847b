"""Modules whose operations are measured: kvraw's adapters, and the projects' own where they can be imported."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from kvraw.adapters import lmcache, sglang

__all__ = ["OWN", "peers"]

OWN: MappingProxyType[str, Any] = MappingProxyType({"lmcache": lmcache, "sglang": sglang})
# Where their operations are, and one of them.
_MODULES = (
    ("lmcache", "lmcache.c_ops", "multi_layer_block_kv_transfer"),
    ("sglang", "sgl_kernel.kvcacheio", "transfer_kv_all_layer"),
)


def _theirs(module: Any, operation: str) -> bool:
    """Whether a module is not kvraw's adapter, which `install()` puts in its place."""
    return not str(getattr(getattr(module, operation, None), "__module__", "")).startswith("kvraw.")


def peers(lmcache_path: str | None = None, sglang_module: str | None = None) -> dict[str, Any]:
    """The projects' own modules.

    Parameters
    ----------
    lmcache_path : str or None
        LMCache's compiled module, as a file; default: the one that can be imported.
    sglang_module : str or None
        Name of a module with SGLang's operations; default: the one that can be imported.

    Returns
    -------
    dict
        "lmcache" and "sglang", where they are there.

    Raises
    ------
    ImportError
        What was named cannot be loaded.
    """
    found: dict[str, Any] = {}
    for name, default, operation in _MODULES:
        with suppress(ImportError, OSError):
            module = importlib.import_module(default)
            if _theirs(module, operation):
                found[name] = module
    if lmcache_path is not None:
        spec = importlib.util.spec_from_file_location("c_ops", lmcache_path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{lmcache_path} is no module")
        found["lmcache"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found["lmcache"])
    if sglang_module is not None:
        found["sglang"] = importlib.import_module(sglang_module)
    return found
