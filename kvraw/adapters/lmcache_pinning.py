"""Pinning of LMCache's host memory: populated by several threads, registered in large pieces, known to kvraw."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from kvraw.adapters.lmcache._place import this_device
from kvraw.adapters.stand_in import amend
from kvraw.copying import device_state
from kvraw.errors import KvrawError
from kvraw.runtime import fork
from kvraw.runtime.driver import driver_or_none, usable_here
from kvraw.runtime.host.buffer import HostBuffer

__all__ = ["PinMemory", "install"]

_log = logging.getLogger("kvraw")
_CUDA = "lmcache.v1.platform.devices.cuda"
_lock = fork.lock()
_pinned: dict[int, list[HostBuffer]] = {}


class PinMemory:
    """LMCache's ``PinMemoryBackend``: whether memory could be pinned is the answer, and never an error."""

    @property
    def is_pin_supported(self) -> bool:
        """Whether there is a driver."""
        return driver_or_none() is not None

    def pin_memory(self, ptr: int, size: int, flags: int = 0) -> bool:
        """Pin memory for every device; `flags` change nothing: it is mapped and portable in any case."""
        try:
            buffer = HostBuffer.from_pointer(ptr, size, device=this_device(), pin=True)
        except (KvrawError, OSError, ValueError) as error:
            _log.warning("%d bytes at %#x are not pinned: %s", size, ptr, error)
            return False
        with _lock:
            _pinned.setdefault(ptr, []).append(buffer)
        return True

    def unpin_memory(self, ptr: int) -> bool:
        """Undo the last `pin_memory` of an address, once the transfers that are under way are over."""
        with _lock:
            buffers = _pinned.get(ptr)
            if not buffers:
                return False
            buffer = buffers.pop()
            if not buffers:
                del _pinned[ptr]
        try:
            if usable_here():
                device_state.drain()
            buffer.close()
        except (KvrawError, OSError) as error:
            _log.warning("memory at %#x is not unpinned: %s", ptr, error)
            return False
        return True


def install() -> None:
    """Make LMCache's CUDA devices pin by kvraw where there is a driver, whenever their module is loaded. Idempotent."""
    amend(_CUDA, _change)


def _change(module: ModuleType) -> None:
    spec: Any = module.CudaDeviceSpec
    theirs = spec.pin_memory_backend
    if not isinstance(theirs, property) or getattr(theirs.fget, "of_kvraw", False):
        return
    base = module.PinMemoryBackend

    def backend(self: Any) -> Any:
        return ours if driver_or_none() is not None else theirs.fget(self)  # type: ignore[misc]

    backend.of_kvraw = True  # type: ignore[attr-defined]
    ours = type("KvrawPinMemoryBackend", (PinMemory, base), {"__doc__": PinMemory.__doc__})
    spec.pin_memory_backend = property(backend)
