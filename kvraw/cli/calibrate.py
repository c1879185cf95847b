"""`kvraw calibrate`: measures a GPU for the planner and keeps the figures in the user's cache directory."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvraw.cli.progress import progress
from kvraw.copying import calibrate
from kvraw.runtime.context import DeviceScope

__all__ = ["rows", "run"]


def run(device: int) -> dict[str, Any]:
    """Measure and save.

    Raises
    ------
    KvrawError
        There is no such GPU.
    OSError
        The figures cannot be kept; found out ahead of measuring.
    """
    with DeviceScope(device):
        calibrate.require_place(device)
        with progress("calibrating") as tick:
            profile = calibrate.calibrate(device, tick=tick)
        path = calibrate.save(profile, device)
    return {"ok": True, "device": device, "file": str(path), "profile": dataclasses.asdict(profile)}


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The report as text."""
    profile = report["profile"]
    out = [("measured", profile["source"])]
    for name, curve in profile["bandwidth"].items():
        out.append((name, "  ".join(f"{run} B: {rate:.1f}" for run, rate in curve) + "  (GB/s over run size)"))
    latency = ", ".join(f"{name} {us:.1f}" for name, us in profile["latency"].items())
    return [*out, ("latency", f"{latency} (us beside the bytes)"), ("kept in", report["file"])]
