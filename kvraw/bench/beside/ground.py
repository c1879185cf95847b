"""Memory that every door moves data between, the streams it does so on, and the order that bytes are compared in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import kvraw

__all__ = ["DIRECTIONS", "IDS", "Case", "Done", "Ground", "Lane", "ordered"]

Direction = Literal["store", "load"]
DIRECTIONS: tuple[Direction, Direction] = ("store", "load")
IDS = 16  # vectors of ids, by turns: none is that of the call before


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of transfer.

    Attributes
    ----------
    door : str
        What is called.
    engine : str
        The engine; of adapters, whose module.
    direction : str
        "store" or "load".
    nbytes, row : int
        Bytes of a transfer, and of each contiguous run in it.
    """

    door: str
    engine: str
    direction: Direction
    nbytes: int
    row: int


class Done:
    """The stream has come to where it was when this was made."""

    __slots__ = ("_event",)

    def __init__(self, event: Any, stream: Any) -> None:
        self._event = event
        if event is not None:
            event.record(stream)

    def done(self) -> bool:
        """Ask; never waits."""
        return self._event is None or bool(self._event.query())


class Ground:
    """Device memory and pinned memory of kvraw's and of torch's, for either direction a part of each.

    What is moved away from is filled with random bytes once, and never written to again.

    Parameters
    ----------
    torch : module
        The module.
    device : int or None
        The GPU; None: host memory stands in for its memory.
    device_bytes, host_bytes : int
        Bytes of a direction's part: many times a transfer where that is small, since a cache that is moved again and
        again would lie in the L2 cache.
    """

    def __init__(self, torch: Any, device: int | None, device_bytes: int, host_bytes: int) -> None:
        self.torch, self.device = torch, device
        self.place = torch.device("cpu") if device is None else torch.device("cuda", device)
        self.device_bytes, self.host_bytes = device_bytes, host_bytes
        self._stack = ExitStack()
        kind = {"dtype": torch.uint8}
        self.memory = {way: torch.empty(device_bytes, device=self.place, **kind) for way in DIRECTIONS}
        self.pinned = {way: torch.empty(host_bytes, pin_memory=device is not None, **kind) for way in DIRECTIONS}
        self.streams = {way: None if device is None else torch.cuda.Stream(self.place) for way in DIRECTIONS}
        self.memory["store"].random_()
        self._filled = 0
        self.fill(self.pinned["load"])
        self.pool = self._stack.enter_context(
            kvraw.HostPool(2 * host_bytes + (1 << 20), device=device, pin=device is not None)
        )

    def fill(self, host: Any) -> None:
        """Random bytes to host memory, others each time."""
        source, at = self.memory["store"], 0
        while at < len(host):
            begin = self._filled % (len(source) // 2)
            size = min(len(host) - at, len(source) - begin)
            host[at : at + size].copy_(source[begin : begin + size])
            at, self._filled = at + size, self._filled + size + 4099

    def on(self, way: Direction) -> AbstractContextManager[Any]:
        """The direction's stream as torch's current one."""
        stream = self.streams[way]
        return nullcontext() if stream is None else self.torch.cuda.stream(stream)

    def ids(self, count: int, within: int, page: int = 1) -> list[Any]:
        """Vectors of `count` distinct ids in random order, whole pages of them, as int64 arrays."""
        made = []
        for seed in range(IDS):
            pages = np.random.default_rng(seed).permutation(within // page)[: count // page].astype(np.int64)
            made.append((pages[:, None] * page + np.arange(page)).reshape(-1))
        return made

    def there(self, vectors: Sequence[Any]) -> list[Any]:
        """The same vectors on the device."""
        return [self.torch.from_numpy(v).to(self.place) for v in vectors]

    def settle(self) -> None:
        """Wait until nothing is going on."""
        if self.device is not None:
            self.torch.cuda.synchronize(self.place)

    def close(self) -> None:
        """Give everything back."""
        self.settle()
        self._stack.close()
        self.memory.clear()
        self.pinned.clear()


class Lane:
    """Calls of one case, each with other ids and another part of host memory than the one before.

    Parameters
    ----------
    ground : Ground
        The memory.
    case : Case
        What is called.

    Attributes
    ----------
    moved : int
        Bytes of a call: those of the case, or the most that whole blocks make of them.
    """

    moved: int

    def __init__(self, ground: Ground, case: Case) -> None:
        self.ground, self.case = ground, case
        self.torch, self.way = ground.torch, case.direction
        self.stream = ground.streams[self.way]
        self.memory, self.pinned = ground.memory[self.way], ground.pinned[self.way]
        events = 0 if self.stream is None else 64
        self._events = [self.torch.cuda.Event() for _ in range(events)]
        self.moved, self.places = case.nbytes, max(1, ground.host_bytes // case.nbytes)

    def part(self, at: int) -> Any:
        """The pinned memory of call `at`."""
        begin = at % self.places * self.moved
        return self.pinned[begin : begin + self.moved]

    def marked(self, at: int) -> Done:
        """What says that the stream is done with call `at`."""
        return Done(self._events[at % len(self._events)] if self._events else None, self.stream)

    def call(self, at: int) -> Any:
        """Enqueue call number `at` on the direction's stream; what is returned says when it is `done()`."""
        return self._call(at)

    def _call(self, at: int) -> Any:
        with self.ground.on(self.way):
            self._enqueue(at)
            return self.marked(at)

    # What a door has of its own: a call on torch's current stream; what it moves, as it lies on the device and on the
    # host, in one order; overwriting the host's side of a call; and what is given back.

    def _enqueue(self, at: int) -> None:
        raise NotImplementedError

    def _ends(self, at: int) -> tuple[Any, Any]:
        raise NotImplementedError

    def _clear(self, at: int) -> None:
        self.part(at).zero_()

    def _close(self) -> None:
        pass

    def verify(self, at: int = 0) -> None:
        """Make one call and compare every byte.

        Raises
        ------
        RuntimeError
            They differ.
        """
        ground = self.ground
        ground.settle()
        if self.way == "store":
            self._clear(at)
        else:
            self.memory.zero_()
        ground.settle()
        self.call(at)
        ground.settle()
        device, host = self._ends(at)
        if not self.torch.equal(device, host.to(ground.place)) or not device.any():
            raise RuntimeError(f"{self.case} moved other bytes than it was to")

    def close(self) -> None:
        """Give back what this lane alone used."""
        self._close()


def ordered(memory: Any, axes: str, sizes: Mapping[str, int], order: str) -> Any:
    """Memory whose axes are `axes`, as one with the axes in another order."""
    return memory.view([sizes[a] for a in axes]).permute([axes.index(a) for a in order])


Maker = Callable[[Ground, Case], Lane]
