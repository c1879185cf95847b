"""Host memory of any kind with what is done to it: populated, pinned, used by transfers, given back."""

from __future__ import annotations

import contextlib
import weakref
from typing import TypeVar

import numpy as np

from kvraw import config
from kvraw.checks import NotPicklable, integer
from kvraw.errors import (
    BoundsError,
    ClosedError,
    ForkError,
    PlacementError,
    TransferTimeoutError,
)
from kvraw.runtime import fork
from kvraw.runtime.closeable import Closing
from kvraw.runtime.context import device_to_pin, gpu_at_hand, require_device, tie
from kvraw.runtime.driver import driver, usable_here
from kvraw.runtime.host.backing import BackingInfo, inspect_backing
from kvraw.runtime.host.mapping import HostMapping, HostOptions, allocate_memory, attach_memory, borrow_memory
from kvraw.runtime.host.populate import populate_threads
from kvraw.runtime.host.preparation import BackgroundGrowth, PopulateAndRegister, preparation_account
from kvraw.runtime.host.registration import Registration, give_up
from kvraw.runtime.host.usage import Use, UseTracker

__all__ = ["HostBuffer"]

B = TypeVar("B", bound="HostBuffer")

_DEFAULTS = HostOptions()
_live: weakref.WeakSet[HostBuffer] = weakref.WeakSet()


class HostBuffer(Closing, UseTracker, NotPicklable):
    """One range of host memory, page-aligned and of exactly the size asked for (rounded up to whole pages).

    Parameters
    ----------
    nbytes : int
        Bytes.
    device : int, optional
        Pin the memory for the GPUs, in a context of this device.
    pin : bool, optional
        True: pin, or raise. False: do not pin. None, the default: pin now where a device was named or a CUDA context is
        current, else at the first use by a GPU transfer; no context is ever created that nobody asked for.
    options : HostOptions, optional
        Where the memory comes from, and how it is made ready.

    Attributes
    ----------
    address, nbytes : int
        The range.

    Raises
    ------
    HostMemoryError
        The memory is unavailable. It is a MemoryError.
    DriverNotFoundError, DriverError
        It was to be pinned and cannot be; nothing is left mapped or registered.
    PlacementError
        It was to be pinned, and nothing says by which device.
    BoundsError, TypeError, ValueError
        The size is not positive, or the options do not fit.

    Examples
    --------
    >>> with kvraw.HostBuffer(1 << 20, pin=False) as buffer:
    ...     buffer.view(buffer.address, 4)[:] = 7
    ...     buffer.pinned
    False
    """

    _noun = "buffer"

    def __init__(
        self, nbytes: int, *, device: int | None = None, pin: bool | None = None, options: HostOptions | None = None
    ) -> None:
        nbytes = integer("nbytes", nbytes)
        if nbytes <= 0:
            raise BoundsError(f"nbytes is {nbytes}, must be positive")
        if options is not None and not isinstance(options, HostOptions):
            raise TypeError(f"options is {options!r}, must be HostOptions, such as HostOptions(populate=True)")
        chosen = options or _DEFAULTS
        target = device_to_pin(device, pin)
        if target is not None:
            require_device(driver(), target)  # before the work of populating
        if chosen.kind == "pinned":
            if pin is False:
                raise ValueError("pin is False, but kind is 'pinned'")
            if target is None and gpu_at_hand():
                raise PlacementError("kind is 'pinned', but no device is named and no context is current; pass device=")
        self._adopt(allocate_memory(nbytes, chosen, target if device is None else device, target), target, chosen)

    @classmethod
    def from_pointer(
        cls: type[B], address: int, nbytes: int, *, device: int | None = None, pin: bool | None = None,
        owner: object = None, step_bytes: int | None = None,
    ) -> B:  # fmt: skip
        """Memory of somebody else, borrowed; where it is to be pinned, what others did not pin is registered in place.

        Parameters
        ----------
        address, nbytes : int
            The range.
        device, pin
            As of the constructor.
        owner : object, optional
            Kept alive as long as the memory is in use.
        step_bytes : int, optional
            Bytes per registration with the driver; default `KVRAW_REGISTER_BYTES`.

        Returns
        -------
        HostBuffer
            The buffer, or the pool where it is called of `HostPool`.

        Raises
        ------
        BoundsError
            No process has such a range.
        DriverNotFoundError, DriverError
            It was to be pinned and cannot be.

        Examples
        --------
        >>> memory = np.zeros(1 << 20, np.uint8)
        >>> buffer = kvraw.HostBuffer.from_pointer(memory.ctypes.data, memory.nbytes, pin=False, owner=memory)
        >>> buffer.nbytes
        1048576
        """
        self = cls.__new__(cls)
        memory = borrow_memory(address, nbytes, owner)
        self._adopt(memory, device_to_pin(device, pin), HostOptions(step_bytes=step_bytes))
        return self

    @classmethod
    def attach(
        cls: type[B], name: str, nbytes: int | None = None, *, device: int | None = None, pin: bool | None = None,
        any_user: bool = False,
    ) -> B:  # fmt: skip
        """Shared memory that another process created; it is never unlinked from here.

        Parameters
        ----------
        name : str
            Its `name` there.
        nbytes : int, optional
            Bytes; default: all.
        device, pin
            As of the constructor.
        any_user : bool
            Take it whoever owns it, and can write to it: they can end this process by truncating it.

        Returns
        -------
        HostBuffer
            The buffer, or the pool where it is called of `HostPool`.

        Raises
        ------
        FileNotFoundError, HostMemoryError
            There is none of that name; or it is no regular file.
        PermissionError
            It is another user's (but root's), or others may write to it.
        BoundsError
            It is smaller than `nbytes`.
        TypeError
            `name` is no str.

        Examples
        --------
        >>> with kvraw.HostBuffer(4096, pin=False, options=kvraw.HostOptions(kind="shared")) as mine:
        ...     with kvraw.HostBuffer.attach(mine.name, pin=False) as other:
        ...         mine.view(mine.address, 1)[0] = 7
        ...         int(other.view(other.address, 1)[0])
        7
        """
        if not isinstance(name, str):
            raise TypeError(f"name is {name!r}, must be a str")
        self = cls.__new__(cls)
        target = device_to_pin(device, pin)
        nbytes = None if nbytes is None else integer("nbytes", nbytes)
        self._adopt(attach_memory(name, nbytes, any_user), target, _DEFAULTS)
        return self

    def _adopt(self, memory: HostMapping, target: int | None, options: HostOptions) -> None:
        self.address, self.nbytes = memory.address, memory.nbytes
        self._memory, self._options = memory, options
        self._bytes = memory.array()  # the last view of it gives the memory back
        UseTracker.__init__(self)
        self._pin_lock = fork.lock()
        self._preparation: PopulateAndRegister | None = None
        self._growth: BackgroundGrowth | None = None
        self._facts: BackingInfo | None = None
        self._ready = 0
        self._closed = self._gone = False
        self._forked = False
        _live.add(self)
        tie(self)
        try:
            self._start(target)
        except BaseException:
            self._closed = self._gone = True
            self._bytes = np.empty(0, np.uint8)
            memory.discard()
            raise

    # making it ready

    def _start(self, target: int | None) -> None:
        options, memory = self._options, self._memory
        if memory.kind == "pinned" or (target is None and not options.populate):
            self._ready = self.nbytes
            return
        if not options.grow:
            # Shared memory of another process may be in use already.
            self._prepare(target, fresh=memory.segment is None or memory.segment.owned, extend=True)
            return
        self._preparation = self._plan(target, options.first_bytes, fresh=True)
        try:
            while self._ready < min(options.first_bytes, self.nbytes):
                self._publish(self._preparation.advance())
            if not self._preparation.over:
                self._growth = BackgroundGrowth.start(self._preparation, weakref.WeakMethod(self._publish))
            while self._growth is None and not self._preparation.over:  # no thread is to be had: then all of it now
                self._publish(self._preparation.advance())
            if self._growth is None:
                self._preparation.stop()
        except BaseException:
            self._preparation.stop()
            self._roll_back()
            raise

    def _plan(self, device: int | None, first: int, fresh: bool) -> PopulateAndRegister:
        options, memory = self._options, self._memory
        page = {"huge-2MiB": 2 << 20, "huge-1GiB": 1 << 30}.get(memory.kind, 4096 if memory.owned else 1)
        step, first = (-(-n // page) * page for n in (options.step_bytes or config.REGISTER_BYTES.get(), first))
        threads = (options.threads or populate_threads()) if memory.owned else 0
        return PopulateAndRegister(
            memory, device, first=first, step=step, threads=threads, fresh=fresh, alone=fresh and options.grow
        )

    def _prepare(self, device: int | None, *, fresh: bool, extend: bool) -> None:
        """All of it, now; rolled back where a step fails."""
        preparation = self._preparation = self._plan(
            device, self._options.step_bytes or config.REGISTER_BYTES.get(), fresh
        )
        made = preparation.complete(self._report)
        self._memory.registrations += made
        self._memory.hide_from_children(bool(made))
        self._facts = None
        if extend:
            self._ready = self.nbytes

    def _publish(self, registration: Registration | None) -> None:
        """A step of a growing buffer is ready."""
        assert self._preparation is not None
        with self._lock:
            if self._closed:
                if registration is not None:
                    registration.close()
                raise ClosedError("the buffer was closed while it grew")
            if registration is not None:
                self._memory.registrations.append(registration)
                self._memory.hide_from_children(True)
            self._facts = None
            self._ready = self._preparation.reached
        self._report(self._preparation.reached)

    def _report(self, reached: int) -> None:
        if self._options.progress is not None:
            self._options.progress(reached, self.nbytes)

    def _roll_back(self) -> None:
        with contextlib.suppress(RuntimeError):
            give_up(self._memory.registrations)
        if self._memory.kind != "pinned":
            self._memory.shift = None

    @property
    def ready_bytes(self) -> int:
        """Bytes from the beginning that may be used; less than `nbytes` only while it grows, or where that failed."""
        return self._ready

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until a growing buffer is ready as a whole.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; default: for ever.

        Raises
        ------
        TransferTimeoutError
            It is not after `timeout` seconds.
        HostMemoryError, DriverError
            Growing failed; the bytes that are ready stay usable.
        """
        growth = self._growth
        if growth is not None:
            if not growth.join(timeout):
                raise TransferTimeoutError(f"{self._ready} of {self.nbytes} bytes are ready after {timeout} s")
            if growth.error is not None:
                raise growth.error.with_traceback(None)
        self.require_open()

    def mark_used(self, use: Use, within: Use | None = None) -> None:
        """Note an operation that uses this memory: a `close` that comes now waits for it.

        The memory must be open; or the operation is a part of another use, which `close` waits for.
        """
        with self._lock:
            if within is None:
                self.require_open()
            self.note_use(use)

    # pinning

    @property
    def pinned(self) -> bool:
        """True where every byte that may be used is known to the driver as pinned."""
        return bool(self._memory.registrations) or (self._memory.kind == "pinned" and not self._closed)

    @property
    def device_shift(self) -> int:
        """The distance from an address of the memory to the address at which a GPU sees it."""
        if not self.pinned or self._memory.shift is None:
            raise ClosedError(f"the {self._noun} is {'closed' if self._closed else 'not pinned'}")
        return self._memory.shift

    def context_lost(self) -> None:
        """Count as pageable what was registered in the context; it is pinned anew at its next use by a GPU."""
        self._facts = None
        if self._memory.context_lost():
            self._closed = self._gone = True
            self._bytes = np.empty(0, np.uint8)

    def pin(self, device: int) -> None:
        """Populate the memory and register it with the driver. Idempotent.

        Where a step fails, the memory stays as it was, and unpinned.

        Parameters
        ----------
        device : int
            In whose context; every device can use it.

        Raises
        ------
        DriverNotFoundError, DriverError, HostMemoryError
            It cannot be pinned.
        """
        device = integer("device", device)
        if self.pinned and not self._forked:  # also while `close` waits for the caller
            return
        self.require_open()
        with self._pin_lock:
            self.require_open()
            if not self.pinned:
                require_device(driver(), device)
                if self._growth is not None:
                    self.wait_ready()
                self._prepare(device, fresh=False, extend=False)

    # use

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """Bytes of the memory as an array; it keeps the memory alive, also after `close`.

        Parameters
        ----------
        address, nbytes : int
            Which.

        Returns
        -------
        numpy.ndarray of uint8
            A view of them.

        Raises
        ------
        BoundsError
            They lie outside.
        ClosedError
            The memory was closed.
        """
        self.require_open()
        offset, nbytes = integer("address", address) - self.address, integer("nbytes", nbytes)
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise BoundsError(f"address {address:#x} with {nbytes} bytes lies outside the {self._noun}")
        return self._bytes[offset : offset + nbytes]

    @property
    def name(self) -> str | None:
        """Name of shared memory, for `attach`; else None."""
        return None if self._memory.segment is None else self._memory.segment.name

    def info(self) -> dict[str, object]:
        """Tell what was really obtained, and what became of it; sizes in bytes.

        ``huge_page_bytes`` and ``nodes`` are the kernel's own account, looked up once after each change of state (None
        where it gives none); ``degraded`` lists what was asked for and not obtained.

        Returns
        -------
        dict
            By name.
        """
        with self._lock:
            if self._facts is None and not self._closed and not self._forked:
                found = inspect_backing(self.address, self.nbytes)
                self._facts = found if self._growth is None or not self._growth.running else None
            else:
                found = self._facts or BackingInfo()
            allocated = self._memory.kind == "pinned" and not self._closed
            return {
                "pinned": self.pinned,
                "pinned_bytes": self.nbytes if allocated else sum(r.nbytes for r in self._memory.registrations),
                "huge_page_bytes": found.huge_bytes,
                "nodes": found.nodes,
                "ready_bytes": self._ready,
                "in_flight": len(self._uses),
                "closed": self._closed,
                **self._memory.account(),
                **preparation_account(self._preparation, self._growth),
            }

    # lifetime

    def _in_child(self) -> None:
        super()._in_child()
        growing = self._growth is not None and self._ready < self.nbytes
        self._forked |= growing or bool(self._memory.registrations) or self._memory.kind == "pinned"
        self._growth = None

    def close(self, timeout: float | None = 60.0) -> None:
        """Wait for the transfers that use the memory, unpin it, and drop it once no view needs it. Idempotent.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for transfers, with the GIL released; None: for ever.

        Raises
        ------
        TransferTimeoutError
            Transfers are still under way; names them. New ones are refused, the memory stays, and `close` can be
            called again.
        """
        with self._lock:
            if self._gone:
                return
            self._closed = True
        if self._forked or (not usable_here() and any(use.queue is not None for use in list(self._uses))):
            self._gone = True  # in a forked child all of it is the parent's
            return
        if self._growth is not None:
            self._growth.stop()
        self._wait_idle(timeout, f"the {self._noun} at {self.address:#x}")
        with self._pin_lock:
            if self._gone:
                return
            self._gone = True
            self._bytes = np.empty(0, np.uint8)
            if self._memory.segment is not None:
                self._memory.segment.unlink()
            memory = self._memory
            hidden = bool(memory.registrations)
            failures = memory.failures
            self._memory = memory.closed_copy()
            give_up(memory.registrations)
            if hidden:
                memory.hide_from_children(False)
            del memory  # where no view keeps it, it goes now
            if failures:
                raise failures[0]

    def require_open(self) -> None:
        """Raise an error where the memory cannot be used any more.

        Raises
        ------
        ClosedError
            It was closed.
        ForkError
            It was pinned by a parent process.
        """
        if self._closed:
            raise ClosedError(f"the {self._noun} is closed")
        if self._forked:
            raise ForkError(f"the {self._noun} was pinned, or growing, in a parent process, and does not survive fork")


def _in_child() -> None:
    """In a forked child: other threads are gone, and what was pinned is not there."""
    for buffer in list(_live):
        buffer._in_child()


fork.in_child(_in_child)
