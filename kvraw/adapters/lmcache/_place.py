"""Where a call happens: its device, its stream, and what earlier calls on that device have to report."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from kvraw.adapters.found import raise_found
from kvraw.engines.grid import Operation
from kvraw.errors import BoundsError, LayoutError
from kvraw.prepared import Copy
from kvraw.runtime import fork
from kvraw.runtime.context import DeviceScope, at_reset, current_device
from kvraw.runtime.driver import driver_or_none
from kvraw.runtime.inflight import Captured, Completion
from kvraw.transfer_plan import Transfer

__all__ = ["current_stream", "device_index", "raise_seen", "tensor_device", "this_device", "watch"]

_log = logging.getLogger("kvraw")
_watched: defaultdict[int, deque[Transfer | Copy | Operation]] = defaultdict(deque)
_captured: defaultdict[int, deque[Completion]] = defaultdict(deque)
at_reset(_captured.clear)
_LOOKS = 8  # captured copies that a call looks at, in turn: graphs may hold thousands
_lock = fork.lock()
_raw_stream: Callable[[int], int] | None = None
_indices: dict[Any, int | None] = {}  # of devices that were named by something other than a number


def _torch_cuda() -> Any:
    """Torch's CUDA part where it is in use, else None."""
    torch: Any = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def this_device() -> int:
    """The current device: torch's where it is in use, else the current context's, else 0."""
    cuda = _torch_cuda()
    if cuda is not None:
        return int(cuda.current_device())
    found = current_device() if driver_or_none() is not None else None
    return 0 if found is None else found


def device_index(device: Any) -> int | None:
    """Number of a CUDA device, or None for the host; takes a torch device, its text, or a number."""
    if type(device) is int:
        return device
    try:
        return _indices[device]
    except (KeyError, TypeError):
        pass
    if device is None:
        return this_device()
    kind, index = getattr(device, "type", None), getattr(device, "index", None)
    if kind is None:
        kind, _, text = str(device).partition(":")
        index = int(text) if text else None
    if kind not in ("cpu", "cuda"):
        raise TypeError(f"device is {device}, must be a CUDA device or the CPU")
    if kind == "cpu":
        found = None
    elif index is None:
        return this_device()
    else:
        found = int(index)
    with contextlib.suppress(TypeError):  # what has no hash is read anew each time
        _indices[device] = found
    return found


def tensor_device(tensor: Any) -> int | None:
    """Device that holds a tensor; None for the host."""
    return device_index(tensor.device)


def current_stream(device: int) -> int:
    """The caller's current stream on a device: torch's, or the default stream where torch is not in use."""
    global _raw_stream
    if _raw_stream is None:
        cuda = _torch_cuda()
        if cuda is None:
            return 0
        # The handle alone, without a stream object around it, where this torch offers that.
        found = getattr(sys.modules["torch"]._C, "_cuda_getCurrentRawStream", None)
        _raw_stream = found or (lambda at: cuda.current_stream(at).cuda_stream)
    return int(_raw_stream(device))


def watch(device: int, copy: Transfer | Copy | Operation, unseen: bool = True) -> None:
    """Remember a copy that nobody waits for where only the device has seen its ids, replays of a captured one too."""
    completion: Completion | None = getattr(copy, "_completion", None)
    if unseen and type(completion) is Captured:
        _captured[device].append(completion)
    elif unseen:
        _watched[device].append(copy)


def raise_seen(device: int, stream: int) -> bool:
    """Raise what earlier calls on a device met, as the driver does with its own asynchronous errors.

    Returns whether a capture is in progress on the stream: then nothing is raised.
    """
    if raise_found(device, stream):
        return True
    queue, captured = _watched.get(device), _captured.get(device)
    if queue or captured:
        with DeviceScope(device):
            _raise_watched(device, queue or deque(), bool(captured))
    return False


def _raise_watched(device: int, queue: deque[Transfer | Copy | Operation], captured: bool) -> None:
    if captured:
        _look_at_replays(device)
    while queue:
        with _lock:
            if not queue or not queue[0].done():
                return
            copy = queue.popleft()
        try:
            copy.wait()
        except (BoundsError, LayoutError) as error:
            _log.error("an earlier transfer on device %s: %s", device, error)
            raise


def _look_at_replays(device: int) -> None:
    """Raise what a replay of a captured copy met."""
    queue = _captured[device]
    for _ in range(min(len(queue), _LOOKS)):
        with _lock:
            replayed = queue[0]
            queue.rotate(-1)
            replayed.wait()  # for nothing: takes up what replays reported
            error = replayed.error
        if error is not None:
            _log.error("a replay of a transfer on device %s: %s", device, error)
            raise error
