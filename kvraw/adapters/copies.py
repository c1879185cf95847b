"""Copies by the copy engine on torch's current stream, for the adapters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvraw.adapters import tensors
from kvraw.adapters.deferred_errors import pending, raise_deferred
from kvraw.arrays import I64
from kvraw.batch import memcpy_batch
from kvraw.copying.bound_copies import BoundCopies
from kvraw.copying.device_state import device_state
from kvraw.copying.plan import CopyPlan
from kvraw.runtime.host.registration import cuts_with

__all__ = ["Plan", "bound_copies", "copy_items"]

Plan = tuple[CopyPlan, list[int], list[int]]
"""A plan of one item, and base addresses of source and destination."""


def bound_copies(group: Iterable[Any], plans: Sequence[Plan]) -> BoundCopies | None:
    """Copies between these tensors by plans and their base addresses; None where there are no plans."""
    copies = BoundCopies([tensors.span(t) for t in group if not t.is_cuda])
    for plan in plans:
        copies.add(*plan)
    return copies if plans else None


def copy_items(copies: BoundCopies, device: int | None, src_index: I64, dst_index: I64, refs: object) -> None:
    """Enqueue the copies of some items, at least one, on the current stream; on the host, do them.

    What kernels of earlier operations on the device found is raised first.
    """
    if device is None:
        d = copies.describe(src_index, dst_index, cuts_with())
        memcpy_batch(d.dst, d.src, d.sizes)
        return
    stream, state = tensors.current_stream(device), device_state(device)
    if pending(state):
        raise_deferred(device, stream)
    copies.enqueue(state, stream, src_index, dst_index, refs)
