"""The kernel's account of memory, from /proc and /sys: huge pages and NUMA nodes of a range; a GPU's node; limits."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from kvraw.errors import HostMemoryError, KvrawError
from kvraw.runtime.cgroup import cgroup_limit
from kvraw.runtime.driver import driver

__all__ = [
    "BackingInfo",
    "device_node",
    "file_text",
    "free_huge_pages",
    "inspect_backing",
    "nodes",
    "require_memory",
    "transparent_setting",
]

_HUGE = re.compile(r"^(AnonHugePages|ShmemPmdMapped|FilePmdMapped|Shared_Hugetlb|Private_Hugetlb): +(\d+) kB")
_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")


@dataclass(frozen=True)
class BackingInfo:
    """The kernel's account of a range; None where it gives none.

    Attributes
    ----------
    huge_bytes : int or None
        Bytes that huge pages back, transparent or explicit.
    nodes : dict of int to int, or None
        Bytes by NUMA node.
    """

    huge_bytes: int | None = None
    nodes: dict[int, int] | None = field(default=None)


def inspect_backing(address: int, nbytes: int) -> BackingInfo:
    """Look at a range that is mapped; it walks the page tables, some milliseconds per GiB of small pages.

    The kernel may have joined the range with neighbouring mappings of the same kind, whose pages are then counted too,
    up to the size of the range.
    """
    huge, starts, inside = 0, set(), False
    try:
        with open("/proc/self/smaps") as file:
            for line in file:
                if (head := _HEAD.match(line)) is not None:
                    begin, end = (int(x, 16) for x in head.groups())
                    inside = begin < address + nbytes and address < end
                    if inside:
                        starts.add(begin)
                elif inside and (found := _HUGE.match(line)) is not None:
                    huge += int(found[2]) * 1024
    except OSError:
        return BackingInfo()
    return BackingInfo(min(huge, nbytes), _nodes(starts))


def _nodes(starts: set[int]) -> dict[int, int] | None:
    total: dict[int, int] = {}
    try:
        with open("/proc/self/numa_maps") as file:
            for line in file:
                begin, _, rest = line.partition(" ")
                if int(begin, 16) in starts:
                    page = int((re.search(r"kernelpagesize_kB=(\d+)", rest) or ["", "4"])[1]) * 1024
                    for node, pages in re.findall(r"\bN(\d+)=(\d+)", rest):
                        total[int(node)] = total.get(int(node), 0) + int(pages) * page
    except OSError:
        return None
    return total


def nodes(root: str = "/sys/devices/system/node") -> list[int]:
    """NUMA nodes of this machine that have memory; empty where the kernel does not say."""
    try:
        text = Path(root, "has_memory").read_text().strip()
    except OSError:
        return []
    spans = [part.partition("-") for part in text.split(",") if part]
    return [n for first, _, last in spans for n in range(int(first), int(last or first) + 1)]


def device_node(device: int, root: str = "/sys/bus/pci/devices") -> int | None:
    """NUMA node that a GPU hangs on, by its PCI address; None where it is not known. Makes no context."""
    try:
        address = driver().device_pci_address(device)
        node = int(Path(root, address.lower(), "numa_node").read_text())
    except (KvrawError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def transparent_setting() -> str | None:
    """The machine's setting of transparent huge pages: always, madvise or never; None: not there."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else None


def free_huge_pages(nbytes: int) -> tuple[int, int] | None:
    """Free and total explicit huge pages of a size; None where the kernel has none of that size."""
    at = f"/sys/kernel/mm/hugepages/hugepages-{nbytes >> 10}kB"
    if not os.path.isdir(at):
        return None
    free, total = (int(Path(at, name).read_text()) for name in ("free_hugepages", "nr_hugepages"))
    return free, total


def file_text(path: str | Path) -> str | None:
    """Content of a small system file; None where it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def require_memory(nbytes: int) -> None:
    """Raise where this much memory can never be backed: the kernel would end the process once it has taken the most.

    Raises
    ------
    HostMemoryError
        Names the limit.
    """
    swap = re.search(r"^SwapTotal: +(\d+) kB", file_text("/proc/meminfo") or "", re.M)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + (int(swap[1]) << 10 if swap else 0)
    group = cgroup_limit()
    limit = machine if group is None else min(machine, group)
    if nbytes > limit:
        whose = "the control group's limit is" if limit == group else "the machine has"
        more = ", or raise it (memory.max, a container's --memory)" if limit == group else ""
        raise HostMemoryError(
            f"cannot back {nbytes} bytes of host memory with pages: {whose} {limit} bytes; ask for less{more}"
        )
