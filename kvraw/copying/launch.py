"""Launches of a kernel with a block of its own: the event behind each, the status words, and what must outlive it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from kvraw.copying.device_state import DeviceState, Upload, device_state
from kvraw.copying.transfer import Transfer
from kvraw.memo import Memo
from kvraw.runtime import fork
from kvraw.runtime.completion import Completion
from kvraw.runtime.context import DeviceScope, note_error
from kvraw.runtime.driver import driver
from kvraw.runtime.module import ArgumentBlock, Kernel
from kvraw.runtime.stream import capturing

__all__ = ["Launch", "LaunchCache", "key_of"]

FAULT_BITS = 4  # of the status word's first part; the rest is one more than the place

Explain = Callable[[int, int, int], Exception]


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
    on_error : callable or None
        Receives what the kernel finds where nobody waits for the operation.
    """

    __slots__ = (
        *("_addresses", "_block", "_ctas", "_handle", "_kernel", "_lock", "_params", "_state", "_status"),
        *("_status_pages", "_threads", "_words", "device", "explain", "on_error", "owner"),
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
        self.on_error: Callable[[Exception], None] | None = None
        self._block, self._params, self._ctas, self._threads = block, block.address, ctas, threads
        fields = block.record.dtype.fields
        assert fields is not None
        self._words: memoryview[int] = memoryview(block.record.view("u1").data).cast("B").cast("Q")
        self._addresses = tuple(fields[name][1] // 8 for name in addresses)
        self._status = fields["status"][1] // 8
        self._lock = fork.lock()
        self._kernel = kernel
        with DeviceScope(device):
            self._bind()

    def _bind(self) -> None:
        """Take the kernel and the state of the current context."""
        self._state: DeviceState = device_state(self.device)
        self._handle = self._kernel.handle()
        self._status_pages = self._state.status

    def describe_fault(self, where: int, value: int, origin: int) -> Exception:
        """The error for what the kernel wrote."""
        return self.explain(where & (1 << FAULT_BITS) - 1, (where >> FAULT_BITS) - 1, value)

    def enqueue(
        self,
        stream: int,
        refs: tuple[object, ...],
        upload: Upload | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> Transfer:
        """Enqueue it on a stream as its block stands.

        Parameters
        ----------
        refs : tuple
            Kept until the kernel is over.
        upload : Upload, optional
            Buffers that the kernel reads from, given back once it is over.
        on_done : callable, optional
            Called once the kernel is over, or where it could not be enqueued.
        """
        with DeviceScope(self.device):
            after = functools.partial(_after, self._state, upload, on_done) if upload is not None or on_done else None
            captured = capturing(stream, self.device)
            # What `on_done` gives back may be in use by work that was enqueued ahead of this.
            return self.run(stream, (), captured, refs, after, upload is not None or on_done is not None)

    def run(self, stream: int, *args: Any) -> Transfer:
        """`start`, for the caller of an operation."""
        return Transfer((self.start(stream, *args),), "kernel", self.device)

    def start(
        self,
        stream: int,
        tensors: tuple[Any, ...],
        captured: bool,
        refs: object = None,
        after: Callable[[], None] | None = None,
        enqueued: bool = False,
        values: Sequence[int] = (),
    ) -> Completion:
        """Enqueue it on a stream for tensors, whose addresses it takes, or for these addresses.

        Tensors and `refs` are kept until it is over, and `after` is called then. `enqueued` says that the stream was
        given work for it before.
        """
        owner = self.owner
        if owner.context_device() != self.device:
            with DeviceScope(self.device):
                return self.start(stream, tensors, captured, refs, after, enqueued, values)
        if self._state.was_reset:
            self._bind()
        completions, status_pages = self._state.completions, self._status_pages
        operation = completions.begin(stream, captured=True) if captured else completions.begin(stream)
        try:
            if enqueued:
                operation.enqueued.append(stream)
            if after is not None:
                operation.on_done(after)
            status = status_pages.take(operation, self, 0, self.on_error)
            with self._lock:
                words = self._words
                if tensors:
                    for at, tensor in zip(self._addresses, tensors):  # noqa: B905  # fewer, where a kernel takes two
                        words[at] = tensor.data_ptr()
                elif values:
                    for at, value in zip(self._addresses, values):  # noqa: B905
                        words[at] = value
                words[self._status] = status
                owner.launch(self._handle, self._ctas, self._threads, stream, self._params)
            operation.enqueued.append(stream)
            return operation.commit((tensors, refs))
        except BaseException as error:
            operation.abort()
            note_error(error, self.device)
            raise


def _after(state: DeviceState, upload: Upload | None, on_done: Callable[[], None] | None) -> None:
    if upload is not None:
        state.give_upload(upload)
    if on_done is not None:
        on_done()


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


class LaunchCache:
    """Launches made for tensors, used again for tensors of the same shapes, strides, types and devices.

    Taking tensors in and checking them costs several times what a launch does.
    """

    def __init__(self) -> None:
        self._made: Memo[tuple[Any, ...], Launch] = Memo(256)

    def get(self, key: tuple[Any, ...] | None) -> Launch | None:
        """The launch that was made for a key."""
        found = self._made.get(key) if key is not None else None
        return found if found is not None and found.owner is driver() else None

    def put(self, key: tuple[Any, ...] | None, launch: Launch) -> None:
        """Keep a launch, which must hold no tensor alive."""
        if key is not None:
            self._made.keep(key, launch)
