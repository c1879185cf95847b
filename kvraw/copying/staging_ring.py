"""Staging memory of one device: a ring of slots for each direction, and the streams that empty and fill them."""

from __future__ import annotations

from typing import Any

from kvraw import config
from kvraw.runtime import fork
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import DeviceBuffer
from kvraw.runtime.stream import Stream

__all__ = ["StagingRing", "StagingRings", "StagingSlot"]


class StagingSlot:
    """Device memory, the event after which it may be written, and the event after which it may be read."""

    __slots__ = ("address", "buffer", "free", "full")

    def __init__(self, nbytes: int, device: int) -> None:
        d = driver()
        self.buffer = DeviceBuffer(nbytes, device)
        self.address = self.buffer.address
        self.free = d.event_create()
        try:
            self.full = d.event_create()
        except BaseException:
            d.event_destroy(self.free)
            raise

    def discard(self) -> None:
        """Give everything back; nothing used it."""
        for event in (self.free, self.full):
            driver().event_destroy(event)
        self.buffer.close()


class StagingRing:
    """Slots of one direction. Whoever enqueues work on them holds `lock`; streams then wait for each other by events.

    Attributes
    ----------
    copies, packs : Stream
        The streams of the large copies, and of the kernels that pack for them.
    turn : int
        Which slot was the last.
    start : int
        An event that programs record ahead of their first slot.
    slots : list of StagingSlot
        All of them.
    programs : dict
        Those of the staged engine.
    """

    def __init__(self, device: int, nbytes: int, depth: int) -> None:
        self.lock = fork.lock()
        self.nbytes = nbytes
        self.copies, self.packs = Stream(device), Stream(device)
        self.slots: list[StagingSlot] = []
        try:
            while len(self.slots) < depth:
                self.slots.append(StagingSlot(nbytes, device))
        except BaseException:
            for slot in self.slots:
                slot.discard()
            raise
        self.turn = 0
        self.start = driver().event_create()
        self.programs: dict[Any, Any] = {}

    def coming(self, count: int) -> list[StagingSlot]:
        """The slots whose turn it is next, as often as it comes."""
        return [self.slots[(self.turn + 1 + k) % len(self.slots)] for k in range(count)]


class StagingRings:
    """The rings of one device, made on first use; the device's context is current then."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = fork.lock()
        self._rings: dict[str, StagingRing] = {}

    def ring(self, direction: str) -> StagingRing:
        """The ring of a direction ("store" or "load")."""
        found = self._rings.get(direction)
        if found is None:
            with self._lock:
                found = self._rings.get(direction)
                if found is None:
                    nbytes, depth = config.STAGING_SLOT.get(), config.STAGING_DEPTH.get()
                    found = self._rings[direction] = StagingRing(self._device, nbytes, depth)
        return found
