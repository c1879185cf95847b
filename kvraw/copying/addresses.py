"""Base addresses of one side of a copy, and what is known of the memory behind them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvraw.arrays import U64

__all__ = ["AddressTable"]


@dataclass(frozen=True, slots=True, eq=False)
class AddressTable:
    """Base addresses that were resolved: the driver is not asked about them again. Not changed once made.

    Attributes
    ----------
    host, seen : numpy.ndarray of uint64
        As the host and as the device know them.
    link : bool
        Host memory is among them.
    edges : tuple of int
        Where registrations that they lie in end, whoever made them: no copy may span one.
    pageable : bool
        Pageable host memory is among them, which `seen` has as 0: for the copy engine alone.
    bits : int
        The alignment of `seen`, all or-ed together or less; -1: not known.

    Examples
    --------
    >>> memory = np.zeros(64, np.uint8)
    >>> bases = np.array([memory.ctypes.data], np.uint64)
    >>> len(kvraw.Reached(bases, bases, link=True))
    1
    """

    host: U64
    seen: U64
    link: bool
    edges: tuple[int, ...] = ()
    pageable: bool = False
    bits: int = -1

    def __len__(self) -> int:
        return len(self.host)

    @property
    def alignment(self) -> int:
        """`bits`, worked out once."""
        bits = self.bits
        if bits < 0:
            bits = int(np.bitwise_or.reduce(self.seen)) & 15 if len(self.seen) else 0
            object.__setattr__(self, "bits", bits)
        return bits
