"""The CPU engine's numba kernels: raw addresses, GIL released. Imported on first use only."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from kvraw.copying import cpu_plain
from kvraw.runtime.jit import COMPILED, jit, primitive

__all__ = ["copy_batch", "copy_items"]

_LINE = 64  # bytes of a cache line: the unit of a streaming store
_STREAM_FROM = 192  # shorter runs: the unaligned ends outweigh what streaming saves


@primitive(cpu_plain.memmove)
def _memmove(typingctx: Any, dst: Any, src: Any, nbytes: Any) -> Any:
    """Copy bytes between two addresses, which may overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        to, source = builder.inttoptr(args[0], pointer), builder.inttoptr(args[1], pointer)
        cgutils.raw_memmove(builder, to, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.int64), codegen


@primitive(cpu_plain.memmove)
def _memcpy(typingctx: Any, dst: Any, src: Any, nbytes: Any) -> Any:
    """Copy bytes between two addresses that do not overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        to, source = builder.inttoptr(args[0], pointer), builder.inttoptr(args[1], pointer)
        cgutils.raw_memcpy(builder, to, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.int64), codegen


@intrinsic
def _stream_line(typingctx: Any, dst: Any, src: Any) -> Any:
    """Copy one line past the caches; `dst` is aligned to a line."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), _LINE // 8)
        value = builder.load(builder.inttoptr(args[1], line.as_pointer()))
        value.align = 1
        store = builder.store(value, builder.inttoptr(args[0], line.as_pointer()))
        store.align = _LINE
        flag = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", flag)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), codegen


@primitive(cpu_plain.fence)
def _fence(typingctx: Any) -> Any:
    """Order streaming stores before whatever follows; they are not ordered by themselves."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _copy_run_source(dst: Any, src: Any, nbytes: Any, stream: Any) -> None:
    if not stream or nbytes < _STREAM_FROM or not COMPILED:
        _memcpy(dst, src, nbytes)
        return
    head = (_LINE - np.int64(dst & np.uint64(_LINE - 1))) & (_LINE - 1)
    if head:
        _memcpy(dst, src, head)
    lines = (nbytes - head) // _LINE
    at = np.uint64(head)
    for _ in range(lines):
        _stream_line(dst + at, src + at)
        at += np.uint64(_LINE)
    rest = nbytes - head - lines * _LINE
    if rest:
        _memcpy(dst + at, src + at, rest)


_copy_run = numba.njit(nogil=True, inline="never")(_copy_run_source)


def _copy_items_source(
    table: Any,  # int64 [2, 6]: outer, inner, page, table_outer, skip_negative, indexed; source then destination
    dims: Any,  # int64 [4, 5]: size, src, dst, src_table, dst_table; outermost first
    src_bases: Any,
    dst_bases: Any,
    src_index: Any,
    dst_index: Any,
    first: Any,
    begin: Any,  # units of work: item * dims[0].size + position along dims[0]
    end: Any,
    run: Any,
    stream: Any,
) -> None:
    outermost = dims[0, 0]
    for unit in range(begin, end):
        item = first + unit // outermost
        a = unit % outermost
        i = src_index[item] if table[0, 5] else item
        j = dst_index[item] if table[1, 5] else item
        if (i < 0 and table[0, 4]) or (j < 0 and table[1, 4]):
            continue
        src_outer = i // table[0, 2]
        src_inner = i - src_outer * table[0, 2]
        dst_outer = j // table[1, 2]
        dst_inner = j - dst_outer * table[1, 2]
        src_at = src_outer * table[0, 0] + src_inner * table[0, 1] + a * dims[0, 1]
        dst_at = dst_outer * table[1, 0] + dst_inner * table[1, 1] + a * dims[0, 2]
        src_entry = src_outer * table[0, 3] + a * dims[0, 3]
        dst_entry = dst_outer * table[1, 3] + a * dims[0, 4]
        for b in range(dims[1, 0]):
            for c in range(dims[2, 0]):
                source = (
                    src_bases[src_entry + b * dims[1, 3] + c * dims[2, 3]]
                    + np.uint64(src_at + b * dims[1, 1] + c * dims[2, 1])
                )  # fmt: skip
                target = (
                    dst_bases[dst_entry + b * dims[1, 4] + c * dims[2, 4]]
                    + np.uint64(dst_at + b * dims[1, 2] + c * dims[2, 2])
                )  # fmt: skip
                for _ in range(dims[3, 0]):
                    _copy_run(target, source, run, stream)
                    source += np.uint64(dims[3, 1])
                    target += np.uint64(dims[3, 2])
    if stream:
        _fence()


def _copy_batch_source(dst: Any, src: Any, sizes: Any, begin: Any, end: Any, stream: Any) -> None:
    for k in range(begin, end):
        n = np.int64(sizes[k])
        apart = src[k] + sizes[k] <= dst[k] or dst[k] + sizes[k] <= src[k]
        if apart:
            _copy_run(dst[k], src[k], n, stream)
        else:
            _memmove(dst[k], src[k], n)
    if stream:
        _fence()


copy_items = jit(_copy_items_source)
copy_batch = jit(_copy_batch_source)
