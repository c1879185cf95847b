"""Copies by the copy engine as one operation in a stream's order, also where the batch call refuses that stream."""

from __future__ import annotations

from collections.abc import Callable

from kvraw.engines.device_state import DeviceState
from kvraw.runtime.inflight import Completion, Operation
from kvraw.runtime.stream import LEGACY

__all__ = ["in_order"]


def in_order(
    state: DeviceState,
    stream: int,
    work: Callable[[Operation, bool], object],
    *,
    pageable: bool = False,
    refs: object = None,
) -> Completion:
    """Have `work` enqueue copies as one operation, which takes its place in the order of a stream.

    The device's context is current.

    Parameters
    ----------
    stream : int
        The caller's. For the legacy default stream, which the batch call refuses, a stream of ours takes the copies.
    work : callable
        Given the operation, on whose stream it enqueues, and whether a capture is in progress.
    pageable : bool
        Pageable memory takes part, so that copies go one by one anyway.
    refs : object
        Kept alive until the copies are over.
    """
    capturing = state.owner.stream_capturing(stream)
    aside = stream in LEGACY and not capturing and not pageable
    operation = state.books.begin(state.side_stream("copy").handle if aside else stream, captured=capturing)
    try:
        if aside:
            operation.follow(stream)
        operation.enqueued.append(operation.stream)
        work(operation, capturing)
        completion = operation.commit(refs)
    except BaseException:
        operation.abort()
        raise
    if aside:
        completion.hold(stream)
    return completion
