"""Rates that kernels keep to where they cross the link, and the words in device memory that share them out."""

from __future__ import annotations

from kvraw.errors import BoundsError
from kvraw.runtime import fork
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import DeviceBuffer
from kvraw.runtime.stream import Stream

__all__ = [
    "CREDIT",
    "LEAST_RATE",
    "OTHER_WAY",
    "SLACK",
    "WAYS",
    "PaceWords",
    "both_ways",
    "in_the_long_run",
    "paced_rate",
    "require_rate",
]

WAYS = ("store", "load", "copy")
LEAST_RATE = 16_000_000  # bytes a second: the time of 4 KiB still fits a kernel's word
LINK = 55e9  # bytes a second each way, where nobody measured: PCIe 5 x16
# Of the link, by direction, beside a decode loop (benchmarks/paced.py). Stores that fill the link back up, and hold up
# all other work of the device; loads by few thread blocks do not, but two beside each other share what one may take.
SHARE = {"store": 0.755, "load": 0.9, "copy": 0.0}
# What they may take of it in the long run, with one transfer behind the other. Of gaps, as between transfers that are
# waited for, `CREDIT` at most is made up for.
MEAN = {"store": 0.69, "load": 0.9}
CREDIT = 150_000  # ns
BOTH = 0.55  # of the link each way, while both directions are in use
OTHER_WAY = {"store": "load", "load": "store"}
SLACK = 4_000  # ns of an idle link's time that may be made up for
_APART = 256  # bytes from one word to the next


def paced_rate(way: str, link: float | None = None) -> float:
    """Bytes a second that kernels keep to in a direction, so that they do not hold up others; 0: no pace is needed.

    Parameters
    ----------
    way : str
        "store", "load" or "copy".
    link : float, optional
        Bytes a second that one large copy reaches that way; default: those of PCIe 5 x16.

    Examples
    --------
    >>> paced_rate("store", 25e9)
    18875000000.0
    """
    return SHARE[way] * (link or LINK)


def both_ways(way: str, rate: float) -> float:
    """What kernels keep to in a direction whose paced rate this is, while the link's other direction is in use too."""
    return rate * BOTH / SHARE[way]


def in_the_long_run(way: str, rate: float) -> float:
    """What kernels keep to in the long run in a direction whose paced rate this is."""
    return rate * MEAN[way] / SHARE[way]


def require_rate(rate: float, name: str = "rate") -> None:
    """Refuse a rate that no kernel can keep to; 0 is none.

    Raises
    ------
    BoundsError
        It is neither 0 nor at least `LEAST_RATE`.
    """
    if rate and not LEAST_RATE <= rate < float("inf"):
        raise BoundsError(f"{name} is {rate}, must be 0 or in [{LEAST_RATE}, inf) bytes a second")


class PaceWords:
    """Of one device for each direction the time from which on the link is free. Kernels alone read and write it."""

    def __init__(self, device: int) -> None:
        self._device, self._lock = device, fork.lock()
        self._addresses: dict[str, int] = {}
        self._memory: DeviceBuffer | None = None

    def address(self, way: str) -> int:
        """Where the word of a direction lies; the device's context is current."""
        found = self._addresses.get(way)
        return self._make()[way] if found is None else found

    def _make(self) -> dict[str, int]:
        with self._lock:
            if not self._addresses:
                memory = self._memory = DeviceBuffer(_APART * len(WAYS), self._device)
                # Nothing waits for it: a kernel that came sooner would find any time, and set right what is far ahead.
                with Stream(self._device) as stream:
                    driver().memset_async(memory.address, 0, memory.nbytes, stream.handle)
                self._addresses = {way: memory.address + _APART * k for k, way in enumerate(WAYS)}
        return self._addresses
