"""What a CUDA graph uses, where the operation that was captured returns nothing that would hold it."""

from __future__ import annotations

from kvraw.runtime.inflight import Captured, Completion

__all__ = ["keep"]


def keep(device: int, completion: Completion | None) -> bool:
    """Whether it was captured."""
    return type(completion) is Captured
