"""Device and pinned memory that a codec call uses and the next one uses again."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvraw.copying.device_state import DeviceState, device_state
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.memory import DeviceBuffer, PinnedBuffer

__all__ = ["Arena", "give_arena", "offsets", "take_arena"]

_ALIGNMENT = 256


def offsets(sizes: Sequence[int]) -> list[int]:
    """Offsets of pieces of these sizes, one behind the other, and the end of the last."""
    out = [0]
    for size in sizes:
        out.append(out[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return out


class Arena:
    """Memory of one call at a time; it grows, and what it held is lost then."""

    def __init__(self, state: DeviceState) -> None:
        self.state, self.device = state, state.device
        self._memory: DeviceBuffer | None = None
        self._pinned: PinnedBuffer | None = None

    def on_device(self, *sizes: int) -> list[int]:
        """Addresses of pieces of device memory."""
        *at, total = offsets(sizes)
        if self._memory is None or self._memory.nbytes < total:
            if self._memory is not None:
                self._memory.close()
            self._memory = None
            self._memory = DeviceBuffer(total, self.device)
        return [self._memory.address + offset for offset in at]

    def pinned(self, *sizes: int) -> list[npt.NDArray[np.uint8]]:
        """Pieces of pinned host memory."""
        *at, total = offsets(sizes)
        if self._pinned is None or self._pinned.nbytes < total:
            if self._pinned is not None:
                self._pinned.close()
            self._pinned = None
            self._pinned = PinnedBuffer(total, self.device)
        whole = np.ctypeslib.as_array((ctypes.c_uint8 * max(total, 1)).from_address(self._pinned.address))
        return [whole[offset : offset + size] for offset, size in zip(at, sizes, strict=True)]


def take_arena(device: int) -> Arena:
    """An arena of a device, to be given back with `give_arena`; one that is not given back is freed."""
    with DeviceScope(device):
        state = device_state(device)
    return state.take("arena", lambda: Arena(state))


def give_arena(arena: Arena) -> None:
    """Take an arena back that no copy or kernel uses any more."""
    arena.state.give("arena", arena)
