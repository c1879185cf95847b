"""Makes memory ready from its beginning on: populated by threads, registered behind them, all or none."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable

from kvraw.errors import DriverError
from kvraw.runtime.host import backing
from kvraw.runtime.host.mapping import HostMapping
from kvraw.runtime.host.populate import Populator, interpreter_ends
from kvraw.runtime.host.registration import Registration, give_up

__all__ = ["BackgroundGrowth", "PopulateAndRegister", "preparation_account"]

_log = logging.getLogger("kvraw")


class PopulateAndRegister:
    """Populates memory, and registers each step while the next ones are being populated.

    Parameters
    ----------
    memory : HostMapping
        The memory.
    device : int or None
        Device in whose context it is registered; None: it is populated only.
    first, step : int
        Bytes of the first registration, and of the others.
    alone : bool
        Populate what the first step needs, and nothing beside it: somebody waits for just that.
    threads : int
        That populate; 0: the memory is backed already, or backs itself as it is registered.
    fresh : bool
        Nobody uses the memory yet.

    Attributes
    ----------
    populate_seconds, register_seconds : float
        Time spent waiting for pages, and registering.
    """

    def __init__(
        self,
        memory: HostMapping,
        device: int | None,
        *,
        first: int,
        step: int,
        threads: int,
        fresh: bool,
        alone: bool = False,
    ) -> None:
        if threads and not memory.kind.startswith("huge-"):  # explicit huge pages have limits of their own
            backing.require_memory(memory.nbytes)
        self._memory: HostMapping | None = memory
        self._nbytes, self._device = memory.nbytes, device
        self._first, self._step = min(first, step), step
        self._threads, self._fresh, self._alone = threads, fresh, alone
        self.populate_seconds = self.register_seconds = 0.0
        self.reached = 0
        self._populator: Populator | None = None
        self._span = (0, 0)  # what the populator is for

    def _populate(self, memory: HostMapping, end: int) -> None:
        if not self._threads:
            return
        if self._populator is None:
            self._span = start, last = self.reached, end if self._alone and not self.reached else self._nbytes
            self._populator = Populator(
                memory.address + start, last - start, threads=self._threads, fresh=self._fresh, owner=memory
            )
        self._populator.wait_for(end - self._span[0])
        if end == self._span[1]:
            self._populator.stop()
            self._populator = None

    @property
    def over(self) -> bool:
        """True where all is ready."""
        return self.reached == self._nbytes

    def advance(self) -> Registration | None:
        """Make the next step ready; its registration, where there is a device.

        Raises
        ------
        HostMemoryError, DriverError
            It cannot be; what was ready before stays so.
        """
        memory = self._memory
        assert memory is not None
        start, size = self.reached, self._step if self.reached else self._first
        end = min(start + size, self._nbytes)
        begin = time.perf_counter()
        self._populate(memory, end)
        middle = time.perf_counter()
        registration = None
        if self._device is not None:
            address = memory.address + start
            nbytes = end - start
            registration = Registration(address, nbytes, self._device, nbytes, foreign=not memory.owned)
            if memory.shift is None:
                memory.shift = registration.device_address - address
            elif registration.device_address - address != memory.shift:
                registration.close()
                raise DriverError("CUDA_ERROR_NOT_MAPPED", 211, "cuMemHostGetDevicePointer", "pieces lie apart")
        self.populate_seconds += middle - begin
        self.register_seconds += time.perf_counter() - middle
        self.reached = end
        return registration

    def complete(self, report: Callable[[int], None]) -> list[Registration]:
        """Make all of it ready, or nothing; the registrations.

        Parameters
        ----------
        report : callable
            Called with the bytes that are ready, after each step.
        """
        memory, made = self._memory, list[Registration]()
        assert memory is not None
        try:
            while not self.over:
                registration = self.advance()
                if registration is not None:
                    made.append(registration)
                report(self.reached)
        except BaseException:
            self.stop()
            with contextlib.suppress(RuntimeError):  # the first error is the one to tell
                give_up(made)
            memory.shift = None
            raise
        self.stop()
        return made

    def stop(self) -> None:
        """End the threads, and let go of the memory. Idempotent."""
        if self._populator is not None:
            self._populator.stop()
            self._populator = None
        self._memory = None


class BackgroundGrowth:
    """Goes on with a preparation in a thread of its own, until it is over, fails or is stopped.

    Parameters
    ----------
    preparation : Preparation
        Of which the first step is done.
    publish : weakref.WeakMethod
        Called after each step with its registration. The growth ends where its object is gone, or where it raises.
    """

    def __init__(
        self, preparation: PopulateAndRegister, publish: weakref.WeakMethod[Callable[[Registration | None], None]]
    ) -> None:
        self._preparation, self._publish = preparation, publish
        self._stopping = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvraw-grow")

    @classmethod
    def start(
        cls, preparation: PopulateAndRegister, publish: weakref.WeakMethod[Callable[[Registration | None], None]]
    ) -> BackgroundGrowth | None:
        """Begin; None where no thread is to be had."""
        self = cls(preparation, publish)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError):
            return None
        return self

    @property
    def running(self) -> bool:
        """True while it goes on."""
        return self._thread.is_alive()

    def _run(self) -> None:
        preparation = self._preparation
        try:
            while not preparation.over and not self._stopping.is_set() and not interpreter_ends():
                registration = preparation.advance()
                publish = self._publish()
                if publish is None:
                    if registration is not None:
                        registration.close()
                    return
                publish(registration)
                del publish, registration  # or this thread would keep the buffer until the next step is done
        except BaseException as error:
            # Its frames would keep the memory.
            self.error = error.with_traceback(None)
            if not self._stopping.is_set() and not interpreter_ends():
                _log.warning("host memory stopped growing at %d bytes: %s", preparation.reached, error)
        finally:
            preparation.stop()

    def stop(self) -> None:
        """End it, and wait for the step under way."""
        self._stopping.set()
        self.join(None)

    def join(self, timeout: float | None) -> bool:
        """Wait until it is over; whether it is."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()


def preparation_account(preparation: PopulateAndRegister | None, growth: BackgroundGrowth | None) -> dict[str, object]:
    """The part of `HostBuffer.info` on a preparation."""
    return {
        "growing": growth is not None and growth.running,
        "growth_error": None if growth is None or growth.error is None else str(growth.error),
        "populate_seconds": None if preparation is None else preparation.populate_seconds,
        "register_seconds": None if preparation is None else preparation.register_seconds,
    }
