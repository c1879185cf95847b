"""Limits of this process's control groups, version 1 or 2, and the cores that they leave."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cgroup_limit", "cpu_quota", "usable_cores"]

ROOT, LISTING = "/sys/fs/cgroup", "/proc/self/cgroup"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The number at the beginning of a group's file; None where it is not there, or says "max" or -1."""
    words = _text(path).split()
    return int(words[0]) if words and words[0].isdigit() else None


def _groups(controller: str, root: str = ROOT, listing: str = LISTING) -> Iterator[tuple[int, Path]]:
    """Version and directory of this process's group for a controller, and of those above it, as far as mounted."""
    for line in _text(Path(listing)).split("\n"):
        _, colon, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not colon or (controllers and controller not in controllers.split(",")):
            continue
        # Controllers that are mounted together have a link each, which some containers lack.
        for top in dict.fromkeys((Path(root, controller), Path(root, controllers))) if controllers else (Path(root),):
            # In a container the group's own path may lie outside what is mounted: its parents' files answer then.
            inner = top / group.lstrip("/")
            yield from (
                (1 if controllers else 2, at) for at in (inner, *inner.parents) if at == top or top in at.parents
            )


def cgroup_limit(root: str = ROOT, listing: str = LISTING) -> int | None:
    """The least memory limit of this process's control groups and those above them, in bytes; None: no limit."""
    names = {1: "memory.limit_in_bytes", 2: "memory.max"}
    numbers = [_number(at / names[version]) for version, at in _groups("memory", root, listing)]
    # Version 1 writes "none" as a number near 2**63.
    return min((n for n in numbers if n is not None and n < 1 << 60), default=None)


def cpu_quota(root: str = ROOT, listing: str = LISTING) -> float | None:
    """Cores' worth of time that control groups allow this process, which may be a fraction; None: no limit."""
    shares = []
    for version, at in _groups("cpu", root, listing):
        if version == 1:
            quota, period = _number(at / "cpu.cfs_quota_us"), _number(at / "cpu.cfs_period_us")
        else:
            words = _text(at / "cpu.max").split()
            quota, period = (int(w) if w.isdigit() else None for w in (words if len(words) == 2 else ("max", "max")))
        if quota and period:
            shares.append(quota / period)
    return min(shares, default=None)


@functools.cache
def _quota() -> float | None:
    return cpu_quota()  # once: threads are chosen at each copy


def usable_cores() -> int:
    """Cores that this process may run on, or as many as its control groups' CPU quota amounts to; at least 1."""
    cores, quota = len(os.sched_getaffinity(0)), _quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))
