"""Launches of a kernel with a block of its own: the event behind each, the status word, and what must outlive it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from kvraw.arrays import fingerprint
from kvraw.engines.device_state import DeviceState, StatusWord, Upload, device_state
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.inflight import Completion
from kvraw.runtime.module import ArgumentBlock, Kernel

__all__ = ["Launch", "Launches", "Operation"]

FAULT_BITS = 4  # of the status word's first part; the rest is one more than the place

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
    """

    __slots__ = ("_block", "_grid", "_kernel", "_lock", "_long", "_state", "_status", "device", "explain")

    def __init__(
        self, device: int, kernel: Kernel, block: ArgumentBlock, ctas: int, threads: int, explain: Explain
    ) -> None:
        self.device, self.explain = device, explain
        self._kernel, self._block, self._grid = kernel, block, (ctas, threads)
        fields = block.record.dtype.fields
        assert fields is not None
        self._long, self._status = block.record.view(np.uint64), fields["status"][1] // 8
        self._lock = threading.Lock()
        with DeviceScope(device):
            self._state = device_state(device)

    @property
    def usable(self) -> bool:
        """Whether the driver is still the one that it was made with."""
        return self._state.owner is driver()

    def enqueue(
        self,
        stream: int,
        refs: tuple[object, ...],
        upload: Upload | None = None,
        then: Callable[[], None] | None = None,
    ) -> Operation:
        """Enqueue it on a stream.

        Parameters
        ----------
        refs : tuple
            Kept until the kernel is over.
        upload : Upload, optional
            Buffers that the kernel reads from, given back once it is over.
        then : callable, optional
            Called once the kernel is over, or where it could not be enqueued.
        """
        state = self._state
        with DeviceScope(self.device):
            operation = state.books.begin(stream)
            try:
                status = state.take_status()
                operation.report(functools.partial(_report, status, self.explain))
                operation.then(functools.partial(_give_back, state, status, upload, then))
                with self._lock:
                    self._long[self._status] = status.device_address
                    if upload is not None:
                        operation.enqueued.append(stream)  # its copy was
                    self._kernel.launch(*self._grid, stream, self._block)
                operation.enqueued.append(stream)
            except BaseException:
                operation.abort()
                raise
            return Operation(operation.commit(refs))


def _report(status: StatusWord, explain: Explain) -> Exception | None:
    where, value = status.values.tolist()
    status.values[:] = 0
    return explain(where & (1 << FAULT_BITS) - 1, (where >> FAULT_BITS) - 1, value) if where else None


def _give_back(
    state: DeviceState, status: StatusWord, upload: Upload | None, then: Callable[[], None] | None
) -> Exception | None:
    state.give_status(status)
    if upload is not None:
        state.give_upload(upload)
    if then is not None:
        then()
    return None


class Launches:
    """Launches made for tensors, used again for tensors of the same addresses, shapes and types.

    Taking tensors in and checking them costs several times what a launch does.
    """

    MOST = 256

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Launch] = {}

    def get(
        self, options: tuple[object, ...], tensors: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...] | None, Launch | None]:
        """The key of a call (None: it has none), and the launch that was made for it."""
        key = (options, *[fingerprint(tensor) for tensor in tensors])
        if None in key:
            return None, None
        found = self._made.get(key)
        return key, found if found is not None and found.usable else None

    def put(self, key: tuple[Any, ...] | None, launch: Launch) -> None:
        """Keep a launch, which must hold no tensor alive."""
        if key is not None:
            if len(self._made) >= self.MOST:
                self._made.clear()
            self._made[key] = launch
