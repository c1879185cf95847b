"""Memory limits of this machine and process, from the files and calls of Linux."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Any

from kvraw.runtime.cgroup import cgroup_limit
from kvraw.runtime.host.backing import file_text

__all__ = ["cgroup_limit", "file_text", "memory_limits"]


def memory_limits() -> dict[str, Any]:
    """Limits on pinning and on huge pages; None: unlimited, or not there."""
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+) kB", file_text("/proc/meminfo") or "", re.M))
    soft, hard = (None if x == resource.RLIM_INFINITY else x for x in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    setting = re.search(r"\[(\w+)\]", file_text("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    pages = {}
    for at in sorted(Path("/sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        total, free = file_text(at / "nr_hugepages"), file_text(at / "free_hugepages")
        pages[at.name[len("hugepages-") :]] = {"total": int(total or 0), "free": int(free or 0)}
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        shm = None
    return {
        "memlock_soft_bytes": soft,
        "memlock_hard_bytes": hard,
        "total_bytes": int(meminfo.get("MemTotal", 0)) * 1024,
        "available_bytes": int(meminfo.get("MemAvailable", 0)) * 1024,
        "cgroup_limit_bytes": cgroup_limit(),
        "transparent_huge_pages": setting.group(1) if setting else None,
        "huge_pages": pages,
        "shm_total_bytes": shm.f_blocks * shm.f_frsize if shm else None,
        "shm_free_bytes": shm.f_bavail * shm.f_frsize if shm else None,
    }
