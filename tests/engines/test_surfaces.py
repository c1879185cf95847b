"""What kvraw serves has all names and parameters that the engine's own has, and that its other modules use.

The unmarked test reads the engines that are installed beside kvraw, the marked one the published packages.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import pytest

from kvraw.adapters import lmcache, lmcache_pinning, sglang, vllm, vllm_plugin
from kvraw.adapters.engines import ENGINES
from tests.engines.environments import HERE

# Whose names stand for those of a module; later ones first.
OURS: dict[str, tuple[Any, ...]] = {
    "lmcache": (lmcache_pinning.PinMemory, lmcache),
    "sglang": (sglang,),
    "vllm": (vllm_plugin, vllm),
}
# Names that stay the engine's own, as docs/engines.md says.
THEIRS = {
    "lmcache": {
        *("ensure_native", "bind_native", "tensor_from_ptr"),  # of LMCache's class of devices
        *("synchronize", "RblnDeviceOps", "DeviceOps"),
    },
    "sglang": {
        *("hicache_tma_rows_per_chunk", "use_hicache_tma_kernel", "can_use_page_unified_load_back_jit_kernel"),
        *("transfer_hicache_one_layer_page_unified_lf", "transfer_hicache_one_layer_mla_page_unified_lf"),
        "transfer_hicache_all_layer_staged_lf_page_unified",
        "transfer_hicache_all_layer_mla_staged_lf_page_unified",
    },
    "vllm": {"pin_tensor"},
}
SERVED_ONLY = {"vllm": ("swap_blocks", "swap_blocks_batch", "build_params", "copy_blocks", "pin_tensor")}


def parameters(call: Any) -> set[str] | None:
    """The names that a function takes; None where it takes any."""
    try:
        found = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return None
    return None if any(p.kind is p.VAR_KEYWORD for p in found.values()) else set(found)


def lacking(engine: str, surface: dict[str, Any]) -> list[str]:
    """Names and parameters that kvraw has not."""
    wanted = {name: set(words) for names in surface["has"].values() for name, words in names.items()}
    for name, words in surface["called"].items():
        wanted.setdefault(name, set()).update(words)
    wanted |= {name: wanted.get(name, set()) for name in surface["taken"]}
    out = []
    for name, words in sorted(wanted.items()):
        if name in THEIRS[engine] or (engine in SERVED_ONLY and name not in SERVED_ONLY[engine]):
            continue
        homes = [home for home in OURS[engine] if hasattr(home, name)]
        if not homes:
            out.append(name)
            continue
        every = [parameters(getattr(home, name)) for home in homes]
        known = None if None in every else set().union(*filter(None, every))
        out += [f"{name}({word})" for word in sorted(words - known)] if known is not None else []
    return out


@pytest.mark.parametrize("engine", ENGINES)
def test_of_what_is_installed_here(engine: str) -> None:
    try:
        version(engine)
    except PackageNotFoundError:
        pytest.skip(f"{engine} is not installed beside kvraw")
    done = subprocess.run([sys.executable, HERE / "surface.py", engine], capture_output=True, text=True, check=True)
    assert lacking(engine, json.loads(done.stdout)) == []


@pytest.mark.engines
@pytest.mark.parametrize("engine", ENGINES)
def test_of_the_published_package(engine: str, request: pytest.FixtureRequest) -> None:
    text = request.getfixturevalue(engine).run(str(HERE / "surface.py"), engine)
    assert lacking(engine, json.loads(text)) == []


def test_what_is_missing_is_seen() -> None:
    has = {"transfer_hicache_one_layer": ["page_size", "of_tomorrow"], "use_hicache_tma_kernel": []}
    surface = {"has": {"module": has}, "called": {"transfer_kv_direct": ["page_size"]}, "taken": ["transfer_kv_new"]}
    assert lacking("sglang", surface) == ["transfer_hicache_one_layer(of_tomorrow)", "transfer_kv_new"]
    assert isinstance(lmcache, ModuleType)
