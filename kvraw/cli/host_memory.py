"""Kinds of host memory that this machine gives to this process, by asking for a little of each."""

from __future__ import annotations

import errno
import mmap
from typing import Any

from kvraw.errors import HostMemoryError
from kvraw.runtime.host import backing, libc
from kvraw.runtime.host.buffer import HostBuffer
from kvraw.runtime.host.mapping import HostOptions
from kvraw.runtime.host.populate import populate_threads

__all__ = ["host_memory", "host_memory_row"]

SAMPLE = 8 << 20


def _asked(options: HostOptions, nbytes: int = mmap.PAGESIZE) -> str | None:
    """Why memory is not to be had; None: it is. Nothing of it is touched."""
    try:
        HostBuffer(nbytes, pin=False, options=options).close()
    except (HostMemoryError, OSError) as error:
        return str(error)
    return None


def _populates() -> bool:
    try:
        address = libc.map_anonymous(mmap.PAGESIZE)
        try:
            libc.advise(address, mmap.PAGESIZE, libc.POPULATE_WRITE)
        finally:
            libc.unmap(address, mmap.PAGESIZE)
    except OSError as error:
        return error.errno != errno.EINVAL
    return True


def host_memory() -> dict[str, Any]:
    """A sample of the default kind as it really came, and for each other kind why it is not to be had (None: it is)."""
    sample: dict[str, Any] = {}
    why: dict[str, str | None] = {"anonymous": None}
    try:
        with HostBuffer(SAMPLE, pin=False, options=HostOptions(populate=True)) as buffer:
            info = buffer.info()
            keys = ("nbytes", "pinned", "huge_pages", "huge_page_bytes", "node", "nodes", "registrations", "degraded")
            sample = {key: info[key] for key in keys}
    except HostMemoryError as error:
        why["anonymous"] = str(error)
    why["huge-2MiB"] = _asked(HostOptions(kind="huge-2MiB", strict=True), 2 << 20)
    why["huge-1GiB"] = _asked(HostOptions(kind="huge-1GiB", strict=True), 1 << 30)
    why["shared"] = _asked(HostOptions(kind="shared"))
    nodes = backing.nodes()
    bound = _asked(HostOptions(node=nodes[0], strict=True)) if nodes else "the kernel tells of no NUMA nodes"
    return {
        "sample": sample,
        "kinds": why,
        "numa_nodes": nodes,
        "numa_binding": bound,
        "populate_call": _populates(),
        "populate_threads": populate_threads(),
    }


def host_memory_row(report: dict[str, Any]) -> str:
    """The report in a line."""
    if "error" in report:
        return str(report["error"])
    sample = report["sample"]
    if sample:
        huge = sample["huge_page_bytes"]
        pages = "unknown" if huge is None else f"{huge * 100 // sample['nbytes']}%"
        text = f"transparent huge pages obtained: {pages}"
    else:
        text = f"not to be had: {report['kinds']['anonymous']}"
    given = [kind for kind, why in report["kinds"].items() if why is None and kind != "anonymous"]
    refused = [kind for kind, why in report["kinds"].items() if why is not None]
    bound = "can be bound" if report["numa_binding"] is None else "cannot be bound"
    text += f"; kinds: {', '.join(['anonymous', *given])}" + (f"; not: {', '.join(refused)}" if refused else "")
    text += f"; NUMA nodes {len(report['numa_nodes']) or 'unknown'}, {bound}; {report['populate_threads']} threads "
    return text + ("populate" if report["populate_call"] else "touch pages (Linux before 5.14)")
