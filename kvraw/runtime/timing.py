"""Time that work takes: on a stream, by events around several calls in a row, and on the host."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvraw.runtime.driver import driver

__all__ = ["QUICK", "Pace", "host_seconds", "stream_seconds", "wall_seconds"]

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Pace:
    """Repetitions of a measurement.

    Attributes
    ----------
    calls, rounds : int
        Fewest calls in a row between two events; most repeats, of which the median counts.
    seconds, least : float
        About the most time of one measurement, and the least time between two events.
    """

    calls: int = 4
    rounds: int = 9
    seconds: float = 0.12
    least: float = 0.004

    def plan(self, one: float) -> tuple[int, int]:
        """Calls in a row and rounds, for work of which one call takes `one` seconds."""
        one = max(one, 1e-6)
        calls = max(self.calls if one * self.calls < self.seconds else 1, min(64, math.ceil(self.least / one)))
        return calls, max(min(3, self.rounds), min(self.rounds, int(self.seconds / (one * calls))))


QUICK = Pace(calls=1, rounds=1, seconds=0.0, least=0.0)


def stream_seconds(work: Work, stream: int, pace: Pace, *others: int) -> float:
    """Median time that a stream takes for one call of `work`; the device's context is current.

    The clock starts behind one call more, so that the host is ahead of the stream when it does: what the host takes to
    enqueue shows only where the stream waits for it.

    Parameters
    ----------
    work : callable
        Enqueues on the stream, and on `others`.
    stream : int
        The stream whose time is taken.
    pace : Pace
        How often.
    *others : int
        Streams that take part: they start with `stream`, and it waits for them at the end.
    """
    d = driver()
    start, end = d.event_create(timing=True), d.event_create(timing=True)
    fences = [d.event_create() for _ in others]
    try:
        for _ in range(2):
            begin = time.perf_counter()
            work()
            for one in (stream, *others):
                d.stream_synchronize(one)
        calls, rounds = pace.plan(time.perf_counter() - begin)
        times = []
        for _ in range(rounds):
            work()
            d.event_record(start, stream)
            for other in others:
                d.stream_wait_event(other, start)
            for _ in range(calls):
                work()
            for other, fence in zip(others, fences, strict=True):
                d.event_record(fence, other)
                d.stream_wait_event(stream, fence)
            d.event_record(end, stream)
            d.event_synchronize(end)
            times.append(d.event_milliseconds(start, end) / 1e3 / calls)
        return statistics.median(times)
    finally:
        for event in (start, end, *fences):
            d.event_destroy(event)


def host_seconds(work: Work, before: Work, pace: Pace, most: int = 100, every: int = 1) -> float:
    """Median host time of one call of `work`, `before` called ahead of each and not timed.

    `every` > 1: `before` is called ahead of every so many calls, and the first behind it is not counted; the processor
    is awake and its caches hold what a call needs.
    """
    times = []
    for at in range(1 + (most if pace.rounds > 1 else 1) * every):
        if at % every == 0:
            before()
            if every > 1:
                work()
        begin = time.perf_counter()
        work()
        if at:
            times.append(time.perf_counter() - begin)
    before()
    return statistics.median(times)


def wall_seconds(work: Work, pace: Pace) -> float:
    """Median time of one call of work that is done when it returns."""
    work()
    begin = time.perf_counter()
    work()
    _, rounds = pace.plan(time.perf_counter() - begin)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
