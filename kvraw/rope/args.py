"""The argument block of the rotary kernels: the numpy twin of ``kvraw/ptx/rope_args.h``."""

from __future__ import annotations

import numpy as np

__all__ = ["ROPE"]

HEADS = 4  # heads that a thread takes
INTERLEAVED, OLD_I32, NEW_I32, CHECK, OLD_RANGE, NEW_RANGE = 1, 2, 4, 8, 16, 32

ROPE = np.dtype(
    [
        *[(name, np.uint64) for name in ("key", "cache", "old_positions", "new_positions", "status", "units")],
        *[(name, np.uint64) for name in ("tokens", "key_layer", "key_token", "key_head", "cache_row", "limit")],
        *[(name, np.uint64) for name in ("tokens_magic", "groups_magic", "vectors_magic")],
        *[(name, np.uint32) for name in ("tokens_shift", "groups_shift", "vectors_shift")],
        *[(name, np.uint32) for name in ("groups", "vectors", "heads", "half", "flags")],
    ],
    align=True,
)
