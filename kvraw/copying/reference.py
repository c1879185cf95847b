"""The plain engine: enumerates the formula of `kvraw.copying.plan` as it stands, unfolded, and copies run by run."""

from __future__ import annotations

import ctypes

import numpy as np

from kvraw.arrays import I64, U64
from kvraw.copying.operands import Operands
from kvraw.copying.plan import CopyPlan, Side

__all__ = ["copy", "enumerate_runs"]


def _addresses(plan: CopyPlan, side: Side, operands: Operands, items: I64) -> U64:
    """Address of each run, shaped (items, layers, planes, tokens, heads); 0 where the item is left out."""
    index = items if operands.host_index is None else operands.host_index[items]
    kept = index >= 0 if side.skip_negative else np.ones(len(index), bool)
    outer, inner = np.divmod(np.where(kept, index, 0), side.page)
    i = (slice(None), None, None, None, None)
    layer, plane, token, head = np.ogrid[: plan.layers, : plan.planes, : plan.tokens, : plan.heads]
    entry = outer[i] * side.table_outer + layer * side.table_layer + plane * side.table_plane
    offset = (
        outer[i] * side.outer
        + inner[i] * side.inner
        + layer * side.layer
        + plane * side.plane
        + token * side.token
        + head * side.head
    )
    entry, offset = np.broadcast_arrays(entry, offset)
    addresses: U64 = operands.bases[entry] + offset.astype(np.uint64)
    return np.where(kept[i], addresses, np.uint64(0))


def enumerate_runs(plan: CopyPlan, src: Operands, dst: Operands, first: int, count: int) -> tuple[U64, U64]:
    """Source and destination address of every run of `plan.run` bytes, items `first` to `first + count`."""
    items = np.arange(first, first + count, dtype=np.int64)
    source = _addresses(plan, plan.src, src, items).ravel()
    target = _addresses(plan, plan.dst, dst, items).ravel()
    kept = (source != 0) & (target != 0)
    return source[kept], target[kept]


def copy(plan: CopyPlan, src: Operands, dst: Operands, first: int, count: int) -> None:
    """Carry the plan out on host memory, in order."""
    for source, target in zip(*enumerate_runs(plan, src, dst, first, count), strict=True):
        ctypes.memmove(int(target), int(source), plan.run)
