"""Copies between a paged cache and the other side, part by part: straight to the kernel where nothing else can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvraw.adapters.deferred_errors import Sink, discard, pending, pending_of
from kvraw.arrays import U64, IndexVector
from kvraw.copying.device_state import DeviceState, device_state
from kvraw.copying.indexed import IndexedLaunch
from kvraw.copying.transfer import Transfer
from kvraw.errors import BoundsError
from kvraw.memo import Memo
from kvraw.prepared import PreparedCopy, Reached
from kvraw.runtime.driver import driver

if TYPE_CHECKING:
    from kvraw.adapters.lmcache._paged import Paged

__all__ = ["Copies"]


@dataclass(slots=True, eq=False)
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
    _bound: Memo[tuple[int, ...], IndexedLaunch | None] = field(default_factory=lambda: Memo(64))
    _state: DeviceState | None = None
    _sink: Sink | None = None

    def repeat(
        self,
        stream: int,
        bases: Sequence[int] | U64,
        bits: int,
        ids: tuple[int, int, int],
        first: int,
        count: int,
        *,
        link: bool = False,
        memory: tuple[int, int] = (0, 0),
        refs: object = None,
    ) -> bool:
        """Copy by one launch that an earlier call bound; False: it must go the general way, where all is looked at.

        Parameters
        ----------
        bases : sequence of int
            Base addresses of the other side, as the device sees them.
        bits : int
            Their alignment: all or-ed together, modulo 16.
        ids : tuple of int
            Of the ids on the device: address, bytes of one, and how many there are.
        memory : tuple of int
            An address of the other side and the number of the memory there, which must still be the same; 0: it is the
            caller's to know.
        """
        state = self._state
        if state is None or state.was_reset or state.owner is not driver():
            state = self._renew()
        if state is None or pending(state):
            return False
        key = (len(bases), bits, ids[1], link, memory[1] != 0)
        launch = self._bound.get(key)
        if launch is None:
            launch = self._bind(key, state)
            if launch is None:
                return False
        at = ids[0]
        done = launch.enqueue(
            stream,
            *((at, 0) if self.to_host else (0, at)),
            count,
            first=first,
            bases=bases,
            memory=memory,
            on_error=self._sink,
            refs=refs,
        )
        return done is not None

    def _renew(self) -> DeviceState | None:
        """Forget what ended with another driver or context; None where another device's is current."""
        self._bound.clear()
        self._state = None
        if self.paged.device is not None and driver().context_device() == self.paged.device:
            self._state, self._sink = device_state(self.paged.device), pending_of(self.paged.device)
        return self._state

    def _bind(self, key: tuple[int, ...], state: DeviceState) -> IndexedLaunch | None:
        """The launch of a kind of calls, from its second call on; None where there is none."""
        again = key in self._bound
        self._bound.keep(key, None)
        if not again or len(self.each) != 1 or not self.kernel or self.paged.parts[0].at:
            return None
        entries, bits, width, link, asks = key
        ends = (self.paged.reached()[0].seen, entries)
        if state.owner.context_device() != state.device:
            return None
        try:
            launch = IndexedLaunch(
                state,
                self.each[0].kernel,
                ends if self.to_host else ends[::-1],
                (width, 0) if self.to_host else (0, width),
                link=bool(link),
                bits=bits,
                asks=bool(asks),
                way="store" if self.to_host else "load",
            )
        except BoundsError:  # more base addresses than an argument block holds
            return None
        self._bound[key] = launch
        return launch

    def run(
        self, row: Reached, ids: IndexVector, first: int, count: int, stream: int | None, *, waited: bool = False
    ) -> Transfer | None:
        """Copy by one part after the other, between the cache and bases of the other side; the last copy.

        What kernels find in ids that only the device sees is raised by a later call, unless the caller waits for the
        last copy, which has the same to report as the rest.
        """
        paged, to_host, device = self.paged, self.to_host, self.paged.device
        there = self.kernel and device is not None and ids.host is None  # what nothing but a kernel can read
        on_error: Sink | None = None
        done, last = None, self.each[-1]
        for copy, part, table in zip(self.each, paged.parts, paged.reached(), strict=True):
            side = row.plus(part.at)
            ends, index = ((table, side), (ids, None)) if to_host else ((side, table), (None, ids))
            if device is not None and ids.host is None and not waited:
                on_error = pending_of(device) if copy is last else discard
            engine = "kernel" if there else None
            done = copy(
                *ends, count, src_index=index[0], dst_index=index[1], first=first, stream=stream, engine=engine,
                on_error=on_error,
            )  # fmt: skip
        return done
