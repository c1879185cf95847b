"""What a test may leave behind: mappings of this process, names of shared memory, registrations."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Iterator

from kvraw.runtime.driver import driver_here
from kvraw.runtime.host import registration, shm

_WRITABLE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw")


def mapped() -> int:
    """Bytes of this process's writable mappings."""
    gc.collect()
    with open("/proc/self/maps") as file:
        spans = [found.groups() for line in file if (found := _WRITABLE.match(line))]
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans)


def segments() -> list[str]:
    """Segments of this process; tests beside this one have others."""
    return sorted(name for name in os.listdir(shm.FOLDER) if str(os.getpid()) in name)


def registered_bytes() -> tuple[int, int]:
    """Number and bytes of the registrations that kvraw holds with the driver in use."""
    d = driver_here()
    pieces = [] if d is None else [piece for entry in registration._book(d).entries for piece in entry.pieces]
    return len(pieces), sum(end - begin for begin, end in pieces)


@contextlib.contextmanager
def nothing_left(nbytes: int) -> Iterator[None]:
    """Of the memory of a pool of this size, nothing may stay."""
    mapped_before, others_before = mapped(), (segments(), registered_bytes())
    yield
    # Heaps and the stacks of threads may grow meanwhile, by less than a pool that stayed would be.
    assert mapped() - mapped_before < nbytes
    assert (segments(), registered_bytes()) == others_before
