"""Copies between a paged cache and the other side, part by part: straight to the kernel where nothing else can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvraw.adapters.found import nobody, teller
from kvraw.arrays import IndexVector
from kvraw.engines.device_state import device_state
from kvraw.engines.operands import Operands, check_host_index, require_index
from kvraw.prepared import Copy, PreparedCopy, Reached
from kvraw.runtime.context import DeviceScope

if TYPE_CHECKING:
    from kvraw.adapters.lmcache._paged import Paged

__all__ = ["Copies"]


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """A prepared copy for each part of a cache, that go one way.

    Attributes
    ----------
    each : list of PreparedCopy
        In the order of the parts.
    index : str
        What errors call the ids.
    kernel : bool
        The kernel may carry them out.
    """

    paged: Paged
    to_host: bool
    each: list[PreparedCopy]
    index: str
    kernel: bool

    def run(
        self,
        row: Reached,
        ids: IndexVector,
        first: int,
        count: int,
        stream: int | None,
        captured: bool,
        *,
        waited: bool = False,
    ) -> Copy | None:
        """Copy by one part after the other, between the cache and bases of the other side; the last copy.

        `captured` says that a capture is in progress on the stream. What kernels find in ids that only the device sees
        is raised by a later call, unless the caller waits for the last copy, which has the same to report as the rest.
        """
        paged, to_host, device, done = self.paged, self.to_host, self.paged.device, None
        if self.kernel and device is not None and stream is not None and (ids.host is None or not row.link):
            return self._launch(row, ids, first, count, stream, captured, device, waited)
        for copy, part, table in zip(self.each, paged.parts, paged.reached(), strict=True):
            at = np.uint64(part.at)
            side = Reached(row.host + at, row.seen + at, row.link, row.edges) if part.at else row
            if to_host:
                done = copy(table, side, count, src_index=ids, first=first, stream=stream)
            else:
                done = copy(side, table, count, dst_index=ids, first=first, stream=stream)
        return done

    def _launch(
        self,
        row: Reached,
        ids: IndexVector,
        first: int,
        count: int,
        stream: int,
        captured: bool,
        device: int,
        waited: bool,
    ) -> Copy | None:
        """The same where nothing but the kernel can do it: nothing is to be looked up or chosen."""
        require_index(self.index, ids, device)
        done = None
        with DeviceScope(device):
            state = device_state(device)
            unseen, last = ids.host is None and not waited, self.each[-1]
            for copy, part, table in zip(self.each, self.paged.parts, self.paged.reached(), strict=True):
                cache = Operands(table.seen, ids)
                flat = Operands(row.seen + np.uint64(part.at) if part.at else row.seen)
                if ids.host is not None:
                    side = copy.plan.src if self.to_host else copy.plan.dst
                    check_host_index(self.index, ids.host[: first + count], side, first)
                src, dst = (cache, flat) if self.to_host else (flat, cache)
                told = (teller(device) if copy is last else nobody) if unseen else None
                done = copy.launch(
                    state, src, dst, count, stream, first=first, link=row.link, captured=captured, told=told, refs=ids
                )
        return done
