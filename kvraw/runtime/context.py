"""Which context a call runs in: the current one where it fits, else the device's primary one."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType

from kvraw.errors import PlacementError
from kvraw.runtime.driver import CudaDriver, driver

__all__ = ["DeviceScope", "current_device"]

_lock = threading.Lock()
# Primary contexts by device, retained for good.
_primary: weakref.WeakKeyDictionary[CudaDriver, dict[int, int]] = weakref.WeakKeyDictionary()


def current_device() -> int | None:
    """Device of the calling thread's current context; None where no context is current."""
    d = driver()
    return d.context_device() if d.context_current() else None


def _primary_context(d: CudaDriver, device: int) -> int:
    with _lock:
        known = _primary.setdefault(d, {})
        if device not in known:
            count = d.device_count()
            if not 0 <= device < count:
                raise PlacementError(f"device is {device}, must be in [0, {count})")
            known[device] = d.primary_retain(device)
        return known[device]


class DeviceScope:
    """Makes a context of a device current for a ``with`` block, and restores what was current before.

    The context that is current is used as it is when it belongs to the device; else the device's primary context is
    retained (once per process) and pushed.
    """

    __slots__ = ("_device", "_pushed")

    def __init__(self, device: int) -> None:
        self._device = device
        self._pushed = False

    def __enter__(self) -> DeviceScope:
        d = driver()
        if d.context_current() and d.context_device() == self._device:
            return self
        d.context_push(_primary_context(d, self._device))
        self._pushed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pushed:
            self._pushed = False
            driver().context_pop()
