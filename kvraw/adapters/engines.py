"""The engines that kvraw serves once it is installed beside them, as data, and what their plugin managers call.

Nothing is imported until an engine asks, and nothing here raises into it: what kvraw cannot serve stays the engine's.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

from kvraw import config

__all__ = ["ENGINES", "Engine", "serve", "serve_sglang", "serve_vllm", "why_not"]


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: where its plugin manager looks, which versions are known, and what becomes kvraw's.

    Attributes
    ----------
    name : str
        Its name in `KVRAW_DISABLE`, and that of its package.
    group, entry : str
        Entry point of kvraw's metadata: the group, and what it names.
    first, last : tuple of int
        Versions that are known, both ends included, compared by as many numbers as are given.
    serves, leaves : str
        What becomes kvraw's, and what stays the engine's, as the log says it.
    logger : str
        A logger that the engine's own configuration shows.
    """

    name: str
    group: str
    entry: str
    first: tuple[int, ...]
    last: tuple[int, ...]
    serves: str
    leaves: str
    logger: str

    @property
    def known(self) -> str:
        """The versions that are known, as text."""
        first, last = (".".join(map(str, end)) for end in (self.first, self.last))
        return first if first == last else f"{first} to {last}"


_ALL = (
    Engine(
        "lmcache",
        "lmcache.device_plugins",
        "kvraw.adapters.lmcache_plugin:KvrawDeviceSpec",
        (0, 5, 6),
        (0, 5, 6),
        "the operations of lmcache.cuda_ops (without a GPU those of its CPU devices), pinning of host memory on a GPU",
        "IPC of tensors and events, cache contexts",
        "lmcache.kvraw",
    ),
    Engine(
        "sglang",
        "sglang.srt.plugins",
        "kvraw.adapters.engines:serve_sglang",
        (0, 5, 23),
        (0, 5, 23),
        "sgl_kernel.kvcacheio, and of sglang.kernels.ops.kvcache.hicache the layouts layer_first and page_first",
        "layout page_unified, nvfp4, hisparse and mamba pools, the rest of sgl_kernel",
        "sglang.kvraw",
    ),
    Engine(
        "vllm",
        "vllm.general_plugins",
        "kvraw.adapters.engines:serve_vllm",
        (0, 33),
        (0, 33),
        "swap_blocks, swap_blocks_batch and its Triton variant, the block copies of SimpleCPUOffloadConnector",
        "schedulers, host memory and its registration",
        "vllm.kvraw",
    ),
)
ENGINES = {engine.name: engine for engine in _ALL}
_state: dict[str, bool] = {}  # what this process decided, once


def version_of(engine: Engine) -> str:
    """The version that is installed, or that runs; empty where none is."""
    try:
        return installed_version(engine.name)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(engine.name), "__version__", ""))


def _is_known(engine: Engine, version: str) -> bool:
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = tuple(int(x) for x in found[0].split(".")) if found else ()
    return numbers[: len(engine.first)] >= engine.first and (0,) < numbers[: len(engine.last)] <= engine.last


def _torch() -> Any:
    """Torch, which the engines need; None where it is not there."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def _other_device() -> str:
    """What torch is built for, where that is neither CUDA nor the CPU; else empty."""
    torch = _torch()
    if torch is None:
        return ""
    if getattr(torch.version, "hip", None):
        return "ROCm"
    current = getattr(getattr(torch, "accelerator", None), "current_accelerator", lambda: None)()
    return "" if current is None or current.type == "cuda" else str(current.type)


def why_not(engine: Engine) -> str:
    """Why an engine is left alone, as a clause; empty where kvraw serves it."""
    try:
        disabled = config.DISABLE.get()
    except ValueError as error:
        return str(error)
    if engine.name in disabled:
        return f"{config.DISABLE.name} names it"
    version = version_of(engine)
    if not _is_known(engine, version):
        return f"version {version or 'unknown'} is not one that this kvraw knows ({engine.known})"
    other = _other_device()
    return f"torch is built for {other}" if other else ""


def _sglang() -> None:
    from kvraw.adapters import sglang

    sglang.install()


def _vllm() -> None:
    from kvraw.adapters import vllm_plugin

    vllm_plugin.install()


def _lmcache() -> None:
    from kvraw.adapters import lmcache_pinning
    from kvraw.adapters.lmcache._stand_in import install, install_cpu

    torch = _torch()
    if torch is None or not torch.cuda.is_available():  # LMCache asks the same while it is being imported
        install_cpu()
        return
    install()
    lmcache_pinning.install()


_INSTALL: dict[str, Callable[[], None]] = {"lmcache": _lmcache, "sglang": _sglang, "vllm": _vllm}


def serve(name: str) -> bool:
    """Put kvraw into an engine's path, once in a process, and log one line about it; whether it is there."""
    if name in _state:
        return _state[name]
    engine, reason = ENGINES[name], ""
    log = logging.getLogger(engine.logger)
    try:
        reason = why_not(engine)
        if not reason:
            _INSTALL[name]()
    except Exception as error:  # an engine starts whatever becomes of a plugin
        reason = f"{type(error).__name__}: {error}"
    _state[name] = not reason
    if not reason:
        text = f"kvraw serves {name} {version_of(engine)}: {engine.serves}; {name}'s own: {engine.leaves}"
        _report(log, logging.INFO, text)
    else:
        level = logging.INFO if config.DISABLE.name in reason else logging.WARNING
        _report(log, level, f"kvraw leaves {name} alone: {reason}")
    return _state[name]


def _report(log: logging.Logger, level: int, text: str) -> None:
    """Log a line; to stderr where the engine has not set its logging up yet, as SGLang's schedulers have not."""
    if log.hasHandlers():
        log.log(level, "%s", text)
    else:
        logging.StreamHandler().handle(log.makeRecord(log.name, level, __file__, 0, "%s", (text,), None))


def serve_sglang() -> None:
    """What ``sglang.srt.plugins`` calls."""
    serve("sglang")


def serve_vllm() -> None:
    """What ``vllm.general_plugins`` calls."""
    serve("vllm")
