"""What kernels of earlier calls found in data that only the GPU sees: the next call on the device raises it."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict, deque
from collections.abc import Callable

from kvraw.engines.board import Board

__all__ = ["raise_found", "teller"]

_log = logging.getLogger("kvraw")
_found: defaultdict[int, deque[Exception]] = defaultdict(deque)


@functools.cache
def teller(device: int) -> Callable[[Exception], None]:
    """What takes such an error of an operation that nobody waits for; it is logged as well."""
    queue = _found[device]

    def tell(error: Exception) -> None:
        _log.error("an earlier operation on device %s: %s", device, error)
        queue.append(error)

    return tell


def raise_found(device: int, board: Board) -> None:
    """Raise the oldest, as the driver does with its own asynchronous errors. No capture is in progress."""
    board.look()
    queue = _found[device]
    if queue:
        try:
            error = queue.popleft()
        except IndexError:  # another thread took it
            return
        raise error
