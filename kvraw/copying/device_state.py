"""What the GPU engines keep per device: operations in flight, status words and buffers for large tables."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvraw.arrays import U64
from kvraw.copying.pace import PaceWords
from kvraw.copying.staging_ring import StagingRings
from kvraw.copying.status_words import StatusPages
from kvraw.memo import Memo
from kvraw.runtime import fork
from kvraw.runtime.completion import CompletionQueue
from kvraw.runtime.context import DeviceScope, generation, reset_error, tie
from kvraw.runtime.driver import CudaDriver, driver
from kvraw.runtime.host.registration import cut_list
from kvraw.runtime.memory import DeviceBuffer, PinnedBuffer, known_memory
from kvraw.runtime.stream import Stream

__all__ = ["DeviceState", "Upload", "device_state", "drain"]


T = TypeVar("T")


def _words(buffer: PinnedBuffer, count: int) -> U64:
    array = np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(buffer.address))
    return array.view(np.uint64)


class Upload:
    """A pinned buffer and a device buffer of one size: a table goes through them without a pageable copy."""

    __slots__ = ("_pinned", "device", "words")

    def __init__(self, words: int, device: int) -> None:
        self._pinned = PinnedBuffer(words * 8, device)
        self.device = DeviceBuffer(words * 8, device)
        self.words = _words(self._pinned, words)

    def fetch(self, address: int, nbytes: int, stream: int) -> None:
        """Enqueue the copy of device memory to the first words on the host."""
        driver().memcpy_pinned_async(self._pinned.address, address, nbytes, stream)

    def send(self, count: int, stream: int) -> None:
        """Enqueue the copy of the first `count` words to the device."""
        driver().memcpy_pinned_async(self.device.address, self._pinned.address, count * 8, stream)


class DeviceState:
    """State of one device, shared by all plans; its context is current in every call."""

    def __init__(self, device: int) -> None:
        self.owner = d = driver()
        self.device = device
        self.completions = CompletionQueue()
        self.status = StatusPages(device)
        self.multiprocessors = d.device_attribute(device, "MULTIPROCESSOR_COUNT")
        self.arena = StagingRings(device)
        self.paces = PaceWords(device)
        # What adapters made ready for this device, by a name of theirs: it ends with the context.
        self.bound: defaultdict[str, Memo[Any, Any]] = defaultdict(partial(Memo, _MOST))
        self._lock = fork.lock()
        self._side: dict[str, Stream] = {}
        self.idle: defaultdict[object, list[Any]] = defaultdict(list)  # memory for the next call, by its kind
        self.generation = generation(device)
        self.was_reset = False  # the context was reset
        self.cuts = cut_list(d)
        self.memory = known_memory(d)
        tie(self)

    def context_lost(self) -> None:
        """Nothing of it can be used again: the next call makes another."""
        self.was_reset = True
        with _lock:
            states = _states(self.owner)
            if states.get(self.device) is self:
                del states[self.device]
        self.completions.fail_all(reset_error(self.device, "the transfer's work"))

    def side_stream(self, direction: str) -> Stream:
        """The stream of our own for transfers of a direction that are not to run on the caller's."""
        with self._lock:
            if direction not in self._side:
                self._side[direction] = Stream(self.device)
            return self._side[direction]

    def get_ready(self, events: int, uploads: tuple[int, ...]) -> None:
        """Make events, upload buffers of these words, and status words, ahead of their use."""
        made = [self.completions.take_event() for _ in range(events)]
        for event in made:
            self.completions.give_event(event)
        for upload in [self.take_upload(words) for words in uploads]:
            self.give_upload(upload)
        self.status.get_ready()
        self.paces.address("store")
        for direction in ("store", "load", "copy"):
            self.side_stream(direction)

    def take(self, kind: object, make: Callable[[], T]) -> T:
        """Memory of a kind that nobody uses, to be given back with `give`; made where there is none."""
        try:
            return self.idle[kind].pop()  # type: ignore[no-any-return]
        except IndexError:
            return make()

    def give(self, kind: object, memory: object) -> Exception | None:
        """Take memory back that no copy or kernel uses any more."""
        self.idle[kind].append(memory)
        return None

    def take_upload(self, words: int) -> Upload:
        """Buffers for at least this many words, to be given back with `give_upload`."""
        size = max(1024, 1 << (words - 1).bit_length())
        return self.take(size, lambda: Upload(size, self.device))

    def give_upload(self, upload: Upload) -> Exception | None:
        """Take buffers back that no copy or kernel uses any more."""
        return self.give(len(upload.words), upload)


_lock = fork.lock()
_NONE: dict[int, Any] = {}
_MOST = 2048  # calls of a kind that are kept


def _states(d: CudaDriver) -> dict[int, DeviceState]:
    """States by device, kept by the driver: a table of drivers would keep each, for its states refer to it."""
    found: dict[int, DeviceState] = vars(d).setdefault("device_states", {})
    return found


def drain() -> None:
    """Wait for all that devices in use were given, such as before memory that it may use is given up."""
    for state in list(_states(driver()).values()):
        with DeviceScope(state.device):
            state.completions.drain()


def device_state(device: int) -> DeviceState:
    """The state of a device; its context is current."""
    d = driver()
    found: DeviceState | None = vars(d).get("device_states", _NONE).get(device)
    if found is None:
        with _lock:
            found = _states(d).setdefault(device, DeviceState(device))
    return found
