"""Which engine carries out a call: a small model of each engine's time, from measured figures."""

from __future__ import annotations

import bisect
import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kvraw.runtime.driver import driver

__all__ = ["BUILT_IN", "Choice", "Profile", "profile_for", "profile_path"]

VERSION = 1
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
            It is not one of this version.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != VERSION:
            raise ValueError("not a profile of this version")
        try:
            curves = {str(k): tuple((int(x), float(y)) for x, y in v) for k, v in data["bandwidth"].items()}
            profile = Profile(str(data["source"]), curves, {k: float(v) for k, v in data["latency"].items()})
            for engine in ("kernel", "copy", "staged"):
                for direction in ("store", "load"):
                    profile.seconds(engine, direction, 4096, 1)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"incomplete profile: {error!r}") from None
        return profile


# One H200, PCIe 5 x16, driver 580 (benchmarks/README.md). On other links the ratios, which decide, are alike.
BUILT_IN = Profile(
    source="built in: H200, PCIe 5 x16",
    bandwidth={
        "kernel store": ((16, 12.0), (128, 52.0), (1 << 20, 52.3)),
        "kernel load": ((16, 10.0), (128, 50.7), (1 << 20, 51.1)),
        "staged store": ((16, 30.0), (128, 54.6), (1 << 20, 54.7)),
        "staged load": ((16, 30.0), (128, 54.7), (1 << 20, 54.8)),
        "copy store": ((2048, 4.7), (8192, 20.0), (32768, 37.0), (131072, 47.0), (1 << 20, 54.0), (4 << 20, 55.2)),
        "copy load": ((2048, 1.7), (8192, 4.0), (32768, 35.0), (131072, 46.0), (1 << 20, 54.0), (4 << 20, 55.3)),
    },
    latency={"kernel": 8.0, "copy": 9.0, "staged": 32.0},
)


def profile_path(device: int) -> Path | None:
    """File of the calibration of a device and driver, in the user's cache directory; None where there is none."""
    home = os.environ.get("XDG_CACHE_HOME") or (
        os.path.join(os.environ["HOME"], ".cache") if "HOME" in os.environ else ""
    )
    if not home:
        return None
    name = "".join(c if c.isalnum() else "-" for c in driver().device_name(device))
    return Path(home) / "kvraw" / f"profile-{name}-{driver().version()}.json"


@functools.lru_cache(maxsize=64)
def profile_for(device: int) -> Profile:
    """The calibration of a device where there is one, else the built-in figures."""
    path = profile_path(device)
    try:
        return BUILT_IN if path is None else Profile.loads(path.read_text())
    except (OSError, ValueError):
        return BUILT_IN
