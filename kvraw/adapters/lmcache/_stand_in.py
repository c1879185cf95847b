"""Puts the operations here in the place of LMCache's: those of its compiled module, and those of its CPU devices."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from kvraw.adapters.stand_in import amend, stand_in

__all__ = ["install"]

_CPU = "lmcache.v1.platform.devices.cpu.device_ops"


def install() -> None:
    """Make LMCache use kvraw in this process: its ``c_ops`` and ``cuda_ops`` become the operations here.

    Call it before the engine starts, best before LMCache is imported: it imports nothing itself, and takes effect when
    either module is imported: ``cuda_ops`` whether LMCache has it or not, ``c_ops`` in the versions that do. On
    machines without a GPU, later versions do not look there: in these the operations of their CPU devices
    (``lmcache.device_ops``) become those here. Names that kvraw does not have stay LMCache's own. Idempotent.
    """
    stand_in("lmcache", ("c_ops", "cuda_ops"), _names, there=("c_ops",))
    amend(_CPU, _bind)


def _names() -> dict[str, Any]:
    from kvraw.adapters import lmcache as ours

    return {name: getattr(ours, name) for name in ours.__all__ if name != "install"}


def _bind(module: ModuleType) -> None:
    """Give the class of CPU devices the operations here in the place of those that it has; its types stay."""
    home = getattr(module, "CpuDeviceOps", None)
    for name, value in _names().items() if isinstance(home, type) else ():
        if callable(value) and not isinstance(value, type) and callable(getattr(home, name, None)):
            setattr(home, name, staticmethod(value))
