"""The argument blocks of the codec's kernels: numpy twins of `codec_args.h` and `quantize_args.h` in `kvraw/ptx`."""

from __future__ import annotations

import numpy as np

__all__ = ["CODEC", "MOST_LAYERS", "QUANTIZE"]

PACKED, WIDE, CLAMP, SIGNED = 1, 2, 4, 8
BAD_SYMBOL, TOO_SMALL, BAD_CDF, BAD_LENGTH, NOT_FINITE = 1, 2, 3, 4, 5
FP32, FP16, BF16 = 0, 1, 2
MOST_LAYERS = 512  # planes * layers of a chunk, whose bins travel in the block

CODEC = np.dtype(
    [
        *[(name, np.uint64) for name in ("cdf", "symbols", "symbol_layer", "symbol_token", "symbol_channel")],
        *[(name, np.uint64) for name in ("bytes", "bytes_size", "row", "lengths", "ends", "packed", "packed_size")],
        *[(name, np.uint64) for name in ("status", "streams", "tokens_magic")],
        *[(name, np.uint32) for name in ("tokens", "tokens_shift", "channels", "alphabet", "flags", "reserved")],
    ],
    align=True,
)
QUANTIZE = np.dtype(
    [
        *[(name, np.uint64) for name in ("values", "value_layer", "value_token", "symbols", "maxima", "status")],
        *[(name, np.uint32) for name in ("tokens", "channels", "dtype", "reserved")],
        ("middle", np.uint8, MOST_LAYERS),
    ],
    align=True,
)
