"""Streams and events, ours and other libraries'."""

from __future__ import annotations

import weakref
from typing import Any

from kvraw.errors import ClosedError, PlacementError
from kvraw.runtime.closeable import Owner
from kvraw.runtime.context import DeviceScope, FreshScope, current_device, reset_error
from kvraw.runtime.driver import CudaDriver, driver

__all__ = ["LEGACY", "Stream", "capturing", "stream_device", "stream_handle"]

LEGACY = (0, 1)  # the legacy default stream's handles (CU_STREAM_LEGACY): it takes no batch call, and no capture
_DEFAULT_STREAMS = (*LEGACY, 2)  # CU_STREAM_PER_THREAD
# Devices of contexts: handles of streams come again, those of contexts hardly ever.
_devices: weakref.WeakKeyDictionary[CudaDriver, dict[int, int]] = weakref.WeakKeyDictionary()


def stream_handle(stream: object, device: int | None = None) -> int:
    """Handle of a stream: anything with ``__cuda_stream__``, an integer ``cuda_stream``, or an int.

    With a device, the stream must be one of its streams, or a default stream (0, 1, 2), which every device has.

    Raises
    ------
    TypeError
        It is None (there is no implicit stream) or none of the above.
    PlacementError
        It is another device's: what runs there would fault, and with it all that this process does on that device.
    """
    if type(stream) is Stream:
        handle, found = stream.handle, stream.device
    else:
        handle = _handle(stream)
        if device is None or handle in _DEFAULT_STREAMS:
            return handle
        found = _device_of(handle)
    if device is not None and found != device:
        raise PlacementError(f"stream is a stream of device {found}, must be one of device {device}")
    return handle


def _handle(stream: object) -> int:
    if stream is None:
        raise TypeError("stream is None; what touches a GPU takes an explicit stream")
    if isinstance(stream, int) and not isinstance(stream, bool):
        if not 0 <= stream < 2**64:
            raise ValueError(f"stream is {stream}, must be a handle in [0, 2**64)")
        return stream
    protocol: Any = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        value = protocol() if callable(protocol) else protocol
        if not (isinstance(value, tuple) and len(value) == 2 and value[0] == 0):
            raise TypeError(f"stream: __cuda_stream__ gave {value!r}, must be (0, handle)")
        return int(value[1])
    handle = getattr(stream, "cuda_stream", None)
    if isinstance(handle, int):
        return handle
    raise TypeError(f"stream is a {type(stream).__name__}; must have __cuda_stream__ or cuda_stream, or be an int")


def _device_of(handle: int) -> int:
    """Device of a stream that is no default stream."""
    d = driver()
    context, known = d.stream_context(handle), _devices.setdefault(d, {})
    found = known.get(context)
    if found is None:
        d.context_push(context)
        try:
            found = known[context] = d.context_device()
        finally:
            d.context_pop()
    return found


def stream_device(stream: object) -> int | None:
    """Device of a stream; of a default stream, the current context's, None where no context is current."""
    if type(stream) is Stream:
        return stream.device
    handle = _handle(stream)
    return current_device() if handle in _DEFAULT_STREAMS else _device_of(handle)


def capturing(stream: int, device: int) -> bool:
    """True where a capture is in progress on a stream of a device."""
    if stream in LEGACY:
        return False
    with DeviceScope(device):  # a thread may have no context yet, and stream 2 is another one in each
        return driver().stream_capturing(stream)


class Stream(Owner):
    """A stream of our own on a device, non-blocking with regard to the legacy default stream.

    Streams of other libraries are taken everywhere as well; this is for those who have none.

    Parameters
    ----------
    device : int
        The device; its primary context is made where it is not there yet.

    Raises
    ------
    DriverNotFoundError, DriverError
        There is no such device, or it makes none.

    Examples
    --------
    >>> with kvraw.Stream(device=0) as stream:
    ...     stream.synchronize()
    """

    def __init__(self, device: int) -> None:
        self.device = device
        d = driver()
        self._lost = False
        with FreshScope(device):
            self._handle = d.stream_create()
        self.open_handle = self._handle  # 0 once it is closed or lost
        self._own_handle(device, "stream_destroy", self._handle)

    @property
    def handle(self) -> int:
        """The driver's handle."""
        if self.closed:
            raise reset_error(self.device, "the stream") if self._lost else ClosedError("the stream is closed")
        return self._handle

    def context_lost(self) -> None:
        """It ended with its device's context."""
        self.open_handle = 0
        if self._finalizer.detach():
            self._lost = True

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def synchronize(self) -> None:
        """Wait on the host for all that the stream was given."""
        driver().stream_synchronize(self.handle)

    def close(self) -> None:
        """Destroy the stream; work that it was given still completes. Idempotent."""
        self.open_handle = 0
        super().close()
