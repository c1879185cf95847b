"""Copies by the copy engine on torch's current stream, for the adapters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvraw.adapters import tensors
from kvraw.adapters.deferred_errors import pending, raise_deferred
from kvraw.arrays import I64
from kvraw.batch import memcpy_batch
from kvraw.copying.bound_copies import BoundCopies, HostRanges
from kvraw.copying.copy_engine import Descriptors
from kvraw.copying.device_state import device_state
from kvraw.copying.given import join
from kvraw.copying.submission import submit
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.host.registration import cuts_with

__all__ = ["bound_copies", "copy_items", "copy_ranges"]


def _spans(group: Iterable[Any]) -> list[tuple[int, int]]:
    return [tensors.span(t) for t in group if not t.is_cuda]


def bound_copies(group: Iterable[Any]) -> BoundCopies:
    """Copies between these tensors, to be added."""
    return BoundCopies(_spans(group))


def copy_items(
    copies: BoundCopies,
    device: int | None,
    src_index: I64,
    dst_index: I64,
    refs: object,
    *,
    raising: bool = True,
) -> None:
    """Enqueue the copies of some items, at least one, on the current stream; on the host, do them.

    What kernels of earlier operations on the device found is raised first, unless the caller did (`raising`).
    """
    if device is None:
        d = copies.describe(src_index, dst_index, cuts_with())
        memcpy_batch(d.dst, d.src, d.sizes)
        return
    stream, state = tensors.current_stream(device), device_state(device)
    if raising and pending(state):
        raise_deferred(device, stream)
    with DeviceScope(device):
        copies.enqueue(state, stream, src_index, dst_index, refs)


def copy_ranges(d: Descriptors, device: int | None, group: Iterable[Any]) -> None:
    """The same for copies between ranges in these tensors."""
    if device is None:
        memcpy_batch(d.dst, d.src, d.sizes)
        return
    stream, state, ranges = tensors.current_stream(device), device_state(device), HostRanges(_spans(group))
    if pending(state):
        raise_deferred(device, stream)
    with DeviceScope(device):
        ranges.look(state.owner)
        d = join(d, ranges.cuts)
        if len(d):
            submit(state, stream, d, pageable=ranges.pageable, edges=ranges.edges, refs=group)
