"""The codec's kernels on a GPU."""

from __future__ import annotations

import functools
from typing import Any

from kvraw.codec import args
from kvraw.codec.operands import Job
from kvraw.copying.kernel_args import divider
from kvraw.copying.launch import Launch
from kvraw.copying.transfer import Transfer
from kvraw.ptx.loader import read_ptx
from kvraw.runtime.module import ArgumentBlock, Kernel

__all__ = ["TENSORS", "launch_of", "run_job", "run_pack"]

TENSORS = ("symbols", "cdf", "bytes", "lengths")  # fields of the block that take the addresses of a call's tensors

PACK_THREADS = 256


@functools.cache
def stream_kernel(what: str, size: int) -> Kernel:
    """A kernel for alphabets of up to `size` symbols."""
    return Kernel(read_ptx(f"codec_{what}_a{size}.ptx"), f"kvraw_codec_{what}_a{size}")


@functools.cache
def pack_kernel() -> Kernel:
    """The kernel that puts streams back to back."""
    return Kernel(read_ptx("codec_pack.ptx"), "kvraw_codec_pack")


def fill(job: Job) -> ArgumentBlock:
    """The argument block of a job."""
    block = ArgumentBlock(args.CODEC)
    r = block.record[0]
    r["symbols"], r["cdf"] = job.symbols.address, job.cdf.address
    r["symbol_layer"], r["symbol_token"], r["symbol_channel"] = job.symbols.strides
    r["streams"], r["tokens"], r["channels"], r["alphabet"] = job.streams, job.tokens, job.channels, job.alphabet
    r["tokens_magic"], r["tokens_shift"] = divider(max(job.tokens, 1))
    r["flags"] = job.flags
    if job.data is not None and job.lengths is not None:
        r["bytes"], r["bytes_size"], r["row"] = job.data.address, job.data.nbytes, job.row
        r["lengths"] = job.lengths.address
    return block


def launch_of(what: str, job: Job) -> Launch:
    """The launch of "cdf", "encode" or "decode" for a job with streams; it holds no tensor."""
    assert job.device is not None
    size = 32 if job.alphabet <= 32 else 64 if job.alphabet <= 64 else 256
    threads = 32 if size > 64 else 64  # as in codec_args.h
    error = job.without_owners().error
    ctas = -(-job.streams // threads)
    return Launch(job.device, stream_kernel(what, size), fill(job), ctas, threads, error, TENSORS)


def run_job(what: str, job: Job, stream: int, refs: tuple[object, ...] = (), on_done: Any = None) -> Transfer:
    """Enqueue "cdf", "encode" or "decode"."""
    if job.streams == 0:
        return Transfer()
    return launch_of(what, job).enqueue(stream, (job, *refs), on_done=on_done)


def run_pack(job: Job, ends: int, packed: int, size: int, stream: int, refs: tuple[object, ...] = ()) -> Transfer:
    """Enqueue the move of a job's streams to `packed`, by the int64 inclusive prefix sums at `ends`."""
    if job.streams == 0:
        return Transfer()
    assert job.device is not None
    block = fill(job)
    block.record["ends"], block.record["packed"], block.record["packed_size"] = ends, packed, size
    ctas = -(-job.streams // (PACK_THREADS // 32))
    error = job.without_owners().error
    return Launch(job.device, pack_kernel(), block, ctas, PACK_THREADS, error).enqueue(stream, (job, *refs))
