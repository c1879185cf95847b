"""The compiled runner of programs. Imports numba: imported on first use only.

One function whose arguments are the address of a program's header and an int64 vector of ids, called through its entry
point: 0.1 us from Python, where numba's dispatcher takes 0.2 and ctypes 0.3 to 0.4, and arrays one by one 0.05 each.
It keeps the GIL, or gives it away once, at the first driver call, by a word of the header: this costs 0.03 us where
nobody wants it, and needs no second compilation. It cannot raise: all that it meets is a result in the header.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from kvraw.runtime import program_rows as pr
from kvraw.runtime.jit import jit

__all__ = ["entry_point"]

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_P = ir.IntType(8).as_pointer()

LAUNCH, COPY, BATCH, COPY_2D, MEMSET, RECORD = pr.LAUNCH, pr.COPY, pr.BATCH, pr.COPY_2D, pr.MEMSET, pr.RECORD
WAIT, REACHED, UNCAPTURED, ON_DEVICE = pr.WAIT, pr.REACHED, pr.UNCAPTURED, pr.ON_DEVICE
SAME_MEMORY, EACH = pr.SAME_MEMORY, pr.EACH
CHECK, WRITE, DRIVER_ROWS = pr.CHECK, pr.WRITE, pr.DRIVER_ROWS
SKIP_NEGATIVE, DISTINCT, OUT_OF_RANGE, DUPLICATE = pr.SKIP_NEGATIVE, pr.DISTINCT, pr.OUT_OF_RANGE, pr.DUPLICATE
ENDED, NOT_READY, NO_CONTEXT, NO_INDEX, EXCHANGE = pr.ENDED, pr.NOT_READY, pr.NO_CONTEXT, pr.NO_INDEX, 8 * pr.EXCHANGE
# Of the header and of a row, in bytes.
ROWS, ROW_COUNT, LINKS, LINK_COUNT, VALUES, RELEASE, FUNCTIONS, FAILED_ROW, RESULT, DETAIL = (8 * k for k in range(10))
MODE, ATTRIBUTES, ATTRIBUTES_AT = 8 * pr.MODE, 8 * pr.ATTRIBUTES, 8 * pr.ATTRIBUTES_AT
FAILED_COPY, COPY_2D_AT, STATUS = 8 * pr.FAILED_COPY, 8 * pr.COPY_2D_AT, 8 * pr.STATUS
ROW = 8 * pr.WORDS
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_


@intrinsic
def _load(typingctx: Any, address: Any) -> Any:
    """The word at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(builder.inttoptr(args[0], _I64.as_pointer()))
        value.align = 1
        return value

    return types.int64(types.int64), codegen


@intrinsic
def _load_int32(typingctx: Any, address: Any) -> Any:
    """The signed 32-bit integer at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(builder.inttoptr(args[0], _I32.as_pointer()))
        value.align = 1
        return builder.sext(value, _I64)

    return types.int64(types.int64), codegen


@intrinsic
def _store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a word to an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store = builder.store(args[1], builder.inttoptr(args[0], _I64.as_pointer()))
        store.align = 1
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _start_of(typingctx: Any, vector: Any) -> Any:
    """Address of a vector's first element."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(array.data, _I64)

    return types.int64(vector), codegen


@intrinsic
def _release(typingctx: Any) -> Any:
    """Give the GIL away; what `_acquire` takes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.get_python_api(builder).save_thread(), _I64)

    return types.int64(), codegen


@intrinsic
def _acquire(typingctx: Any, state: Any) -> Any:
    """Have the GIL again."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        context.get_python_api(builder).restore_thread(builder.inttoptr(args[0], _P))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _function(kinds: str) -> Callable[[Any, Any, Any, Any], Any]:
    """Code for a call by address of a C function that returns an int; arguments are l: 64, i: 32, b: 8 bits, 1: one."""
    widths = {"l": _I64, "i": _I32, "b": ir.IntType(8), "1": _I32}

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.FunctionType(_I32, [widths[k] for k in kinds]).as_pointer())
        given = iter(args[1:])
        passed = []
        for kind in kinds:
            value = _I32(1) if kind == "1" else next(given)
            passed.append(builder.trunc(value, widths[kind]) if kind in "ib" else value)
        return builder.zext(builder.call(pointer, passed), _I64)

    return codegen


def _integers(count: int) -> Any:
    return types.int64(*[types.int64] * count)


@intrinsic
def _launch(t: Any, f: Any, kernel: Any, blocks: Any, threads: Any, shared: Any, stream: Any, params: Any) -> Any:
    code = _function("li11i11illl")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return code(context, builder, signature, [*args, _I64(0)])

    return _integers(7), codegen


@intrinsic
def _call1(t: Any, f: Any, a: Any) -> Any:
    return _integers(2), _function("l")


@intrinsic
def _call2(t: Any, f: Any, a: Any, b: Any) -> Any:
    return _integers(3), _function("ll")


@intrinsic
def _wait(t: Any, f: Any, stream: Any, event: Any, flags: Any) -> Any:
    return _integers(4), _function("lli")


@intrinsic
def _attribute(t: Any, f: Any, answer: Any, what: Any, address: Any) -> Any:
    return _integers(4), _function("lil")


@intrinsic
def _memset(t: Any, f: Any, dst: Any, value: Any, nbytes: Any, stream: Any) -> Any:
    return _integers(5), _function("lbll")


@intrinsic
def _copy(t: Any, f: Any, dst: Any, src: Any, nbytes: Any, stream: Any) -> Any:
    return _integers(5), _function("llll")


@intrinsic
def _call9(t: Any, f: Any, a: Any, b: Any, c: Any, d: Any, e: Any, g: Any, h: Any, i: Any, j: Any) -> Any:
    return _integers(10), _function("lllllllll")


def _check_source(row: Any) -> Any:
    """What ids are, and the place of the first that is so; 0: they are in order."""
    ids, count, width, limit, flags, marks = (
        _load(row + 8),
        _load(row + 16),
        _load(row + 24),
        _load(row + 32),
        _load(row + 40),
        _load(row + 48),
    )
    skip = flags & SKIP_NEGATIVE
    for k in range(count):
        value = _load(ids + 8 * k) if width == 8 else _load_int32(ids + 4 * k)
        if value >= limit or (value < 0 and not skip):
            return OUT_OF_RANGE, k
    if not flags & DISTINCT:
        return 0, 0
    marked = count
    for k in range(count):
        value = _load(ids + 8 * k) if width == 8 else _load_int32(ids + 4 * k)
        if value >= 0:
            at, bit = marks + 8 * (value >> 6), 1 << (value & 63)
            word = _load(at)
            if word & bit:
                marked = k
                break
            _store(at, word | bit)
    for k in range(marked):
        value = _load(ids + 8 * k) if width == 8 else _load_int32(ids + 4 * k)
        if value >= 0:
            _store(marks + 8 * (value >> 6), 0)
    if marked < count:
        return DUPLICATE, marked
    return 0, 0


_check = jit(_check_source, error_model="numpy")


def _run_source(header: Any, ids: Any) -> Any:
    values, functions, rows = _load(header + VALUES), _load(header + FUNCTIONS), _load(header + ROWS)
    _store(values, _start_of(ids))
    _store(values + 8, ids.size)
    link = _load(header + LINKS)
    for _ in range(_load(header + LINK_COUNT)):
        _store(_load(link), _load(_load(link + 8)) + _load(link + 16))
        link += 24
    count, release = _load(header + ROW_COUNT), _load(header + RELEASE)
    state = result = detail = k = 0
    while k < count:
        row = rows + ROW * k
        op = _load(row)
        a, b, c, d, e = _load(row + 8), _load(row + 16), _load(row + 24), _load(row + 32), _load(row + 40)
        if release and state == 0 and op <= DRIVER_ROWS:
            state = _release()
        f = _load(functions + 8 * op)
        if op == LAUNCH:
            if b:
                result = _launch(f, a, b, c, d, e, _load(row + 48))
        elif op == COPY:
            if c:
                result = _copy(f, a, b, c, d)
        elif op == RECORD:
            result = _call2(f, a, b)
        elif op == WAIT:
            result = _wait(f, a, b, 0)
        elif op == MEMSET:
            if c:
                result = _memset(f, a, b, c, d)
        elif op == BATCH:
            if d:
                _store(header + FAILED_COPY, NO_INDEX)
                result = _call9(f, a, b, c, d, header + ATTRIBUTES, header + ATTRIBUTES_AT, 1, header + FAILED_COPY, e)
                detail = _load(header + FAILED_COPY)
        elif op == EACH:
            for j in range(d):
                size = _load(c + 8 * j)
                if size and result == 0:
                    result = _copy(f, _load(a + 8 * j), _load(b + 8 * j), size, e)
        elif op == COPY_2D:
            if e and _load(row + 48):
                s = header + COPY_2D_AT
                _store(s + 32, c)
                _store(s + 48, d)
                _store(s + 88, a)
                _store(s + 104, b)
                _store(s + 112, e)
                _store(s + 120, _load(row + 48))
                result = _call2(f, s, _load(row + 56))
        elif op == REACHED:
            exchange = _load(functions + EXCHANGE)
            _store(header + MODE, RELAXED)
            _call1(exchange, header + MODE)
            result = _call1(f, a)
            _call1(exchange, header + MODE)
            if result == NOT_READY:
                result = ENDED
        elif op == UNCAPTURED:
            _store(header + STATUS, 0)
            result = _call2(f, a, header + STATUS)
            if result == 0 and _load(header + STATUS) != 0:
                result = ENDED
        elif op == ON_DEVICE:
            _store(header + STATUS, 0)
            result = _call1(f, header + STATUS)
            if result == NO_CONTEXT or (result == 0 and _load(header + STATUS) != a):
                result = ENDED
        elif op == SAME_MEMORY:
            _store(header + STATUS, 0)
            if _attribute(f, header + STATUS, BUFFER_ID, a) != 0 or _load(header + STATUS) != b:
                result = ENDED
        elif op == CHECK:
            result, detail = _check(row)
        elif op == WRITE:
            b += d * _load(row + 48)
            for j in range(c):
                _store(a + 8 * j, (_load(b + 8 * j) if d == 8 else _load_int32(b + 4 * j)) + e)
        if result != 0:
            break
        k += 1
    if state != 0:
        _acquire(state)
    if result == 0:
        return 0
    _store(header + FAILED_ROW, k)
    _store(header + RESULT, result)
    _store(header + DETAIL, detail)
    return 1


def entry_point() -> Callable[[int, np.ndarray], int]:
    """Compile the runner, or load it from the disk's cache; it takes a header's address and int64 ids without gaps."""
    compiled = jit(_run_source, nogil=False, error_model="numpy")
    entry: Callable[[int, np.ndarray], int] = compiled.compile((types.int64, types.Array(types.int64, 1, "C")))
    return entry
