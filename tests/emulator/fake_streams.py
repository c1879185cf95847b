"""Streams and events of the fake driver: work waits, and streams are served in an order drawn from a seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvraw.errors import DriverError

RESULTS = {
    "CUDA_ERROR_INVALID_VALUE": 1,
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_INVALID_CONTEXT": 201,
    "CUDA_ERROR_NO_BINARY_FOR_GPU": 209,
    "CUDA_ERROR_INVALID_PTX": 218,
    "CUDA_ERROR_JIT_COMPILER_NOT_FOUND": 221,
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": 222,
    "CUDA_ERROR_JIT_COMPILATION_DISABLED": 223,
    "CUDA_ERROR_INVALID_HANDLE": 400,
    "CUDA_ERROR_NOT_FOUND": 500,
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": 712,
    "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED": 713,
    "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
    "CUDA_ERROR_LAUNCH_FAILED": 719,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": 900,
}
LEGACY = (0, 1)


@dataclass
class _Ticket:
    """One recording of an event."""

    done: bool = False


@dataclass
class _Op:
    call: str
    work: Callable[[], None]
    after: _Ticket | None = None


@dataclass
class _Stream:
    device: int
    ops: deque[_Op] = field(default_factory=deque)
    capturing: bool = False


class FakeStreams:
    """The methods of the driver that make, order and wait for work."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rng = random.Random(seed)
        self._streams: dict[int, _Stream] = {s: _Stream(0) for s in LEGACY}
        self._gone: list[_Stream] = []
        self._events: dict[int, _Ticket | None] = {}
        self._event_devices: dict[int, int] = {}
        self._next = 0x1000

    def _here(self, call: str) -> int:
        raise NotImplementedError

    def _handle(self) -> int:
        self._next += 0x10
        return self._next

    def _error(self, name: str, call: str, detail: str = "", index: int | None = None) -> DriverError:
        return DriverError(name, RESULTS[name], call, detail, index)

    def _need(self, table: dict[int, Any], handle: int, call: str) -> Any:
        if handle not in table:
            raise self._error("CUDA_ERROR_INVALID_HANDLE", call, f"{handle:#x}")
        return table[handle]

    def _all(self) -> list[_Stream]:
        return [*self._streams.values(), *self._gone]

    def _step(self) -> bool:
        """Do the oldest operation of some stream that can go on; False where none can."""
        ready = [s for s in self._all() if s.ops and (s.ops[0].after is None or s.ops[0].after.done)]
        if not ready:
            return False
        self._rng.choice(ready).ops.popleft().work()
        return True

    def _until(self, over: Callable[[], bool], call: str) -> None:
        while not over():
            if not self._step():
                raise AssertionError(f"{call} would wait for ever")

    def _push(self, stream: int, call: str, work: Callable[[], None], after: _Ticket | None = None) -> None:
        found: _Stream = self._need(self._streams, stream, call)
        device = self._here(call)
        if stream not in LEGACY and found.device != device:
            raise self._error("CUDA_ERROR_INVALID_HANDLE", call, f"stream of device {found.device} on device {device}")
        found.ops.append(_Op(call, work, after))

    def stream_create(self) -> int:
        handle = self._handle()
        self._streams[handle] = _Stream(self._here("stream_create"))
        return handle

    def stream_destroy(self, stream: int) -> None:
        self._need(self._streams, stream, "stream_destroy")
        self._gone.append(self._streams.pop(stream))

    def stream_synchronize(self, stream: int) -> None:
        found: _Stream = self._need(self._streams, stream, "stream_synchronize")
        self._until(lambda: not found.ops, "stream_synchronize")

    def stream_wait_event(self, stream: int, event: int) -> None:
        ticket = self._need(self._events, event, "stream_wait_event")
        if ticket is not None:
            self._push(stream, "stream_wait_event", lambda: None, ticket)

    def stream_capturing(self, stream: int) -> bool:
        if stream in LEGACY:
            self._here("stream_capturing")  # the current context's
        return bool(self._need(self._streams, stream, "stream_capturing").capturing)

    def event_create(self, timing: bool = False) -> int:
        device = self._here("event_create")
        handle = self._handle()
        self._events[handle], self._event_devices[handle] = None, device
        return handle

    def event_destroy(self, event: int) -> None:
        self._need(self._events, event, "event_destroy")
        del self._events[event]

    def event_record(self, event: int, stream: int) -> None:
        self._need(self._events, event, "event_record")
        ticket = _Ticket()
        self._push(stream, "event_record", lambda: setattr(ticket, "done", True))
        self._events[event] = ticket

    def event_done(self, event: int) -> bool:
        ticket = self._need(self._events, event, "event_done")
        for _ in range(self._rng.randrange(4)):
            self._step()
        return ticket is None or ticket.done

    def event_synchronize(self, event: int) -> None:
        ticket = self._need(self._events, event, "event_synchronize")
        if ticket is not None:
            self._until(lambda: bool(ticket.done), "event_synchronize")

    def event_milliseconds(self, start: int, end: int) -> float:
        return 1.0
