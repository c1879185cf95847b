"""Records in stream order, with the time at which their stream got to them.

They are polled when they are drained, so that no driver thread runs Python.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from kvraw.runtime import fork
from kvraw.runtime.context import DeviceScope, tie
from kvraw.runtime.driver import CudaDriver, driver, driver_if, driver_or_none
from kvraw.runtime.stream import Stream

__all__ = ["DEFAULT_STREAMS", "Recorder", "TimedRecord"]

_log = logging.getLogger("kvraw")
_MOST = 65536  # records that wait to be drained; beyond it the oldest goes
DEFAULT_STREAMS = (0, 1, 2)  # the legacy default stream by both of its names, and that of the thread
_GOOD_SECONDS = 50e-6
_ANCHOR_SECONDS = 1.0  # two clocks part by some ten microseconds a second
_TRIES = 8


def _wall_offset() -> float:
    """Wall-clock time less monotonic time, from the tightest of several readings: any one may be interrupted."""
    readings = [(time.monotonic(), time.time(), time.monotonic()) for _ in range(16)]
    before, wall, after = min(readings, key=lambda r: r[2] - r[0])
    return wall - (before + after) / 2


_WALL = _wall_offset()  # one offset for the process: timestamps never step back with the clock


def _now() -> float:
    return _WALL + time.monotonic()


class _Anchor:
    """An event whose time the host knows; it lives as long as records are told by it."""

    def __init__(self, stream: Stream) -> None:
        d = driver()
        event = d.event_create(timing=True)
        before = _now()
        d.event_record(event, stream.handle)
        d.event_synchronize(event)
        after = _now()
        self.event, self.at, self.error = event, (before + after) / 2, after - before
        self.device = stream.device
        self._finalizer = weakref.finalize(self, _destroy, weakref.ref(d), stream.device, event)
        tie(self)

    def context_lost(self) -> None:
        """The event ended with its context."""
        self._finalizer.detach()


def _destroy(known: weakref.ref[CudaDriver], device: int, event: int) -> None:
    d = driver_if(known)
    if d is not None:
        with DeviceScope(device):
            d.event_destroy(event)


class _Clock:
    """A device's events as wall-clock times."""

    def __init__(self, device: int) -> None:
        self._stream, self.device, self.was_reset = Stream(device), device, False
        tie(self)
        self._last: dict[int, float] = {}
        self.anchor = self._measure()

    def context_lost(self) -> None:
        """The context was reset: no event of before can be asked about any more."""
        self.was_reset = True

    def _measure(self) -> _Anchor:
        # The first one of a process pays for what the driver does once, and any may be interrupted.
        best = _Anchor(self._stream)
        for _ in range(_TRIES - 1):
            if best.error <= _GOOD_SECONDS:
                break
            best = min(best, _Anchor(self._stream), key=lambda anchor: anchor.error)
        return best

    def refresh(self) -> None:
        """Measure anew where the anchor is old."""
        if _now() - self.anchor.at > _ANCHOR_SECONDS:
            self.anchor = self._measure()

    def when(self, stream: int, anchor: _Anchor, event: int) -> float:
        """When a stream got to an event; never before its last one."""
        at = anchor.at + driver().event_milliseconds(anchor.event, event) / 1000
        if len(self._last) > 1024:
            self._last.clear()
        at = self._last[stream] = max(at, self._last.get(stream, 0.0))
        return at


@dataclass(slots=True)
class TimedRecord:
    """A record: what it is, and in seconds since the epoch when its stream got to it.

    Attributes
    ----------
    value : tuple
        As it was given.
    at : float
        The time, never before that of the stream's record ahead of it.
    """

    order: int
    stream: int
    value: tuple[Any, ...]
    clock: _Clock | None = None
    anchor: _Anchor | None = None
    event: int = 0
    at: float = 0.0


class Recorder:
    """Records of one kind: first in, first out per stream."""

    def __init__(self) -> None:
        self._lock = fork.lock()
        self._queues: dict[tuple[int, int], deque[TimedRecord]] = {}
        self._ready: deque[TimedRecord] = deque()
        self._events: dict[int, list[int]] = {}
        self._clocks: dict[int, _Clock] = {}
        self._owner: CudaDriver | None = None
        self._order = itertools.count()

    def forget(self) -> None:
        """In a forked child: what waits to be drained is the parent's, and so are its events."""
        self._of(None)
        self._ready.clear()

    def record(self, stream: int, value: tuple[Any, ...], device: int = 0) -> None:
        """Take a record up when the stream gets to this point; of a default stream, that of `device`."""
        with self._lock:
            d = driver_or_none()
            if d is None:
                self._take_up(TimedRecord(next(self._order), stream, value, at=_now()))
                return
            self._of(d)
            if stream in DEFAULT_STREAMS:
                with DeviceScope(device):
                    self._enqueue(d, device, stream, value)
                return
            d.context_push(d.stream_context(stream))
            try:
                self._enqueue(d, d.context_device(), stream, value)
            finally:
                d.context_pop()

    def record_here(self, device: int, stream: int, value: tuple[Any, ...], *, anew: bool = True) -> None:
        """The same for a stream of a device whose context is current; `anew`: the clock may be measured anew."""
        with self._lock:
            d = driver()
            self._of(d)
            self._enqueue(d, device, stream, value, anew=anew)

    def _of(self, d: CudaDriver | None) -> None:
        """Forget what another driver was given."""
        if d is not self._owner:
            self._owner = d
            self._queues.clear()
            self._events.clear()
            self._clocks.clear()

    def _end_reset(self) -> None:
        """Forget what ended with contexts that were reset: nothing tells what their streams had got to."""
        for device, clock in list(self._clocks.items()):
            if clock.was_reset:
                queues = [self._queues.pop(key) for key in list(self._queues) if key[0] == device]
                self._events.pop(device, None)
                del self._clocks[device]
                if lost := sum(map(len, queues)):
                    _log.error("the context of device %d was reset: %d records are lost", device, lost)

    def _enqueue(self, d: CudaDriver, device: int, stream: int, value: tuple[Any, ...], *, anew: bool = True) -> None:
        if d.stream_capturing(stream):
            self._take_up(TimedRecord(next(self._order), stream, value, at=_now()))
            return
        clock = self._clocks.get(device)
        if clock is not None and clock.was_reset:
            self._end_reset()
            clock = None
        if clock is None:
            clock = self._clocks[device] = _Clock(device)
        if anew:
            clock.refresh()
        free = self._events.setdefault(device, [])
        event = free.pop() if free else d.event_create(timing=True)
        d.event_record(event, stream)
        queue = self._queues.setdefault((device, stream), deque())
        queue.append(TimedRecord(next(self._order), stream, value, clock, clock.anchor, event))
        if len(queue) % 256 == 0:
            self._poll()
        if len(queue) > _MOST:
            lost = queue.popleft()
            _log.error("a stream has %d records that it has not got to; %r is dropped", _MOST, lost.value[0])
            d.event_destroy(lost.event)

    def _take_up(self, record: TimedRecord) -> None:
        self._ready.append(record)
        if len(self._ready) > _MOST:
            lost = self._ready.popleft()
            _log.error("nobody drains %d records; %r is dropped", _MOST, lost.value[0])

    def _poll(self) -> None:
        """Take up what the streams got to, in the order of time."""
        found: list[TimedRecord] = []
        self._end_reset()
        try:
            with driver().relaxed():
                for (device, stream), queue in list(self._queues.items()):
                    with DeviceScope(device):
                        self._poll_one(queue, self._events.setdefault(device, []), found)
                    if not queue:
                        self._queues.pop((device, stream), None)
        finally:  # where the driver fails, what was found by then is not lost, nor what was not looked at
            for record in sorted(found, key=lambda r: (r.at, r.order)):
                self._take_up(record)

    @staticmethod
    def _poll_one(queue: deque[TimedRecord], events: list[int], found: list[TimedRecord]) -> None:
        while queue and driver().event_done(queue[0].event):
            record = queue[0]
            assert record.clock is not None
            assert record.anchor is not None
            record.at = record.clock.when(record.stream, record.anchor, record.event)
            queue.popleft()
            events.append(record.event)
            found.append(record)

    def drain(self) -> list[TimedRecord]:
        """What the streams got to since the last call."""
        with self._lock:
            if self._queues and driver_or_none() is self._owner:
                self._poll()
            out = list(self._ready)
            self._ready.clear()
        return out
