"""Puts the operations here in the place of LMCache's: those of its compiled module, and those of its CPU devices."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from kvraw.adapters.stand_in import amend, stand_in

__all__ = ["install", "install_cpu"]

_CPU = "lmcache.v1.platform.devices.cpu.device_ops"


def install() -> None:
    """Make LMCache use kvraw in this process: its ``c_ops`` and ``cuda_ops`` become the operations here.

    Call it before the engine starts, best before LMCache is imported: it imports nothing itself, and takes effect when
    either module is imported: ``cuda_ops`` whether LMCache has it or not, ``c_ops`` in the versions that do. On
    machines without a GPU, later versions do not look there: in these the operations of their CPU devices
    (``lmcache.device_ops``) become those here. Names that kvraw does not have stay LMCache's own. Idempotent.
    """
    stand_in("lmcache", ("c_ops", "cuda_ops"), _names, there=("c_ops",))
    install_cpu()


def install_cpu() -> None:
    """The part of `install` that is for CPU devices. Idempotent."""
    amend(_CPU, _bind)


def _names() -> dict[str, Any]:
    from kvraw.adapters import lmcache as ours

    return {name: getattr(ours, name) for name in ours.__all__ if name != "install"}


def _bind(module: ModuleType) -> None:
    """Give CPU devices the operations here in the place of those that their class has; its types stay.

    Each device has them as its own attributes, as LMCache's other devices have those of compiled modules.
    """
    home: Any = getattr(module, "CpuDeviceOps", None)
    if not isinstance(home, type):
        return
    made: Any = vars(home).get("__init__", home.__init__)  # type: ignore[misc]

    @functools.wraps(made)
    def init(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        _give(self)

    if not hasattr(made, "__wrapped__"):
        home.__init__ = init  # type: ignore[misc]
    there = getattr(sys.modules.get("lmcache"), "device_ops", None)
    if isinstance(there, home):
        _give(there)


def _give(device: Any) -> None:
    for name, value in _names().items():
        if callable(value) and not isinstance(value, type) and callable(getattr(device, name, None)):
            setattr(device, name, value)
