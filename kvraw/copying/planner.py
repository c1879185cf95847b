"""Which engine carries out a call: a small model of each engine's time, from measured figures.

On an idle GPU the fastest engine is the best. Beside a decode, which is bound by device memory, a transfer takes its
share of that memory's traffic from it: staging moves each byte through it three times, the other engines once. And
stores from multiprocessors that fill the link make everybody wait (posted writes back up): there, kernels keep to a
rate below the link's. What an engine takes of the host's thread counts as well.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import logging
import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from kvraw import config
from kvraw.copying.pace import paced_rate, require_rate
from kvraw.errors import LayoutError
from kvraw.runtime.driver import driver

__all__ = [
    "BUILT_IN",
    "DIRECTIONS",
    "ENGINES",
    "KERNEL_MARGIN",
    "MOVES",
    "Choice",
    "Curve",
    "Neighbour",
    "Profile",
    "RateLimit",
    "Seconds",
    "best",
    "profile_for",
    "profile_path",
]

_log = logging.getLogger("kvraw")

VERSION = 2
ENGINES = ("kernel", "copy", "staged")
DIRECTIONS = ("store", "load")
# A kernel is taken only where it is faster by more than this: beside a matrix product it waits for multiprocessors and
# takes them from it, while the other engines hardly do (benchmarks/README.md).
KERNEL_MARGIN = 1.05
PACE_REACHED = 0.92  # of its rate, what a kernel that keeps to one moves (benchmarks/README.md)
# How often an engine moves a byte through device memory: a staging slot is written and read besides.
MOVES = {"kernel": 1, "copy": 1, "staged": 3}
# Seconds of a transfer that a second of the decode beside it is worth: so much that traffic decides between engines of
# like speed, and speed where it differs by half or more (benchmarks/README.md, "Beside a decode").
DECODE_WEIGHT = 20.0
# Seconds of the host that the copy engine takes for each copy, in which the caller's thread does nothing else: they
# count as seconds of the transfer. 0.45 to 0.9 us on hosts with an H200.
COPY_HOST = 0.5e-6
Neighbour: TypeAlias = Literal["busy", "idle"]
Curve = tuple[tuple[int, float], ...]  # (bytes of a run, GB/s), ascending


@dataclass(frozen=True, slots=True)
class Choice:
    """What carries out a call, why, how long the model says it takes, and bytes a second to keep to (0: any)."""

    engine: str
    reason: str
    microseconds: float
    rate: float = 0.0


class Seconds(NamedTuple):
    """What a transfer costs, with what work beside it loses, and the time that it takes alone."""

    cost: float
    alone: float


@dataclass(frozen=True)
class Profile:
    """Figures of a device: bandwidth over run size, and the time of an empty transfer.

    Attributes
    ----------
    source : str
        Where the figures are from.
    bandwidth : mapping
        (engine, direction) to a curve; engines "kernel", "copy", "staged", directions "store" and "load".
    latency : mapping
        Engine to microseconds.
    memory : float
        GB/s of device memory, bytes read and bytes written both counted.
    paced : mapping
        Direction to the GB/s that a kernel keeps to beside other work, from where on it would take more than its share.
    """

    source: str
    bandwidth: Mapping[str, Curve]
    latency: Mapping[str, float]
    memory: float = 4000.0
    paced: Mapping[str, float] = field(default_factory=lambda: {d: paced_rate(d) * 1e-9 for d in DIRECTIONS})

    def seconds(
        self, engine: str, direction: str, run: int, nbytes: int, rate: float = 0.0, *, busy: bool = False
    ) -> Seconds:
        """Predicted time of `nbytes` in runs of `run` bytes, a kernel at `rate` bytes a second; `busy`: and cost."""
        curve = self.bandwidth[f"{engine} {direction}"]
        sizes = [size for size, _ in curve]
        at = bisect.bisect_right(sizes, run)
        if at == 0:
            # Below the smallest size measured, time goes by the number of runs.
            reached = curve[0][1] * run / sizes[0]
        elif at == len(curve):
            reached = curve[-1][1]
        else:
            (x0, y0), (x1, y1) = curve[at - 1], curve[at]
            reached = y0 + (y1 - y0) * math.log(run / x0) / math.log(x1 / x0)
        if rate and engine == "kernel":
            reached = min(reached, PACE_REACHED * rate * 1e-9)
        alone = self.latency[engine] * 1e-6 + nbytes / (reached * 1e9)
        traffic = MOVES[engine] * nbytes / (self.memory * 1e9) if busy else 0.0
        host = COPY_HOST * nbytes / run if busy and engine == "copy" else 0.0
        return Seconds(alone + DECODE_WEIGHT * traffic + host, alone)

    def dumps(self) -> str:
        """The profile as JSON."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def loads(text: str) -> Profile:
        """A profile from JSON.

        Raises
        ------
        ValueError
            It is not one of this version, or a figure is missing or makes no sense.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != VERSION:
            raise ValueError(f"not a profile of version {VERSION}")
        try:
            curves = {str(k): tuple((int(x), float(y)) for x, y in v) for k, v in data["bandwidth"].items()}
            latency = {str(k): float(v) for k, v in data["latency"].items()}
            paced = {d: float(data["paced"][d]) for d in DIRECTIONS}
            profile = Profile(str(data["source"]), curves, latency, float(data["memory"]), paced)
            for name, figure in (("memory", profile.memory), *paced.items()):
                if not 0 < figure < math.inf:
                    raise ValueError(f"the figure of {name} is {figure}")
            for engine in ENGINES:
                if not 0 <= latency[engine] < math.inf:
                    raise ValueError(f"the latency of {engine} is {latency[engine]}")
                for direction in DIRECTIONS:
                    sizes, rates = zip(*curves[f"{engine} {direction}"], strict=True)
                    rising = all(a < b for a, b in itertools.pairwise(sizes))
                    if sizes[0] <= 0 or not rising or not all(0 < rate < math.inf for rate in rates):
                        raise ValueError(f"the curve {engine} {direction} is not one")
        except (AttributeError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"incomplete profile: {error!r}") from None
        return profile


# One H200, PCIe 5 x16, driver 580 (benchmarks/README.md). On other links the ratios, which decide, are alike.
BUILT_IN = Profile(
    source="built in: H200, PCIe 5 x16",
    bandwidth={
        "kernel store": ((16, 32.0), (128, 52.0), (1 << 20, 52.4)),
        "kernel load": ((16, 23.0), (128, 50.7), (1 << 20, 51.1)),
        "staged store": ((16, 52.9), (128, 53.9), (1 << 20, 53.9)),
        "staged load": ((16, 47.0), (128, 53.9), (1 << 20, 53.9)),
        "copy store": ((2048, 2.9), (8192, 11.6), (32768, 48.0), (131072, 55.2), (1 << 20, 55.2)),
        "copy load": ((2048, 2.7), (8192, 12.0), (32768, 47.0), (131072, 55.2), (1 << 20, 55.2)),
    },
    latency={"kernel": 45.0, "copy": 110.0, "staged": 90.0},
)


class RateLimit(NamedTuple):
    """What kernels over the link keep to: rates for the sake of other work, and what the caller allows.

    Attributes
    ----------
    busy : bool
        There is other work on the GPU.
    most : float
        Bytes a second that the caller allows; 0: any.
    """

    busy: bool
    most: float = 0.0

    @classmethod
    def of(cls, neighbour: str | None, max_rate: float = 0.0) -> RateLimit:
        """From what callers name; None: `KVRAW_NEIGHBOUR`.

        Raises
        ------
        LayoutError
            `neighbour` is none of "busy" and "idle".
        BoundsError
            `max_rate` is neither 0 nor a rate that kernels can keep to.
        TypeError
            It is no number.
        """
        neighbour = config.NEIGHBOUR.get() if neighbour is None else neighbour
        if neighbour not in config.NEIGHBOURS:
            raise LayoutError(f"neighbour is {neighbour!r}, must be one of {', '.join(config.NEIGHBOURS)}")
        if not isinstance(max_rate, numbers.Real):
            raise TypeError(f"max_rate is {max_rate!r}, must be a number of bytes a second")
        require_rate(max_rate, "max_rate")
        return cls(neighbour == "busy", float(max_rate))

    def rate(self, device: int, way: str) -> float:
        """Bytes a second that a kernel keeps to; where it is not known which way it copies, as if it stored.

        "copy" is between device memory, where it keeps to none.
        """
        if way == "copy":
            return 0.0
        paced = profile_for(device).paced[way if way in DIRECTIONS else "store"] * 1e9 if self.busy else 0.0
        return min(paced, self.most) if paced and self.most else paced or self.most


def best(seconds: Mapping[str, Seconds], *, busy: bool = False) -> str:
    """The engine to take, of those with a predicted time; `busy`: what others lose is counted."""
    margin = 1.0 if busy else KERNEL_MARGIN
    return min(seconds, key=lambda e: seconds[e].cost * (margin if e == "kernel" else 1))


def profile_path(device: int) -> Path | None:
    """File of the calibration of a device and driver, in the user's cache directory; None where there is none."""
    cache, home = os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("HOME", "")
    if not os.path.isabs(cache):  # so says the base directory specification
        cache = os.path.join(home, ".cache") if os.path.isabs(home) else ""
    if not cache:
        return None
    name = "".join(c if c.isalnum() else "-" for c in driver().device_name(device))
    return Path(cache) / "kvraw" / f"profile-{name}-{driver().version()}.json"


@functools.lru_cache(maxsize=64)
def profile_for(device: int) -> Profile:
    """The calibration of a device where there is one, else the built-in figures; looked up once per process.

    A file that cannot be used is told of in the log.
    """
    path = profile_path(device)
    if path is None:
        return BUILT_IN
    try:
        return Profile.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return BUILT_IN
    except (OSError, ValueError) as error:
        _log.warning(
            "%s cannot be used (%s); planning with built-in figures, `kvraw calibrate` replaces it", path, error
        )
        return BUILT_IN
