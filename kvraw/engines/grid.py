"""Launches of a kernel with a block of its own: the event behind each, the status words, and what must outlive it."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from kvraw.engines.device_state import DeviceState, Upload, device_state
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import CudaDriver, driver
from kvraw.runtime.inflight import Completion
from kvraw.runtime.memory import PinnedBuffer
from kvraw.runtime.module import ArgumentBlock, Kernel

__all__ = ["Failed", "Launch", "Launches", "Operation", "capturing", "key_of"]

FAULT_BITS = 4  # of the status word's first part; the rest is one more than the place
_PAGE = 64  # pairs of status words that are looked at together
_CLEAR = bytes(16 * _PAGE)
_DEFAULT_STREAMS = (0, 1)  # they cannot be captured

Explain = Callable[[int, int, int], Exception]


class Operation:
    """Work that was enqueued on a GPU, or is done (CPU)."""

    __slots__ = ("_completions",)

    def __init__(self, *completions: Completion) -> None:
        self._completions = completions

    def done(self) -> bool:
        """Whether it is over; never waits."""
        return all(completion.done() for completion in self._completions)

    def wait(self) -> None:
        """Wait on the host until it is over, with the GIL released.

        Raises
        ------
        BoundsError, LayoutError
            The kernel met data that it could not work with; says what and where.
        """
        for completion in self._completions:
            completion.wait()
        for completion in self._completions:
            if completion.error is not None:
                raise completion.error

    def __and__(self, other: Operation) -> Operation:
        return Operation(*self._completions, *other._completions)


class Failed(Operation):
    """An operation that is over and found something."""

    __slots__ = ("_error",)

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def wait(self) -> None:
        """Raise what it found."""
        raise self._error


class _Ticket:
    """Two words of pinned memory that the kernel of one launch at a time writes when it meets bad data."""

    __slots__ = ("_at", "_free", "_words", "address", "completion", "launch")

    launch: Launch

    def __init__(self, words: memoryview[int], at: int, address: int, free: list[_Ticket]) -> None:
        self._words, self._at, self.address, self._free = words, at, address, free
        self.completion: Completion | None = None

    @property
    def written(self) -> bool:
        """Whether a kernel wrote; it may still be under way."""
        return self._words[self._at] != 0

    def read(self) -> Exception | None:
        """What the kernel found since the last time."""
        words, at = self._words, self._at
        where = words[at]
        if not where:
            return None
        launch = self.launch
        error = launch.explain(where & (1 << FAULT_BITS) - 1, (where >> FAULT_BITS) - 1, words[at + 1])
        words[at] = words[at + 1] = 0
        if launch.told is not None:
            launch.told(error)
        return error

    def give_back(self) -> Exception | None:
        """To the next launch; no kernel can write any more."""
        self._free.append(self)
        return None


class _Board:
    """The tickets of one device. What kernels wrote on them is seen without asking the driver."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = threading.RLock()
        self._pages: list[tuple[PinnedBuffer, memoryview[int]]] = []
        self._tickets: list[_Ticket] = []
        self.free: list[_Ticket] = []
        self.kept: list[Completion] = []  # of captures that nobody holds: nothing tells when the graph is gone

    def more(self) -> _Ticket:
        """A ticket where none is free; the device's context is current."""
        page = PinnedBuffer(len(_CLEAR), self._device)
        nbytes = (ctypes.c_uint8 * len(_CLEAR)).from_address(page.address)
        view = memoryview(nbytes).cast("B")
        view[:] = _CLEAR
        words = view.cast("Q")
        made = [_Ticket(words, 2 * k, page.device_address + 16 * k, self.free) for k in range(_PAGE)]
        with self._lock:
            self._pages.append((page, view))
            self._tickets += made
        self.free += made[1:]
        return made[0]

    def look(self) -> None:
        """Settle launches that are over and found something. No capture is in progress."""
        for _, page in self._pages:
            if page.tobytes() != _CLEAR:
                break
        else:
            return
        with DeviceScope(self._device):
            for ticket in self._tickets:
                completion = ticket.completion
                if ticket.written and completion is not None and completion.done():
                    completion.wait()  # takes up what a captured one reports


_lock = threading.RLock()
_boards: weakref.WeakKeyDictionary[CudaDriver, dict[int, _Board]] = weakref.WeakKeyDictionary()


def _board(device: int) -> _Board:
    with _lock:
        known = _boards.setdefault(driver(), {})
        return known.get(device) or known.setdefault(device, _Board(device))


def capturing(stream: int) -> bool:
    """Whether a capture is in progress on a stream."""
    return stream not in _DEFAULT_STREAMS and driver().stream_capturing(stream)


class Launch:
    """A kernel with its arguments, to be enqueued any number of times.

    Parameters
    ----------
    device : int
        Where it runs.
    kernel : Kernel
        The kernel.
    block : ArgumentBlock
        Its arguments; the field ``status`` is filled in at each launch.
    ctas, threads : int
        The grid.
    explain : callable
        The error for a status word: fault, place, value.
    addresses : tuple of str
        Fields that take the addresses of the tensors of a call.

    Attributes
    ----------
    told : callable or None
        Receives what the kernel finds where nobody waits for the operation.
    look : callable
        Takes up what earlier launches on the device found and nobody waits for; no capture may be in progress.
    """

    __slots__ = (
        "_addresses",
        "_block",
        "_board",
        "_ctas",
        "_handle",
        "_lock",
        "_params",
        "_state",
        "_status",
        "_threads",
        "_words",
        "device",
        "explain",
        "look",
        "owner",
        "told",
    )

    def __init__(
        self,
        device: int,
        kernel: Kernel,
        block: ArgumentBlock,
        ctas: int,
        threads: int,
        explain: Explain,
        addresses: tuple[str, ...] = (),
    ) -> None:
        self.device, self.explain, self.owner = device, explain, driver()
        self.told: Callable[[Exception], None] | None = None
        self._block, self._params, self._ctas, self._threads = block, block.address, ctas, threads
        fields = block.record.dtype.fields
        assert fields is not None
        self._words: memoryview[int] = memoryview(block.record.view("u1").data).cast("B").cast("Q")
        self._addresses = tuple(fields[name][1] // 8 for name in addresses)
        self._status = fields["status"][1] // 8
        self._lock = threading.RLock()
        self._board = _board(device)
        self.look = self._board.look
        with DeviceScope(device):
            self._state: DeviceState = device_state(device)
            self._handle = kernel.handle()

    def enqueue(
        self,
        stream: int,
        refs: tuple[object, ...],
        upload: Upload | None = None,
        then: Callable[[], None] | None = None,
    ) -> Operation:
        """Enqueue it on a stream as its block stands.

        Parameters
        ----------
        refs : tuple
            Kept until the kernel is over.
        upload : Upload, optional
            Buffers that the kernel reads from, given back once it is over.
        then : callable, optional
            Called once the kernel is over, or where it could not be enqueued.
        """
        with DeviceScope(self.device):
            after = functools.partial(_after, self._state, upload, then) if upload is not None or then else None
            return Operation(self.start(stream, (), capturing(stream), refs, after, upload is not None))

    def start(
        self,
        stream: int,
        tensors: tuple[Any, ...],
        captured: bool,
        refs: object = None,
        after: Callable[[], None] | None = None,
        enqueued: bool = False,
    ) -> Completion:
        """Enqueue it on a stream for tensors, whose addresses it takes.

        Tensors and `refs` are kept until it is over, and `after` is called then. `enqueued` says that the stream was
        given work for it before.
        """
        owner = self.owner
        if owner.context_device() != self.device:
            with DeviceScope(self.device):
                return self.start(stream, tensors, captured, refs, after, enqueued)
        books, board = self._state.books, self._board
        operation = books.begin(stream, captured=True) if captured else books.begin(stream)
        try:
            if enqueued:
                operation.enqueued.append(stream)
            if after is not None:
                operation.then(after)
            try:
                ticket = board.free.pop()
            except IndexError:
                ticket = board.more()
            ticket.launch = self
            operation.report(ticket.read)
            operation.then(ticket.give_back)
            with self._lock:
                words = self._words
                if tensors:
                    for at, tensor in zip(self._addresses, tensors):  # noqa: B905  # fewer, where a kernel takes two
                        words[at] = tensor.data_ptr()
                words[self._status] = ticket.address
                owner.launch(self._handle, self._ctas, self._threads, stream, self._params)
            operation.enqueued.append(stream)
            completion = operation.commit((tensors, refs))
        except BaseException:
            operation.abort()
            raise
        if not captured:
            ticket.completion = completion
        elif self.told is not None:  # nobody holds it
            ticket.completion = completion
            board.kept.append(completion)
        else:
            ticket.completion = None  # its holder asks it, and as long as the holder lives so does the ticket's use
        return completion


def _after(state: DeviceState, upload: Upload | None, then: Callable[[], None] | None) -> None:
    if upload is not None:
        state.give_upload(upload)
    if then is not None:
        then()


def key_of(options: object, a: Any, b: Any, c: Any = None, d: Any = None) -> tuple[Any, ...] | None:
    """What a launch for two or four torch tensors depends on, but for their addresses; None for other tensors."""
    try:
        # One tuple without a loop: a call for each tensor would take as long as all of this does.
        # fmt: off
        if c is None:
            return (
                options,
                a.shape, a.stride(), a.dtype, a.is_cuda, a.get_device(),
                b.shape, b.stride(), b.dtype, b.is_cuda, b.get_device(),
            )
        return (
            options,
            a.shape, a.stride(), a.dtype, a.is_cuda, a.get_device(),
            b.shape, b.stride(), b.dtype, b.is_cuda, b.get_device(),
            c.shape, c.stride(), c.dtype, c.is_cuda, c.get_device(),
            d.shape, d.stride(), d.dtype, d.is_cuda, d.get_device(),
        )
        # fmt: on
    except (AttributeError, TypeError):
        return None


class Launches:
    """Launches made for tensors, used again for tensors of the same shapes, strides, types and devices.

    Taking tensors in and checking them costs several times what a launch does.
    """

    MOST = 256

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Launch] = {}

    def get(self, key: tuple[Any, ...] | None) -> Launch | None:
        """The launch that was made for a key."""
        found = self._made.get(key) if key is not None else None
        return found if found is not None and found.owner is driver() else None

    def put(self, key: tuple[Any, ...] | None, launch: Launch) -> None:
        """Keep a launch, which must hold no tensor alive."""
        if key is not None:
            if len(self._made) >= self.MOST:
                self._made.clear()
            self._made[key] = launch
