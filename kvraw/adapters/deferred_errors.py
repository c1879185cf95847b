"""What kernels of earlier calls found in data that only the GPU sees: the next call on the device raises it."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict, deque
from collections.abc import Callable

from kvraw.copying.device_state import DeviceState, device_state
from kvraw.copying.status_words import once
from kvraw.runtime.context import DeviceScope, at_reset
from kvraw.runtime.stream import LEGACY

__all__ = ["Sink", "discard", "error_sink", "pending", "pending_of", "raise_deferred", "raise_pending"]

Sink = Callable[[Exception], None]

_log = logging.getLogger("kvraw")
_found: defaultdict[int, deque[Exception]] = defaultdict(deque)


def _forget() -> None:
    """What kernels met in a context that is gone concerns nobody."""
    for queue in _found.values():
        queue.clear()


at_reset(_forget)


@functools.cache
def pending_of(device: int) -> Callable[[Exception], None]:
    """What takes such an error of an operation that nobody waits for."""
    return _found[device].append


def error_sink(device: int, captured: bool) -> Sink:
    """The same for an operation of several launches, which counts as one error; of a graph each launch counts."""
    return pending_of(device) if captured else once(pending_of(device))


def discard(error: Exception) -> None:
    """Takes an error that another copy of the same operation tells as well."""


def pending(state: DeviceState) -> bool:
    """Whether `raise_deferred` may have something to raise; asks the driver nothing."""
    return bool(_found[state.device]) or state.status.written()


def raise_pending(state: DeviceState, stream: int) -> bool:
    """Raise the oldest, and log it, as the driver does with its own asynchronous errors. The context is current.

    Returns whether a capture is in progress on the stream: then nothing is raised.
    """
    if stream not in LEGACY and state.owner.stream_capturing(stream):
        return True
    if not pending(state):
        return False
    state.status.poll()
    queue = _found[state.device]
    if queue:
        try:
            error = queue.popleft()
        except IndexError:  # another thread took it
            return False
        _log.error("an earlier operation on device %s: %s", state.device, error)
        raise error
    return False


def raise_deferred(device: int, stream: int) -> bool:
    """The same for those in whose thread the device's context may not be current."""
    with DeviceScope(device):
        return raise_pending(device_state(device), stream)
