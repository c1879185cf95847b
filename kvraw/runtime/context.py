"""Which context a call runs in: the current one where it fits, else the device's primary one."""

from __future__ import annotations

import weakref
from types import TracebackType

from kvraw.checks import integer
from kvraw.errors import PlacementError
from kvraw.runtime import fork
from kvraw.runtime.driver import CudaDriver, driver, driver_here

__all__ = ["DeviceScope", "active_device", "current_device", "device_to_pin", "gpu_at_hand", "require_device"]

_lock = fork.lock()  # as all locks here: a finalizer may run in the midst of what its own thread has locked
_NONE: dict[int, int] = {}
# Primary contexts by device, retained for good.
_primary: weakref.WeakKeyDictionary[CudaDriver, dict[int, int]] = weakref.WeakKeyDictionary()


def current_device() -> int | None:
    """Device of the calling thread's current context; None where no context is current."""
    found = driver().context_device()
    return None if found < 0 else found


def active_device() -> int | None:
    """Device of the current context, else the first one whose primary context exists; makes none."""
    d = driver()
    current = d.context_device()
    if current >= 0:
        return current
    return next((k for k in range(d.device_count()) if d.primary_active(k)), None)


def gpu_at_hand() -> bool:
    """Whether this process can use a GPU."""
    return driver_here() is not None  # a child that wants host memory alone may have it


def device_to_pin(device: int | None, pin: bool | None) -> int | None:
    """The device in whose context host memory is to be pinned now; None: not now. Makes no context.

    Raises
    ------
    PlacementError
        It is to be pinned, but no device is named, and there is no context that somebody else asked for.
    """
    if device is not None:
        device = integer("device", device)
        if device < 0:
            raise PlacementError(f"device is {device}, must be >= 0")
    if pin is False:
        return None
    if device is not None:
        return device
    if pin is None:
        return current_device() if gpu_at_hand() else None
    found = active_device()
    if found is None:
        raise PlacementError("pin is True, but no device is named and no CUDA context exists; pass device=")
    return found


def require_device(d: CudaDriver, device: int) -> None:
    """Raise `PlacementError` where there is no such device."""
    count = d.device_count()
    if not 0 <= device < count:
        raise PlacementError(f"device is {device}, must be in [0, {count})")


def _primary_context(d: CudaDriver, device: int) -> int:
    found = _primary.get(d, _NONE).get(device)
    if found is not None:
        return found
    with _lock:
        known = _primary.setdefault(d, {})
        if device not in known:
            require_device(d, device)
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
        if d.context_device() == self._device:
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
