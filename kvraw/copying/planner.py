"""Which engine carries out a call: a small model of each engine's time, from measured figures."""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kvraw.runtime.driver import driver

__all__ = [
    "BUILT_IN",
    "DIRECTIONS",
    "ENGINES",
    "KERNEL_MARGIN",
    "Choice",
    "Curve",
    "Profile",
    "best",
    "profile_for",
    "profile_path",
]

_log = logging.getLogger("kvraw")

VERSION = 1
ENGINES = ("kernel", "copy", "staged")
DIRECTIONS = ("store", "load")
# A kernel is taken only where it is faster by more than this: beside a matrix product it waits for multiprocessors and
# takes them from it, while the other engines hardly do (benchmarks/README.md).
KERNEL_MARGIN = 1.05
Curve = tuple[tuple[int, float], ...]  # (bytes of a run, GB/s), ascending


@dataclass(frozen=True, slots=True)
class Choice:
    """What carries out a call, why, and how long the model says it takes."""

    engine: str
    reason: str
    microseconds: float


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
    """

    source: str
    bandwidth: Mapping[str, Curve]
    latency: Mapping[str, float]

    def seconds(self, engine: str, direction: str, run: int, nbytes: int) -> float:
        """Predicted time of `nbytes` in runs of `run` bytes."""
        curve = self.bandwidth[f"{engine} {direction}"]
        sizes = [size for size, _ in curve]
        at = bisect.bisect_right(sizes, run)
        if at == 0:
            # Below the smallest size measured, time goes by the number of runs.
            rate = curve[0][1] * run / sizes[0]
        elif at == len(curve):
            rate = curve[-1][1]
        else:
            (x0, y0), (x1, y1) = curve[at - 1], curve[at]
            rate = y0 + (y1 - y0) * math.log(run / x0) / math.log(x1 / x0)
        return self.latency[engine] * 1e-6 + nbytes / (rate * 1e9)

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
            profile = Profile(str(data["source"]), curves, latency)
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
        "copy store": ((2048, 2.1), (8192, 8.6), (32768, 33.0), (131072, 55.2), (1 << 20, 55.2)),
        "copy load": ((2048, 1.1), (8192, 2.9), (32768, 30.0), (131072, 55.2), (1 << 20, 55.2)),
    },
    latency={"kernel": 45.0, "copy": 110.0, "staged": 90.0},
)


def best(seconds: Mapping[str, float]) -> str:
    """The engine to take, of those with a predicted time."""
    return min(seconds, key=lambda e: seconds[e] * (KERNEL_MARGIN if e == "kernel" else 1))


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
