"""The context that a call runs in: the current one where it fits, else the device's primary one."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol

from kvraw.checks import integer
from kvraw.errors import ClosedError, DriverError, PlacementError
from kvraw.runtime import fork
from kvraw.runtime.driver import CudaDriver, driver, driver_here, usable_here

__all__ = [
    "DeviceScope",
    "FreshScope",
    "Tied",
    "active_device",
    "at_reset",
    "check_for_reset",
    "current_device",
    "device_if_active",
    "device_to_pin",
    "forget",
    "generation",
    "gpu_at_hand",
    "note_error",
    "require_device",
    "reset_error",
    "resets",
    "tie",
]

_lock = fork.lock()  # as all locks here: a finalizer may run in the midst of what its own thread has locked
_NONE: dict[int, int] = {}
_NO_MARKS: dict[int, tuple[int, int]] = {}
# Primary contexts by device, retained for good.
_primary: weakref.WeakKeyDictionary[CudaDriver, dict[int, int]] = weakref.WeakKeyDictionary()
# The first context that something was made in, by device, and its number.
_marks: weakref.WeakKeyDictionary[CudaDriver, dict[int, tuple[int, int]]] = weakref.WeakKeyDictionary()
_resets: dict[int, int] = {}  # how often a device's context was found to be reset
_tied: weakref.WeakSet[Tied] = weakref.WeakSet()
_callbacks: list[Callable[[], object]] = []
_GONE = (201, 400, 709)  # CUDA_ERROR_INVALID_CONTEXT, _INVALID_HANDLE, _CONTEXT_IS_DESTROYED


class Tied(Protocol):
    """Something that ends with the context of its `device`; with any, where it has none."""

    def context_lost(self) -> None:
        """The context is gone, and with it what was made there: nothing is to be given back, or used again."""


def tie(made: Tied) -> None:
    """Have something learn that its device's context was reset."""
    with _lock:
        _tied.add(made)


def at_reset(callback: Callable[[], object]) -> None:
    """Call this where a device's context was reset: what tables keep of addresses and memory is wrong then."""
    _callbacks.append(callback)


def resets(device: int) -> int:
    """Number of known resets of the device's context; looks for no new one."""
    return _resets.get(device, 0)


def generation(device: int) -> int:
    """A number that changes once a device's context was found to be reset; to be asked where something is made."""
    if usable_here():
        check_for_reset(device)
    return _resets.get(device, 0)


def reset_error(device: int | None, what: str) -> ClosedError:
    """The error for what was made before."""
    return ClosedError(f"{what} is gone: the context of device {device} was reset since it was made; make it anew")


def check_for_reset(device: int) -> None:
    """Find out whether somebody reset the context of a device; asked where something is made there."""
    d = driver()
    mark = _marks.get(d, _NO_MARKS).get(device)
    if mark is not None and d.context_id(mark[0]) != mark[1]:
        _end_context(d, device, mark)


def note_error(error: BaseException, device: int) -> None:
    """A call on a device failed: where it was the first to meet a reset, the next one finds all made anew."""
    if isinstance(error, DriverError) and error.code in _GONE:
        with contextlib.suppress(DriverError):
            check_for_reset(device)


def _mark(d: CudaDriver, device: int) -> None:
    """Remember the current context, where it is the primary one: others end with those who made them."""
    context = d.context_current()
    if d.primary_active(device) and _primary_context(d, device) == context:
        _marks.setdefault(d, {})[device] = context, d.context_id(context)


def _end_context(d: CudaDriver, device: int, mark: tuple[int, int] | None) -> None:
    with _lock:
        known = _marks.setdefault(d, {})
        if known.get(device) != mark:
            return  # another thread did
        known.pop(device, None)
        _primary.setdefault(d, {}).pop(device, None)
        _resets[device] = _resets.get(device, 0) + 1
        tied = list(_tied)
    # What names no device goes by what its parts have become.
    for one in sorted(tied, key=lambda one: not hasattr(one, "device")):
        if getattr(one, "device", device) == device:
            one.context_lost()
    forget()


def forget() -> None:
    """Have tables drop what they keep of addresses and memory, as where a context was reset or a driver replaced."""
    for callback in _callbacks:
        callback()


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
    """True where this process can use a GPU."""
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
        try:
            return current_device() if gpu_at_hand() else None
        except DriverError:  # an earlier error, which is not the business of host memory that nobody wants pinned
            return None
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


def device_if_active(device: int) -> AbstractContextManager[object]:
    """A `DeviceScope` where the device has a context; nothing where it has none, and none is made."""
    d = driver()
    active = d.context_device() == device or d.primary_active(device)
    return DeviceScope(device) if active else nullcontext()


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
        context = _primary_context(d, self._device)
        try:
            d.context_push(context)
        except DriverError as error:
            if error.code not in _GONE:
                raise
            _end_context(d, self._device, _marks.get(d, _NO_MARKS).get(self._device))
            raise DriverError(
                error.name,
                error.code,
                error.call,
                f"the context of device {self._device} was reset: streams, caches and device memory from before are "
                f"gone, new ones can be made",
            ) from error
        self._pushed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pushed:
            self._pushed = False
            driver().context_pop()
        if error is not None:
            note_error(error, self._device)


class FreshScope(DeviceScope):
    """A `DeviceScope` in which something is made: where the context was reset, what was made before ends first."""

    __slots__ = ()

    def __enter__(self) -> FreshScope:
        check_for_reset(self._device)
        super().__enter__()
        try:
            d = driver()
            if self._device not in _marks.get(d, _NO_MARKS):
                _mark(d, self._device)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self
