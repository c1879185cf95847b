"""The argument block of the rotary kernels: the numpy twin of ``kvraw/ptx/rope_args.h``."""

from __future__ import annotations

import numpy as np

__all__ = ["ROPE"]

HEADS = 4  # heads that a thread takes
INTERLEAVED, OLD_I32, NEW_I32, CHECK = 1, 2, 4, 8

ROPE = np.dtype(
    [
        *[(name, np.uint64) for name in ("key", "cache", "old_positions", "new_positions", "status", "units")],
        *[(name, np.uint64) for name in ("key_token", "key_head", "cache_row", "limit", "groups_magic")],
        ("vectors_magic", np.uint64),
        *[(name, np.uint32) for name in ("groups_shift", "vectors_shift", "groups", "vectors", "heads", "half")],
        *[(name, np.uint32) for name in ("flags", "reserved")],
    ],
    align=True,
)
