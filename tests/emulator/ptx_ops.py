"""The arithmetic of the accepted instructions: functions from arrays of source values to arrays of results.

`OPS` is closed: an opcode with its modifiers is either a key of it or unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.emulator.ptx_memory import Array
from tests.emulator.ptx_text import SIZES

DTYPES: dict[str, np.dtype[Any]] = {"pred": np.dtype(np.bool_)}
DTYPES |= {f"{k}{bits}": np.dtype(f"{'i' if k == 's' else 'u'}{bits // 8}") for k in "bus" for bits in (8, 16, 32, 64)}
DTYPES |= {f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)}


@dataclass(frozen=True, slots=True)
class Op:
    """What an instruction computes.

    `cc` among the types is the carry flag, which is no operand in the text. `wide` allows registers wider than the
    types: sources are truncated, results extended. `undefined` marks the lanes for which the ISA defines no result.
    """

    results: tuple[str, ...]
    sources: tuple[str, ...]
    function: Callable[..., Array | tuple[Array, ...]]
    undefined: Callable[..., Array] | None = None
    wide: bool = False


OPS: dict[str, Op] = {}
_INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
_BITS = ("b16", "b32", "b64")


def _as(array: Array, kind: str) -> Array:
    return array.astype(DTYPES[kind])


def _bits(kind: str) -> int:
    return SIZES[kind]


def _twice(kind: str) -> str:
    return f"{kind[0]}{2 * _bits(kind)}"


def _high_u64(a: Array, b: Array) -> Array:
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & low)
    result: Array = np.add(a1 * b1 + (middle >> half), other >> half)
    return result


def _high(kind: str) -> Callable[[Array, Array], Array]:
    if kind == "u64":
        return _high_u64
    if kind == "s64":

        def signed(a: Array, b: Array) -> Array:
            ua, ub = a.view(np.uint64), b.view(np.uint64)
            zero = np.uint64(0)
            high = _high_u64(ua, ub) - np.where(a < 0, ub, zero) - np.where(b < 0, ua, zero)
            return high.view(np.int64)

        return signed
    wide, shift = DTYPES[_twice(kind)], DTYPES[_twice(kind)].type(_bits(kind))
    return lambda a, b: _as(a.astype(wide) * b.astype(wide) >> shift, kind)


def _divide(kind: str) -> Callable[[Array, Array], Array]:
    def unsigned(a: Array, b: Array) -> Array:
        return np.floor_divide(a, np.where(b == 0, b.dtype.type(1), b))

    def signed(a: Array, b: Array) -> Array:
        magnitude = f"u{_bits(kind)}"
        quotient = unsigned(_as(np.abs(a), magnitude), _as(np.abs(b), magnitude))
        return _as(np.where((a < 0) != (b < 0), 0 - quotient, quotient), kind)

    return signed if kind[0] == "s" else unsigned


def _remainder(kind: str) -> Callable[[Array, Array], Array]:
    divide = _divide(kind)
    return lambda a, b: np.subtract(a, divide(a, b) * b)


def _shift_left(a: Array, b: Array) -> Array:
    width = a.dtype.itemsize * 8
    result: Array = np.where(b < width, a << (b & np.uint32(width - 1)).astype(a.dtype), a.dtype.type(0))
    return result


def _shift_right(a: Array, b: Array) -> Array:
    width = a.dtype.itemsize * 8
    near = a >> np.minimum(b, np.uint32(width - 1)).astype(a.dtype)
    result: Array = near if a.dtype.kind == "i" else np.where(b < width, near, a.dtype.type(0))
    return result


def _funnel(left: bool, wrap: bool) -> Callable[[Array, Array, Array], Array]:
    def shift(a: Array, b: Array, c: Array) -> Array:
        both = (_as(b, "u64") << np.uint64(32)) | a
        n = _as(c & np.uint32(31) if wrap else np.minimum(c, np.uint32(32)), "u64")
        return _as(both << n >> np.uint64(32) if left else both >> n, "b32")

    return shift


def _ones(count: Array, width: int) -> Array:
    """Masks of `count` low bits, at most `width`."""
    full = np.uint64((1 << width) - 1)
    result: Array = np.where(count >= width, full, (np.uint64(1) << (count & np.uint64(63))) - np.uint64(1))
    return result


def _extract(kind: str) -> Callable[[Array, Array, Array], Array]:
    width = _bits(kind)

    def extract(a: Array, b: Array, c: Array) -> Array:
        value = _as(a.view(DTYPES[f"u{width}"]), "u64")
        start, length = _as(b, "u64") & np.uint64(255), _as(c, "u64") & np.uint64(255)
        found = _shift_right(value, _as(start, "u32")) & _ones(length, width)
        if kind[0] == "s":
            top = np.minimum(start + length - np.uint64(1), np.uint64(width - 1))  # of length 0: unused
            negative = (length > 0) & (_shift_right(value, _as(top, "u32")) & np.uint64(1)).astype(np.bool_)
            # the sign fills all from the end of the field, or of the register
            taken = np.minimum(length, np.where(start < width, np.uint64(width) - start, np.uint64(0)))
            found = np.where(negative, found | ~_ones(taken, width), found)
        return _as(found, kind)

    return extract


def _insert(kind: str) -> Callable[[Array, Array, Array, Array], Array]:
    width = _bits(kind)

    def insert(a: Array, b: Array, c: Array, d: Array) -> Array:
        start, length = _as(c, "u32") & np.uint32(255), _as(d, "u64") & np.uint64(255)
        mask = _shift_left(_as(_ones(length, width), kind), start)
        return np.bitwise_or(b & ~mask, _shift_left(a, start) & mask)

    return insert


_PERMUTE = {  # bytes 3, 2, 1, 0 of the result by the two low bits of the selector
    ".f4e": ("3210", "4321", "5432", "6543"),
    ".b4e": ("5670", "6701", "7012", "0123"),
    ".rc8": ("0000", "1111", "2222", "3333"),
    ".ecl": ("3210", "3211", "3222", "3333"),
    ".ecr": ("0000", "1110", "2210", "3210"),
    ".rc16": ("1010", "3232", "1010", "3232"),
}


def _permute(mode: str) -> Callable[[Array, Array, Array], Array]:
    table = np.array([int(s, 16) for s in _PERMUTE.get(mode, ())], np.uint32)

    def permute(a: Array, b: Array, c: Array) -> Array:
        both = (_as(b, "u64") << np.uint64(32)) | a
        selector = table[c & np.uint32(3)] if mode else c
        result = np.zeros_like(a)
        for i in range(4):
            choice = _as(selector >> np.uint32(4 * i), "u64") & np.uint64(15)
            byte = _as(both >> ((choice & np.uint64(7)) * np.uint64(8)), "u32") & np.uint32(255)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            result |= np.where(choice & np.uint64(8), sign, byte) << np.uint32(8 * i)
        return result

    return permute


def _popcount(a: Array) -> Array:
    bits = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1), axis=1)
    count: Array = bits.sum(1, dtype=np.uint32)
    return count


def _leading_zeros(a: Array) -> Array:
    width = a.dtype.itemsize * 8
    for shift in (1, 2, 4, 8, 16, 32)[: width.bit_length() - 1]:
        a = a | (a >> a.dtype.type(shift))  # all bits below the highest
    result: Array = np.subtract(np.uint32(width), _popcount(a))
    return result


def _reverse(a: Array) -> Array:
    order = np.ascontiguousarray(a.byteswap()).view(np.uint8).reshape(len(a), -1)
    bits = np.unpackbits(order, axis=1, bitorder="little")
    return np.packbits(bits, axis=1, bitorder="big").view(a.dtype).reshape(len(a))


def _carry(kind: str, subtract: bool, carry_in: bool) -> Callable[..., tuple[Array, Array]]:
    unsigned = DTYPES[f"u{_bits(kind)}"]

    def run(a: Array, b: Array, *flag: Array) -> tuple[Array, Array]:
        ua, ub = a.view(unsigned), b.view(unsigned)
        extra = flag[0].astype(unsigned) if carry_in else np.zeros_like(ua)
        if subtract:
            result = ua - ub - extra
            out = (ua < ub) | ((ua == ub) & extra.astype(np.bool_))
        else:
            partial = ua + ub
            result = partial + extra
            out = (partial < ua) | (result < partial)
        return result.view(a.dtype), out

    return run


def _first(function: Callable[..., tuple[Array, Array]]) -> Callable[..., Array]:
    return lambda *sources: function(*sources)[0]


def _saturate(to: str, source: str) -> Callable[[Array], Array] | None:
    """Return the conversion that clamps, or None where there is nothing to clamp and so no such instruction."""
    have, want = np.iinfo(DTYPES[source]), np.iinfo(DTYPES[to])
    low, high = max(want.min, have.min), min(want.max, have.max)
    if (low, high) == (have.min, have.max):
        return None
    limits = DTYPES[source].type(low), DTYPES[source].type(high)
    return lambda a: _as(np.clip(a, *limits), to)


def _absolute(a: Array) -> Array:
    return np.where(a < 0, 0 - a, a)


def _arithmetic() -> None:
    for kind in _INTEGERS:
        two, three, wide = (kind, kind), (kind, kind, kind), _bits(kind) < 64
        high = _high(kind)
        OPS[f"add.{kind}"] = Op((kind,), two, np.add)
        OPS[f"sub.{kind}"] = Op((kind,), two, np.subtract)
        OPS[f"mul.lo.{kind}"] = Op((kind,), two, np.multiply)
        OPS[f"mul.hi.{kind}"] = Op((kind,), two, high)
        OPS[f"mad.lo.{kind}"] = Op((kind,), three, lambda a, b, c: a * b + c)
        OPS[f"mad.hi.{kind}"] = Op((kind,), three, lambda a, b, c, high=high: high(a, b) + c)
        if wide:
            twice = _twice(kind)
            multiply = (lambda t: lambda a, b: _as(a, t) * _as(b, t))(twice)
            OPS[f"mul.wide.{kind}"] = Op((twice,), two, multiply)
            OPS[f"mad.wide.{kind}"] = Op((twice,), (*two, twice), lambda a, b, c, m=multiply: m(a, b) + c)
        OPS[f"div.{kind}"] = Op((kind,), two, _divide(kind), undefined=lambda a, b: b == 0)
        OPS[f"rem.{kind}"] = Op((kind,), two, _remainder(kind), undefined=lambda a, b: b == 0)
        OPS[f"min.{kind}"] = Op((kind,), two, np.minimum)
        OPS[f"max.{kind}"] = Op((kind,), two, np.maximum)
        if kind[0] == "s":
            OPS[f"neg.{kind}"] = Op((kind,), (kind,), lambda a: 0 - a)
            OPS[f"abs.{kind}"] = Op((kind,), (kind,), _absolute)
    for kind in ("u32", "s32", "u64", "s64"):
        for name, subtract in (("add", False), ("sub", True)):
            OPS[f"{name}.cc.{kind}"] = Op((kind, "cc"), (kind, kind), _carry(kind, subtract, False))
            chained = _carry(kind, subtract, True)
            OPS[f"{name}c.{kind}"] = Op((kind,), (kind, kind, "cc"), _first(chained))
            OPS[f"{name}c.cc.{kind}"] = Op((kind, "cc"), (kind, kind, "cc"), chained)


def _logic() -> None:
    for kind in ("pred", *_BITS):
        OPS[f"and.{kind}"] = Op((kind,), (kind, kind), np.bitwise_and)
        OPS[f"or.{kind}"] = Op((kind,), (kind, kind), np.bitwise_or)
        OPS[f"xor.{kind}"] = Op((kind,), (kind, kind), np.bitwise_xor)
        OPS[f"not.{kind}"] = Op((kind,), (kind,), np.invert)
    for kind in _BITS:
        OPS[f"shl.{kind}"] = Op((kind,), (kind, "u32"), _shift_left)
    for kind in (*_BITS, *_INTEGERS):
        OPS[f"shr.{kind}"] = Op((kind,), (kind, "u32"), _shift_right)
    for side in "lr":
        for mode in ("clamp", "wrap"):
            OPS[f"shf.{side}.{mode}.b32"] = Op(("b32",), ("b32", "b32", "u32"), _funnel(side == "l", mode == "wrap"))
    for kind in ("u32", "s32", "u64", "s64"):
        OPS[f"bfe.{kind}"] = Op((kind,), (kind, "u32", "u32"), _extract(kind))
    for kind in ("b32", "b64"):
        OPS[f"bfi.{kind}"] = Op((kind,), (kind, kind, "u32", "u32"), _insert(kind))
        OPS[f"popc.{kind}"] = Op(("u32",), (kind,), _popcount)
        OPS[f"clz.{kind}"] = Op(("u32",), (kind,), _leading_zeros)
        OPS[f"brev.{kind}"] = Op((kind,), (kind,), _reverse)
    for mode in ("", *_PERMUTE):
        OPS[f"prmt.b32{mode}"] = Op(("b32",), ("b32", "b32", "b32"), _permute(mode))


def _selection() -> None:
    for kind in (*_BITS, *_INTEGERS, "f32", "f64"):
        OPS[f"selp.{kind}"] = Op((kind,), (kind, kind, "pred"), lambda a, b, c: np.where(c, a, b))
    for name in ("cvta.to.global.u64", "cvta.global.u64"):  # global addresses are generic addresses
        OPS[name] = Op(("u64",), ("u64",), np.positive)


COMPARE: dict[str, Callable[..., Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED_COMPARE = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_COMBINE: dict[str, Callable[..., Array]] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparisons(kind: str, compares: dict[str, Callable[..., Array]]) -> dict[str, Op]:
    """Return the forms of `setp` for one type: plain, and combined with a third predicate."""
    results = ("pred",) if kind == "f16" else ("pred", "pred")
    ops = {}
    for name, compare in compares.items():

        def plain(a: Array, b: Array, compare: Callable[..., Array] = compare) -> tuple[Array, Array]:
            found = compare(a, b)
            return found, ~found

        ops[f"setp.{name}.{kind}"] = Op(results, (kind, kind), plain)
        for word, combine in _COMBINE.items():

            def combined(
                a: Array,
                b: Array,
                c: Array,
                compare: Callable[..., Array] = compare,
                combine: Callable[..., Array] = combine,
            ) -> tuple[Array, Array]:
                found = compare(a, b)
                return combine(found, c), combine(~found, c)

            ops[f"setp.{name}.{word}.{kind}"] = Op(results, (kind, kind, "pred"), combined)
    return ops


def _comparisons() -> None:
    for kind in (*_BITS, *_INTEGERS):
        equality = {name: COMPARE[name] for name in ("eq", "ne")}
        OPS.update(comparisons(kind, {"b": equality, "s": COMPARE, "u": COMPARE | _UNSIGNED_COMPARE}[kind[0]]))


def _conversions() -> None:
    integers = [f"{k}{bits}" for k in "us" for bits in (8, 16, 32, 64)]
    for to in integers:
        for source in integers:
            OPS[f"cvt.{to}.{source}"] = Op((to,), (source,), lambda a, to=to: _as(a, to), wide=True)
            saturate = _saturate(to, source)
            if saturate is not None:
                OPS[f"cvt.sat.{to}.{source}"] = Op((to,), (source,), saturate, wide=True)


_arithmetic()
_logic()
_selection()
_comparisons()
_conversions()
