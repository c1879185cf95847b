"""Base of what has an address, a size and a finalizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from kvraw.errors import ClosedError
from kvraw.runtime.context import DeviceScope, tie
from kvraw.runtime.driver import CudaDriver, driver, driver_if

__all__ = ["Closing", "Owner"]

C = TypeVar("C", bound="Closing")


class Closing:
    """Closed at the end of a ``with`` block."""

    def close(self) -> None:
        """Give everything back. Idempotent."""
        raise NotImplementedError

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Owner(Closing):
    """Owns something of a device's context until `close`, which is idempotent and also runs when it is collected."""

    address: int
    nbytes: int
    _finalizer: weakref.finalize  # type: ignore[type-arg]

    def _own(self, release: Callable[..., None], *args: object) -> None:
        """Have `release` called with the arguments at the end, unless the context ends before."""
        self._finalizer = weakref.finalize(self, release, *args)
        tie(self)
        # Work may go on at exit; the driver ends it, and frees what it uses.
        self._finalizer.atexit = False

    def _own_handle(self, device: int, release: str, handle: int) -> None:
        """The same for a method of the driver that gives a handle or an address back."""
        self._own(_release, weakref.ref(driver()), device, release, handle)

    @property
    def closed(self) -> bool:
        """True once it was closed."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Give it back. Idempotent."""
        self._finalizer()

    def context_lost(self) -> None:
        """It ended with its device's context."""
        self._finalizer.detach()

    def require_open(self) -> None:
        """Raise `ClosedError` where it was closed.

        Raises
        ------
        ClosedError
            It was.
        """
        if self.closed:
            raise ClosedError(f"the {type(self).__name__} at {self.address:#x} is closed")


def _release(known: weakref.ref[CudaDriver], device: int, release: str, handle: int) -> None:
    d = driver_if(known)
    if d is not None:
        with DeviceScope(device):
            getattr(d, release)(handle)
