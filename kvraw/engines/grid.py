"""One launch of a kernel with a block of its own: the event behind it, the status word, and what must outlive it."""

from __future__ import annotations

from collections.abc import Callable

from kvraw.engines.device_state import DeviceState, Upload
from kvraw.runtime.inflight import Completion
from kvraw.runtime.module import ArgumentBlock, Kernel

__all__ = ["Operation", "enqueue"]

FAULT_BITS = 4  # of the status word's first part; the rest is one more than the place


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


def enqueue(
    state: DeviceState,
    stream: int,
    kernel: Kernel,
    block: ArgumentBlock,
    ctas: int,
    threads: int,
    explain: Callable[[int, int, int], Exception],
    refs: tuple[object, ...],
    upload: Upload | None = None,
    then: Callable[[], None] | None = None,
) -> Completion:
    """Launch a kernel on a stream; the device's context is current.

    Parameters
    ----------
    block : ArgumentBlock
        Its field ``status`` is filled in here; it is read during the call.
    explain : callable
        The error for a status word: fault, place, value.
    refs : tuple
        Kept until the kernel is over.
    upload : Upload, optional
        Buffers that the kernel reads from, given back once it is over.
    then : callable, optional
        Called once the kernel is over, before the error is worked out.
    """
    state.books.reap()
    event = state.books.take_event()
    status = None
    try:
        status = state.take_status()
        block.record["status"] = status.device_address
        kernel.launch(ctas, threads, stream, block)
    except BaseException:
        # The kernel does not run. A copy to `upload` may: it is dropped, and freeing it waits.
        state.books.give_event(event)
        if status is not None:
            state.give_status(status)
        raise

    def settle() -> Exception | None:
        where, value = int(status.values[0]), int(status.values[1])
        state.give_status(status)
        if upload is not None:
            state.give_upload(upload)
        if then is not None:
            then()
        return explain(where & (1 << FAULT_BITS) - 1, (where >> FAULT_BITS) - 1, value) if where else None

    return state.books.open(event, stream, refs, settle)
