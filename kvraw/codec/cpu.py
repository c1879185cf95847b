"""The codec on the CPU: numba kernels on the CPU engine's threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from kvraw.arrays import TensorView, host_bytes
from kvraw.codec import args
from kvraw.codec.operands import Job
from kvraw.copying.cpu import in_parts
from kvraw.runtime import fork

__all__ = ["pack", "run_job"]

_SPLIT_SYMBOLS = 1 << 15  # fewer are done by the calling thread
_NO_BYTES = np.zeros(0, np.uint8)


@functools.cache
def _kernels() -> ModuleType:
    try:
        with fork.undivided():
            from kvraw.codec import cpu_kernels
    except ImportError as error:
        raise ImportError(f"the codec on the CPU needs numba, which cannot be imported: {error}") from error
    return cpu_kernels


def _flat(view: TensorView, dtype: Any) -> Any:
    return host_bytes(view).view(dtype)


def _collect(job: Job, work: Callable[[int, int], Any], count: int, symbols: int) -> None:
    """Do all units on the engine's threads; the first fault becomes an error."""
    faults: list[tuple[int, int, int]] = []

    def part(begin: int, end: int) -> None:
        fault = work(begin, end)
        if fault[0]:
            faults.append((int(fault[1]), int(fault[0]), int(fault[2])))

    in_parts(part, count, symbols // _SPLIT_SYMBOLS)
    if faults:
        place, kind, value = min(faults)
        raise job.error(kind, place, value % 2**64)


def run_job(what: str, job: Job) -> None:
    """Carry out "cdf", "encode" or "decode"."""
    if job.streams == 0:
        return
    kernels = _kernels()
    symbols, cdf = host_bytes(job.symbols), _flat(job.cdf, np.uint16)
    counts = np.array([job.tokens, job.channels, job.alphabet, job.row, job.flags, *job.symbols.strides], np.int64)
    if what == "cdf":
        work = lambda begin, end: kernels.count(symbols, cdf, counts, begin, end)  # noqa: E731
    else:
        assert job.data is not None
        assert job.lengths is not None
        data = host_bytes(job.data)
        lengths = _flat(job.lengths, np.int64 if job.flags & args.WIDE else np.int32)
        kernel = kernels.encode if what == "encode" else kernels.decode
        work = lambda begin, end: kernel(symbols, cdf, data, lengths, counts, begin, end)  # noqa: E731
    _collect(job, work, job.streams, job.streams * max(job.tokens, 1))


def pack(slots: Any, ends: Any) -> Any:
    """Streams in slots [streams, bytes] back to back, by their inclusive prefix sums."""
    packed = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    if packed.size:
        kernel = _kernels().pack
        in_parts(
            lambda a, b: kernel(slots.reshape(-1), ends, packed, slots.shape[1], a, b), len(ends), packed.size >> 16
        )
    return packed
