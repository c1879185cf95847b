"""The argument block of the copy kernels: the numpy twin of ``kvraw/ptx/copy_args.h``."""

from __future__ import annotations

import numpy as np

from kvraw.copying.plan import MAX_DIMS, CopyPlan, Dim

__all__ = ["ARGS", "SIDE", "WORDS", "fill_plan", "fill_width", "pace_cost"]

WORDS = 448
SEGMENT_VECTORS = 128  # at 16 bytes: 2 KiB, what one lane addresses at a time

INDEX_INLINE, INDEX_I64, INDEX_I32, TABLE_INLINE, SKIP_NEGATIVE, CHECK = 1, 2, 4, 8, 16, 32

SIDE = np.dtype(
    [
        *[(name, np.uint64) for name in ("table", "index", "limit", "page", "page_magic")],
        *[(name, np.uint64) for name in ("outer", "inner", "table_outer")],
        ("stride", np.uint64, MAX_DIMS),
        ("table_stride", np.uint64, MAX_DIMS),
        ("page_shift", np.uint32),
        ("flags", np.uint32),
    ],
    align=True,
)
ARGS = np.dtype(
    [
        ("src", SIDE),
        ("dst", SIDE),
        ("size", np.uint64, MAX_DIMS),
        ("magic", np.uint64, MAX_DIMS),
        *[(name, np.uint64) for name in ("split", "split_magic", "run_vectors", "segments", "first_item", "status")],
        *[
            (name, np.uint64)
            for name in ("pace", "pace_slack", "pace_cost", "pace_mean", "pace_credit", "pace_other", "pace_extra")
        ],
        ("shift", np.uint32, MAX_DIMS),
        *[(name, np.uint32) for name in ("split_shift", "segment_vectors", "vector_magic", "reserved")],
        ("words", np.uint64, WORDS),
    ],
    align=True,
)


def _position(path: str, unit: int) -> int:
    """Where a field stands, counted in words of `unit` bytes."""
    at, dtype = 0, ARGS
    for name in path.split("."):
        assert dtype.fields is not None
        dtype, offset = dtype.fields[name][:2]
        at += offset
    return at // unit


# Positions of what changes from call to call, in the block seen as one uint64 (FLAGS: uint32) vector.
TABLE, INDEX = ([_position(f"{side}.{name}", 8) for side in ("src", "dst")] for name in ("table", "index"))
FLAGS = [_position(f"{side}.flags", 4) for side in ("src", "dst")]
SEGMENTS, FIRST_ITEM, STATUS, WORDS_AT = (_position(n, 8) for n in ("segments", "first_item", "status", "words"))
PACE, PACE_SLACK, PACE_COST = (_position(n, 8) for n in ("pace", "pace_slack", "pace_cost"))
PACE_MEAN, PACE_CREDIT, PACE_OTHER, PACE_EXTRA = (
    _position(n, 8) for n in ("pace_mean", "pace_credit", "pace_other", "pace_extra")
)
TICKS = 16  # a nanosecond of the block's


def divider(d: int) -> tuple[int, int]:
    """Multiplier and shift that divide any n < 2**63 by d: ``(n * 2 * magic >> 64) >> shift``.

    With shift = ceil(log2 d) and magic = ceil(2**(63 + shift) / d), the error magic*d - 2**(63 + shift) is below d,
    hence at most 2**shift, and n times it below 2**(63 + shift).
    """
    shift = (d - 1).bit_length()
    return -(-(1 << 63 + shift) // d), shift


def _bits(value: int) -> int:
    return value % 2**64


def fill_plan(args: np.ndarray, plan: CopyPlan) -> None:
    """Write what does not change between calls of a plan."""
    a = args[0]
    dims = [*plan.dims, *[Dim(1, 0, 0)] * (MAX_DIMS - len(plan.dims))]
    a["size"] = [d.size for d in dims]
    a["magic"], a["shift"] = zip(*(divider(d.size) for d in dims), strict=True)
    for name, side, stride, table in (
        ("src", plan.src_flat, [d.src for d in dims], [d.src_table for d in dims]),
        ("dst", plan.dst_flat, [d.dst for d in dims], [d.dst_table for d in dims]),
    ):
        magic, shift = divider(side.page)
        outer, inner = _bits(side.outer), _bits(side.inner)
        # As a whole, in the order of `SIDE`, whose first two and last change with the calls: a third of the time.
        a[name] = (
            *(0, 0, side.limit, side.page, magic, outer, inner, side.table_outer),
            *([_bits(x) for x in stride], [_bits(x) for x in table], shift, 0),
        )


def fill_width(args: np.ndarray, plan: CopyPlan, width: int) -> int:
    """Write how runs split into vectors of `width` bytes; returns the segments of one run."""
    a = args[0]
    vectors = plan.run_bytes // width
    split = -(-vectors // SEGMENT_VECTORS)
    segment = -(-vectors // split)
    if split > 1:
        # Whole lines of 128 bytes: a segment that began inside one would read it twice, over the link as well.
        line = 128 // width
        segment = min(-(-segment // line) * line, SEGMENT_VECTORS)
        split = -(-vectors // segment)
    a["run_vectors"], a["split"], a["segment_vectors"] = vectors, split, segment
    a["split_magic"], a["split_shift"] = divider(split)
    a["vector_magic"] = -(-(1 << 31) // segment)
    return split


def pace_cost(args: np.ndarray, width: int, rate: float) -> int:
    """The word that has kernels for accesses of `width` bytes keep to a rate in bytes a second; 0: none.

    Kernels count vectors by the segments, the last of which in a run may be shorter.
    """
    if not rate:
        return 0
    a = args[0]
    full = int(a["run_vectors"]) / (int(a["split"]) * int(a["segment_vectors"]))
    return max(1, round(256 * width * full * TICKS * 1e9 / rate))
