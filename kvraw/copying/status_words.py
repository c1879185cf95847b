"""Status words: where kernels report bad data; read without asking the driver."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Protocol

from kvraw.runtime import fork
from kvraw.runtime.completion import Completion, Operation
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.memory import PinnedBuffer

__all__ = ["FaultDescriber", "StatusPages", "StatusSlot", "once"]

_PAGE = 64  # pairs of status words that are looked at together
_PAGES = 16  # made at once: a graph keeps one pair for each launch in it, and a capture is no time to make memory
_CLEAR = bytes(16 * _PAGE)


def once(sink: Callable[[Exception], None]) -> Callable[[Exception], None]:
    """A sink for the errors of several launches of one operation, that passes on the first alone."""
    left = [sink]

    def take(error: Exception) -> None:
        with contextlib.suppress(IndexError):
            left.pop()(error)

    return take


class FaultDescriber(Protocol):
    """What a kernel's words are given to."""

    def describe_fault(self, where: int, value: int, origin: int) -> Exception:
        """The error for the two words of a slot, and its `origin`."""


class StatusSlot:
    """Two words of pinned memory that the kernel of one launch at a time writes when it meets bad data.

    Attributes
    ----------
    address : int
        Of the two words, as the device sees them.
    page : int
        Which of the pages they are on.
    describer : FaultDescriber
        What the words are given to.
    origin : int
        For the describer's own use.
    on_error : callable or None
        Receives the error as well, where nobody waits for the launch.
    completion : Completion, optional
        The launch's, which settles it; None for one that was captured: its words count at once.
    """

    __slots__ = ("_at", "_free", "_words", "address", "completion", "describer", "on_error", "origin", "page")

    describer: FaultDescriber
    completion: Completion | None

    def __init__(self, words: memoryview[int], at: int, address: int, page: int, free: list[StatusSlot]) -> None:
        self._words, self._at, self.address, self.page, self._free = words, at, address, page, free
        self.origin = 0
        self.completion = None
        self.on_error: Callable[[Exception], None] | None = None

    @property
    def written(self) -> bool:
        """Whether a kernel wrote; it may still be under way."""
        return self._words[self._at] != 0

    def read(self) -> Exception | None:
        """The error that the kernel reported since the last call."""
        words, at = self._words, self._at
        where = words[at]
        if not where:
            return None
        value = words[at + 1]
        words[at] = words[at + 1] = 0
        error = self.describer.describe_fault(where, value, self.origin)
        if self.on_error is not None:
            self.on_error(error)
        return error

    def finish(self) -> Exception | None:
        """Read it, and give it back: the launch is over."""
        error = self.read() if self._words[self._at] else None
        self.completion = self.on_error = None
        self._free.append(self)
        return error

    def give_back(self) -> Exception | None:
        """To the next launch, cleared: what nobody read is lost. No kernel can write any more."""
        self.completion = self.on_error = None
        self._words[self._at] = self._words[self._at + 1] = 0
        self._free.append(self)
        return None


class StatusPages:
    """The status slots of one device."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = fork.lock()
        self._blocks: list[PinnedBuffer] = []
        self._pages: list[memoryview[int]] = []
        self._slots: list[StatusSlot] = []
        self._free: list[StatusSlot] = []
        self._used = 0  # pages from the first on that hold all slots ever taken

    def take(
        self,
        operation: Operation,
        describer: FaultDescriber,
        origin: int = 0,
        on_error: Callable[[Exception], None] | None = None,
    ) -> int:
        """Address of a cleared slot for a launch of an operation, which reads it; the device's context is current."""
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._more()
        if slot.page >= self._used:
            self._used = slot.page + 1
        slot.describer, slot.origin, slot.on_error = describer, origin, on_error
        if operation.captured:
            operation.add_check(slot.read)
            operation.on_done(slot.give_back)
        else:
            operation.on_done(slot.finish)
            slot.completion = operation
        if on_error is not None:
            operation.handled = True
        return slot.address

    def get_ready(self) -> None:
        """Have slots at hand; the device's context is current."""
        if not self._free:
            self._free.append(self._more())

    def _more(self) -> StatusSlot:
        size = len(_CLEAR)
        block = PinnedBuffer(size * _PAGES, self._device)
        view = memoryview((ctypes.c_uint8 * (size * _PAGES)).from_address(block.address)).cast("B")
        view[:] = bytes(size * _PAGES)
        words = view.cast("Q")
        with self._lock:
            first = len(self._pages)
            made = [
                StatusSlot(words, 2 * k, block.device_address + 16 * k, first + k // _PAGE, self._free)
                for k in range(_PAGE * _PAGES)
            ]
            self._blocks.append(block)
            self._pages += [view[size * k : size * (k + 1)] for k in range(_PAGES)]
            self._slots += made
        # What was given back last is taken first, and new ones in their order: so few pages are in use.
        self._free[:0] = reversed(made[1:])
        return made[0]

    def written(self) -> bool:
        """Whether a kernel wrote something that nobody read; asks the driver nothing."""
        for page in self._pages[: self._used]:  # noqa: SIM110  # a generator costs as much again
            if page.tobytes() != _CLEAR:
                return True
        return False

    def poll(self) -> None:
        """Read the words of launches that are over and that nobody waits for. No capture is in progress."""
        if not self.written():
            return
        with DeviceScope(self._device):
            for slot in self._slots:
                if slot.on_error is None or not slot.written:
                    continue
                completion = slot.completion
                if completion is not None:
                    completion.done()
                    continue
                with self._lock:  # of a graph: nothing but this reads it
                    slot.read()
