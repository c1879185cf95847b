"""A limit to the memory that stored data may ask for: its header is believed up to there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvraw.checks import integer
from kvraw.errors import BoundsError, HostMemoryError

__all__ = ["DECODE_FACTOR", "DECODE_LIMIT", "memory", "new_array"]

DECODE_LIMIT = 256 << 20  # bytes that any stored data may decode to without being asked
DECODE_FACTOR = 1024  # or as many for each byte stored; chunks of one value come to some hundred


def new_array(name: str, shape: tuple[int, ...], dtype: Any, stored: int, limit: int | None) -> Any:
    """An array to decode `stored` bytes into.

    Raises
    ------
    BoundsError
        It would take more than `limit`; without one, more than `DECODE_LIMIT` and `DECODE_FACTOR` for each byte stored.
    HostMemoryError
        There is not as much memory.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    most = max(DECODE_LIMIT, DECODE_FACTOR * stored) if limit is None else integer("limit", limit)
    if nbytes > most:
        raise BoundsError(
            f"{name} has {stored} bytes and decodes to {nbytes}, limit is {most}; raise limit=, or pass out="
        )
    return memory(name, shape, dtype)


def memory(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """A new array, whatever its size; a lack of memory says what it was for."""
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        raise HostMemoryError(f"{name} decodes to shape {shape} of {np.dtype(dtype)}: {error}") from None
