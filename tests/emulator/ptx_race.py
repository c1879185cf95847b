"""Races on shared memory: two threads at one word between two barriers, one of them writing.

Lanes that run in step would hide them. Threads of one warp race like others: nothing but a barrier orders what they
write before what their neighbours read. Of several threads that write a word by the same instruction any one may be
last, as with a status word; what they write is only to be read behind a barrier.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.emulator.ptx_memory import Addresses

WORD = 4
_NOBODY, _SEVERAL, _ATOMIC = 0, -1, -2  # else the lane, counted from one
_Cells = npt.NDArray[np.int64]
_Lanes = npt.NDArray[np.int32]


class SharedAccesses:
    """Who read and wrote each word of the shared memory of some CTAs since its last barrier."""

    def __init__(self, ctas: int, nbytes: int) -> None:
        self._words = -(-nbytes // WORD)
        self._reader = np.zeros(ctas * self._words, np.int32)
        self._writer = np.zeros(ctas * self._words, np.int32)
        self._by = np.zeros(ctas * self._words, np.int32)  # the line of the instruction that wrote

    def barrier(self, ctas: npt.NDArray[np.int64]) -> None:
        """Forget what went before the barrier of some CTAs."""
        for table in (self._reader, self._writer):
            table.reshape(-1, self._words)[ctas] = _NOBODY

    def read(self, ctas: Addresses, addresses: Addresses, nbytes: int, lanes: _Lanes) -> tuple[int, str] | None:
        """Note reads; the position of one that races, and with whom."""
        for cells in self._cells(ctas, addresses, nbytes):
            writer = self._writer[cells]
            race = (writer != _NOBODY) & (writer != lanes)
            if race.any():
                return self._first(race, writer, "reads what", "wrote since the last barrier")
            before = self._reader[cells]
            self._reader[cells] = lanes
            several = (self._reader[cells] != lanes) | ((before != _NOBODY) & (before != lanes))
            self._reader[cells[several]] = _SEVERAL
        return None

    def write(
        self, ctas: Addresses, addresses: Addresses, nbytes: int, lanes: _Lanes, line: int, atomic: bool = False
    ) -> tuple[int, str] | None:
        """Note writes, or atomics, by the instruction of a line; the position of one that races, and with whom."""
        for cells in self._cells(ctas, addresses, nbytes):
            reader, writer = self._reader[cells], self._writer[cells]
            race = (reader != _NOBODY) & (reader != lanes)
            if race.any():
                return self._first(race, reader, "writes what", "read since the last barrier")
            race = (writer != _NOBODY) & (writer != lanes)
            race &= writer != _ATOMIC if atomic else self._by[cells] != line
            if race.any():
                return self._first(race, writer, "writes what", "wrote since the last barrier")
            self._writer[cells] = _ATOMIC if atomic else lanes
            if not atomic:
                several = self._writer[cells] != lanes
                several |= (writer != _NOBODY) & (writer != lanes)
                self._writer[cells[several]] = _SEVERAL
            self._by[cells] = line
        return None

    def _cells(self, ctas: Addresses, addresses: Addresses, nbytes: int) -> list[_Cells]:
        base = (ctas * np.uint64(self._words) + addresses // np.uint64(WORD)).astype(np.int64)
        return [base + k for k in range(-(-nbytes // WORD))]

    def _first(self, race: npt.NDArray[np.bool_], others: _Lanes, begin: str, end: str) -> tuple[int, str]:
        at = int(np.argmax(race))
        other = int(others[at])
        who = {_SEVERAL: "several threads", _ATOMIC: "an atomic"}.get(other, f"thread {other - 1}")
        return at, f"a race on shared memory: {begin} {who} {end}"
