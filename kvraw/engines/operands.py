"""What a plan is given at each call, and the checks that need no driver."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvraw.arrays import I64, U64, IndexVector
from kvraw.errors import BoundsError
from kvraw.plan import CopyPlan, Side

__all__ = ["Operands", "check_host_index", "check_table"]


@dataclass(frozen=True, slots=True)
class Operands:
    """Base addresses and index of one side, for one call.

    Attributes
    ----------
    bases : numpy.ndarray of uint64
        The side's table, as addresses that the engine can use.
    index : IndexVector or None
        Index of each item; None: the item is its own index.
    """

    bases: U64
    index: IndexVector | None = None

    @property
    def host_index(self) -> I64 | None:
        """The index values where they are on the host."""
        return None if self.index is None else self.index.host


def check_host_index(name: str, index: I64, side: Side, first: int) -> None:
    """Check the index values behind `first` against the side's limit.

    Raises
    ------
    BoundsError
        Names the argument, the position, the value and the bound.
    """
    used = index[first:]
    if used.size == 0:
        return
    low, high = int(used.min()), int(used.max())
    if high >= side.limit or (low < 0 and not side.skip_negative):
        bad = (used >= side.limit) | ((used < 0) & (not side.skip_negative))
        at = int(np.argmax(bad))
        negative = " (or negative: left out)" if side.skip_negative else ""
        raise BoundsError(f"{name}[{first + at}] is {used[at]}, must be in [0, {side.limit}){negative}")


def check_table(name: str, bases: U64, side: Side, plan: CopyPlan, end: int) -> None:
    """Check that the table holds every base that items below `end` reach.

    Raises
    ------
    BoundsError
        The table is too short; names both lengths.
    """
    need = side.entries
    if side.table_outer:
        need = -(-end // side.page) * side.table_outer
    if len(bases) < need:
        raise BoundsError(f"{name} has {len(bases)} base addresses, must have at least {need}")
