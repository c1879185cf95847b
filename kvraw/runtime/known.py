"""The driver's account of a range of memory, for copies that it refused: where they must be cut, and the words."""

from __future__ import annotations

from collections.abc import Iterable

from kvraw.errors import DriverError
from kvraw.runtime.driver import CudaDriver

__all__ = ["describe", "ends_within"]


def describe(d: CudaDriver, address: int, nbytes: int) -> str:
    """A range, and what the driver knows of its first byte, and of its last where that is something else."""
    text = f"{nbytes} bytes at {address:#x}"
    try:
        first, last = (d.pointer_info(at) for at in (address, address + max(nbytes, 1) - 1))
    except (DriverError, OverflowError):
        return f"{text} (the driver does not answer for it)"
    out = []
    for info in (first, last) if first != last and (not first or not last or first.base != last.base) else (first,):
        if info is None:
            out.append("pageable host memory")
            continue
        kind = "pinned host memory" if info.kind == "host" else f"{info.kind} memory of device {info.device}"
        out.append(f"{kind} [{info.base:#x}, {info.base + info.size:#x})")
    return f"{text} ({', ends in '.join(out)})"


def ends_within(d: CudaDriver, ranges: Iterable[tuple[int, int]]) -> set[int]:
    """Addresses strictly inside ranges (address, bytes) where allocations or registrations of anybody begin or end.

    Pinned islands inside pageable memory are not found.
    """
    out: set[int] = set()
    inside = range(0)
    for address, nbytes in ranges:
        at, end = address, address + nbytes
        while at < end and not (at in inside and end <= inside.stop):
            info = d.pointer_info(at)
            if info is None:
                last = d.pointer_info(end - 1)
                if last is not None and last.base > address:
                    out.add(last.base)
                break
            inside = range(info.base, info.base + info.size)
            if not at < inside.stop < end:
                break
            at = inside.stop
            if info.kind != "host" and d.pointer_info(at) is None:
                break  # over the end of device memory: the driver takes the rest for host memory, and faults there
            out.add(at)
    return out
