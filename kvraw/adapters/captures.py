"""What a CUDA graph uses, where the operation that was captured returns nothing that would hold it."""

from __future__ import annotations

from kvraw.engines.device_state import device_state
from kvraw.runtime.inflight import Captured, Completion

__all__ = ["keep"]


def keep(device: int, completion: Completion | None) -> bool:
    """Keep what was captured for ever: nobody holds it, and nothing tells when the graph is gone. Whether it was."""
    if type(completion) is not Captured:
        return False
    device_state(device).board.kept.append(completion)
    return True
