"""The arithmetic of the accepted floating-point instructions, rounded as IEEE 754 and the PTX ISA say.

NaN results are the canonical ones of the ISA (for f64, whatever the host gives).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from tests.emulator.ptx_memory import Array
from tests.emulator.ptx_ops import COMPARE, DTYPES, Op, comparisons

FLOAT_OPS: dict[str, Op] = {}
_FLOATS = ("f16", "f32", "f64")
_CANONICAL: dict[str, Array] = {
    "f16": np.array(0x7FFF, np.uint16).view(np.float16),
    "f32": np.array(0x7FFFFFFF, np.uint32).view(np.float32),
}
_TO_INTEGRAL: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def _canonical(kind: str, value: Array) -> Array:
    if kind == "f64":
        return value
    found: Array = np.where(np.isnan(value), _CANONICAL[kind], value)
    return found


def _narrow(kind: str, mode: str, value: Array) -> Array:
    """Round f64 to a narrower type: to nearest even, or towards zero."""
    found = value.astype(DTYPES[kind])
    if mode == "rz":
        away = np.abs(found.astype(np.float64)) > np.abs(value)
        found = np.where(away, np.nextafter(found, DTYPES[kind].type(0)), found)
    return _canonical(kind, found)


def _odd_sum(a: Array, b: Array) -> Array:
    """Add f64, rounding inexact sums to an odd last bit: what is rounded again afterwards is then rounded once."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    inexact = np.isfinite(total) & (error != 0) & (total.view(np.uint64) & np.uint64(1) == 0)
    return np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def _fused(kind: str, mode: str) -> Callable[[Array, Array, Array], Array]:
    def narrow(a: Array, b: Array, c: Array) -> Array:
        product = a.astype(np.float64) * b.astype(np.float64)  # exact
        return _narrow(kind, mode, _odd_sum(product, c.astype(np.float64)))

    return narrow


def _fused_f64(a: Array, b: Array, c: Array) -> Array:
    found: Array = np.where(np.isinf(c) & np.isfinite(a) & np.isfinite(b), c, a * b + c)
    for lane in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & (a != 0) & (b != 0)):
        exact = Fraction(float(a[lane])) * Fraction(float(b[lane])) + Fraction(float(c[lane]))
        try:
            found[lane] = float(exact)
        except OverflowError:
            found[lane] = np.inf if exact > 0 else -np.inf
    return found


def _to_bf16(value: Array) -> Array:
    """Round f64 to bf16, in the high half of f32: first to odd, so that it is rounded once in all."""
    near = value.astype(np.float32)
    bits = near.view(np.uint32)
    inexact = np.isfinite(value) & (near.astype(np.float64) != value) & (bits & np.uint32(1) == 0)
    beyond = np.where(np.abs(near.astype(np.float64)) > np.abs(value), np.float32(0), np.copysign(np.inf, near))
    bits = np.where(inexact, np.nextafter(near, beyond.astype(np.float32)), near).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.where(np.isnan(value), np.uint32(0x7FFF), rounded >> np.uint32(16))


def _packed_fused(kind: str) -> Callable[[Array, Array, Array], Array]:
    """Fused multiply-add of the two halves of 32-bit registers."""

    def halves(word: Array) -> list[Array]:
        low, high = word & np.uint32(0xFFFF), word >> np.uint32(16)
        if kind == "f16":
            return [half.astype(np.uint16).view(np.float16).astype(np.float64) for half in (low, high)]
        return [(half << np.uint32(16)).view(np.float32).astype(np.float64) for half in (low, high)]

    def fused(a: Array, b: Array, c: Array) -> Array:
        found = []
        for x, y, z in zip(halves(a), halves(b), halves(c), strict=True):
            exact = _odd_sum(x * y, z)
            if kind == "f16":
                found.append(_narrow(kind, "rn", exact).view(np.uint16).astype(np.uint32))
            else:
                found.append(_to_bf16(exact))
        result: Array = found[1] << np.uint32(16) | found[0]
        return result

    return fused


def _sum(kind: str, mode: str, sign: int) -> Callable[[Array, Array], Array]:
    def run(a: Array, b: Array) -> Array:
        return _narrow(kind, mode, _odd_sum(a.astype(np.float64), sign * b.astype(np.float64)))

    return run


def _product(kind: str, mode: str) -> Callable[[Array, Array], Array]:
    return lambda a, b: _narrow(kind, mode, a.astype(np.float64) * b.astype(np.float64))


def _from_integer(kind: str) -> Callable[[Array], Array]:
    if kind == "f16":  # what does not fit f64 exactly is infinite in f16
        return lambda a: a.astype(np.float64).astype(np.float16)
    return lambda a: a.astype(DTYPES[kind])


def _to_integer(to: str, source: str, mode: str) -> Callable[[Array], Array]:
    limits = np.iinfo(DTYPES[to])
    plain = source != "f64" and limits.bits < 64
    nan = 0 if plain else limits.min if to[0] == "s" else 1 << (limits.bits - 1)

    def run(a: Array) -> Array:
        value = _TO_INTEGRAL[mode](a.astype(np.float64))
        inside = (value > float(limits.min) - 1) & (value >= float(limits.min)) & (value < float(limits.max + 1))
        whole = np.where(inside, value, 0).astype(DTYPES[to])
        clamped = np.where(value < 0, DTYPES[to].type(limits.min), DTYPES[to].type(limits.max))
        found = np.where(inside, whole, clamped)
        return np.where(np.isnan(a), DTYPES[to].type(nan), found)

    return run


def _unordered(compare: Callable[..., Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


def _ordered_unequal(a: Array, b: Array) -> Array:
    return np.not_equal(a, b) & ~(np.isnan(a) | np.isnan(b))


def _arithmetic() -> None:
    # Without a rounding modifier the assembler may fuse a product and a sum: no one result, so not accepted.
    for kind, modes in (("f16", ("rn",)), ("f32", ("rn", "rz"))):
        for mode in modes:
            FLOAT_OPS[f"add.{mode}.{kind}"] = Op((kind,), (kind, kind), _sum(kind, mode, 1))
            FLOAT_OPS[f"sub.{mode}.{kind}"] = Op((kind,), (kind, kind), _sum(kind, mode, -1))
            FLOAT_OPS[f"mul.{mode}.{kind}"] = Op((kind,), (kind, kind), _product(kind, mode))
            FLOAT_OPS[f"fma.{mode}.{kind}"] = Op((kind,), (kind, kind, kind), _fused(kind, mode))
    FLOAT_OPS["div.rn.f32"] = Op(("f32",), ("f32", "f32"), lambda a, b: _canonical("f32", np.divide(a, b)))
    for kind in ("f16", "bf16"):
        FLOAT_OPS[f"fma.rn.{kind}x2"] = Op(("b32",), ("b32", "b32", "b32"), _packed_fused(kind))
    FLOAT_OPS["add.rn.f64"] = Op(("f64",), ("f64", "f64"), np.add)
    FLOAT_OPS["sub.rn.f64"] = Op(("f64",), ("f64", "f64"), np.subtract)
    FLOAT_OPS["mul.rn.f64"] = Op(("f64",), ("f64", "f64"), np.multiply)
    FLOAT_OPS["fma.rn.f64"] = Op(("f64",), ("f64", "f64", "f64"), _fused_f64)
    for kind in _FLOATS:
        FLOAT_OPS[f"neg.{kind}"] = Op((kind,), (kind,), lambda a, k=kind: _canonical(k, np.negative(a)))
        FLOAT_OPS[f"abs.{kind}"] = Op((kind,), (kind,), lambda a, k=kind: _canonical(k, np.abs(a)))
        compares = COMPARE | {"ne": _ordered_unequal}
        compares |= {f"{name}u": _unordered(compare) for name, compare in COMPARE.items()}
        compares["num"] = lambda a, b: ~(np.isnan(a) | np.isnan(b))
        compares["nan"] = lambda a, b: np.isnan(a) | np.isnan(b)
        FLOAT_OPS.update(comparisons(kind, compares))


def _conversions() -> None:
    for to in _FLOATS:
        for source in _FLOATS:
            if to > source:  # f16 < f32 < f64: wider
                widen = lambda a, to=to: _canonical(to, a.astype(DTYPES[to]))  # noqa: E731
                FLOAT_OPS[f"cvt.{to}.{source}"] = Op((to,), (source,), widen)
            elif to < source:
                for mode in ("rn", "rz"):
                    shorten = lambda a, to=to, mode=mode: _narrow(to, mode, a.astype(np.float64))  # noqa: E731
                    FLOAT_OPS[f"cvt.{mode}.{to}.{source}"] = Op((to,), (source,), shorten)
            else:
                for mode, integral in _TO_INTEGRAL.items():
                    whole = lambda a, k=to, f=integral: _canonical(k, f(a))  # noqa: E731
                    FLOAT_OPS[f"cvt.{mode}.{to}.{source}"] = Op((to,), (source,), whole)
        for bits in (8, 16, 32, 64):
            for integer in (f"u{bits}", f"s{bits}"):
                FLOAT_OPS[f"cvt.rn.{to}.{integer}"] = Op((to,), (integer,), _from_integer(to), wide=True)
                if bits > 8:
                    for mode in _TO_INTEGRAL:
                        function = _to_integer(integer, to, mode)
                        FLOAT_OPS[f"cvt.{mode}.{integer}.{to}"] = Op((integer,), (to,), function, wide=True)


_arithmetic()
_conversions()
