"""Floating-point instructions against exact rational arithmetic, rounded by the definition of the formats."""

from __future__ import annotations

import math
import operator
import random
from fractions import Fraction

import pytest

from tests.emulator.ptx_check import FRACTION, Covered, evaluate, interpret, samples, storage
from tests.emulator.ptx_text import SIZES

TESTED = Covered()
FLOATS = ("f16", "f32", "f64")
CANONICAL = {"f16": 0x7FFF, "f32": 0x7FFFFFFF}
NAN, INF = "nan", "inf"
BITS = {**SIZES, "bf16": 16}


def shape(kind):
    """Bits of the fraction, and the bias, which is the largest exponent too."""
    return FRACTION[kind], (1 << BITS[kind] - FRACTION[kind] - 2) - 1


def decode(bits, kind):
    """Return the sign (0 or 1), and the magnitude as a fraction, or what it is instead."""
    fraction, bias = shape(kind)
    sign, exponent, low = bits >> BITS[kind] - 1, bits >> fraction & 2 * bias + 1, bits & (1 << fraction) - 1
    if exponent == 2 * bias + 1:
        return sign, NAN if low else INF
    if exponent:
        low, exponent = low | 1 << fraction, exponent - 1
    return sign, Fraction(low) * Fraction(2) ** (exponent + 1 - bias - fraction)


def encode(sign, magnitude, kind, mode="rn"):
    """Round to nearest even, or towards zero."""
    fraction, bias = shape(kind)
    top = sign << BITS[kind] - 1
    infinity = (2 * bias + 1) << fraction
    if magnitude == NAN:
        return NAN
    if magnitude == INF:
        return top | infinity
    if magnitude == 0:
        return top
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    exponent = max(exponent, 1 - bias)
    units = magnitude / Fraction(2) ** (exponent - fraction)
    whole = round(units) if mode == "rn" else math.floor(units)
    if whole >> fraction + 1:
        whole, exponent = whole >> 1, exponent + 1
    if exponent > bias:
        return top | (infinity if mode == "rn" else infinity - 1)
    return top | (whole if whole < 1 << fraction else whole + (exponent + bias - 1 << fraction))


def negated(a):
    return 1 - a[0], a[1]


def add(a, b):
    if NAN in (a[1], b[1]) or (a[1] == b[1] == INF and a[0] != b[0]):
        return 0, NAN
    if INF in (a[1], b[1]):
        return a if a[1] == INF else b
    total = sum(-m if s else m for s, m in (a, b))
    sign = a[0] & b[0] if total == 0 else int(total < 0)
    return sign, abs(total)


def multiply(a, b):
    sign = a[0] ^ b[0]
    if NAN in (a[1], b[1]) or (INF in (a[1], b[1]) and 0 in (a[1], b[1])):
        return 0, NAN
    return sign, INF if INF in (a[1], b[1]) else a[1] * b[1]


def divide(a, b):
    sign = a[0] ^ b[0]
    if NAN in (a[1], b[1]) or a[1] == b[1] == INF or a[1] == b[1] == 0:
        return 0, NAN
    if a[1] == INF or b[1] == 0:
        return sign, INF
    return sign, 0 if b[1] == INF else a[1] / b[1]


def integral(mode, a):
    sign, magnitude = a
    if magnitude in (NAN, INF):
        return a
    round_to = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    return sign, abs(Fraction(round_to(-magnitude if sign else magnitude)))


def whole(mode, to, source, a):
    """A conversion to an integer clamps; the ISA gives the result for a NaN."""
    sign, magnitude = integral(mode, a)
    low, high = (-(1 << SIZES[to] - 1), (1 << SIZES[to] - 1) - 1) if to[0] == "s" else (0, (1 << SIZES[to]) - 1)
    if magnitude == NAN:
        return 0 if source != "f64" and SIZES[to] < 64 else 1 << SIZES[to] - 1
    if magnitude == INF:
        return low if sign else high
    return min(max(int(-magnitude if sign else magnitude), low), high)


CASES = {}  # form: (result kind, source kinds, definition over decoded operands, rounding)
for k in FLOATS:
    for m in ("rn", "rz") if k == "f32" else ("rn",):
        CASES[f"add.{m}.{k}"] = k, (k, k), add, m
        CASES[f"sub.{m}.{k}"] = k, (k, k), lambda a, b: add(a, negated(b)), m
        CASES[f"mul.{m}.{k}"] = k, (k, k), multiply, m
        CASES[f"fma.{m}.{k}"] = k, (k, k, k), lambda a, b, c: add(multiply(a, b), c), m
    CASES[f"neg.{k}"] = k, (k,), negated, "rn"
    CASES[f"abs.{k}"] = k, (k,), lambda a: (0, a[1]), "rn"
    for m in ("rni", "rzi", "rmi", "rpi"):
        CASES[f"cvt.{m}.{k}.{k}"] = k, (k,), lambda a, m=m: integral(m, a), "rn"
    for other in FLOATS:
        if SIZES[other] > SIZES[k]:
            CASES[f"cvt.{other}.{k}"] = other, (k,), lambda a: a, "rn"
            CASES |= {f"cvt.{m}.{k}.{other}": (k, (other,), lambda a: a, m) for m in ("rn", "rz")}
CASES["div.rn.f32"] = "f32", ("f32", "f32"), divide, "rn"
TESTED.update(CASES)


def near(kinds, count, seed):
    """Operands of like exponents, whose sums and products fall between representable numbers."""
    rng = random.Random(seed)
    columns = []
    for kind in kinds:
        fraction, bias = shape(kind)
        width = {"f16": 6, "bf16": 12, "f32": 26, "f64": 56}[kind]
        exponents = [max(1, bias + rng.randrange(-width, width) // 2) for _ in range(count)]
        tails = [rng.choice([rng.getrandbits(fraction), 0, 1, (1 << fraction) - 1]) for _ in range(count)]
        columns.append(
            [rng.getrandbits(1) << BITS[kind] - 1 | e << fraction | t for e, t in zip(exponents, tails, strict=True)]
        )
    return columns


@pytest.mark.parametrize("form", CASES)
def test_instruction_rounds_the_exact_result(form):
    result, sources, definition, mode = CASES[form]
    columns = [a + b for a, b in zip(samples(sources), near(sources, 1024, form), strict=True)]
    operands = ", ".join(f"{{a{i}}}" for i in range(len(sources)))
    (found,) = evaluate(f"{form} {{z0}}, {operands};", (result,), sources, columns)
    for row, value in zip(zip(*columns, strict=True), found, strict=True):
        decoded = [decode(bits, kind) for bits, kind in zip(row, sources, strict=True)]
        want = encode(*definition(*decoded), result, mode)
        if want != NAN:
            assert value == want, (row, decoded)
        elif result == "f64" or form.startswith(("neg.", "abs.")):
            assert decode(value, result)[1] == NAN, row
        else:
            assert value == CANONICAL[result], row


PACKED = {"fma.rn.f16x2": "f16", "fma.rn.bf16x2": "bf16"}
TESTED.update(PACKED)


@pytest.mark.parametrize("form", PACKED)
def test_packed_halves_are_fused_on_their_own(form):
    kind, rng = PACKED[form], random.Random(form)
    fraction, bias = shape(kind)
    edges = [
        sign << 15 | e << fraction | t for sign in (0, 1) for e in (0, 1, bias, 2 * bias, 2 * bias + 1) for t in (0, 1)
    ]
    columns = [[rng.choice(edges) for _ in range(1024)] + [rng.getrandbits(16) for _ in range(512)] for _ in range(3)]
    halves = [a + b for a, b in zip(columns, near((kind,) * 3, 1536, form), strict=True)]
    words = [[high << 16 | low for low, high in zip(h[::2], h[1::2], strict=True)] for h in halves]
    (found,) = evaluate(f"{form} {{z0}}, {{a0}}, {{a1}}, {{a2}};", ("b32",), ("b32",) * 3, words)
    for *row, value in zip(*words, found, strict=True):
        for shift in (0, 16):
            a, b, c = (decode(word >> shift & 0xFFFF, kind) for word in row)
            want = encode(*add(multiply(a, b), c), kind)
            assert (value >> shift & 0xFFFF) == (0x7FFF if want == NAN else want), (row, shift)


TO_INTEGER = [
    (f"cvt.{m}.{to}{bits}.{k}", m, f"{to}{bits}", k)
    for m in ("rni", "rzi", "rmi", "rpi")
    for to in "us"
    for bits in (16, 32, 64)
    for k in FLOATS
]
TESTED.update(form for form, *_ in TO_INTEGER)


@pytest.mark.parametrize(("form", "mode", "to", "source"), TO_INTEGER, ids=[form for form, *_ in TO_INTEGER])
def test_conversion_to_an_integer(form, mode, to, source):
    columns = [samples((source,))[0] + near((source,), 512, form)[0]]
    (found,) = evaluate(f"{form} {{z0}}, {{a0}};", (to,), (source,), columns)
    for bits, value in zip(columns[0], found, strict=True):
        assert value == whole(mode, to, source, decode(bits, source)) % (1 << storage(to)), decode(bits, source)


FROM_INTEGER = [(f"cvt.rn.{k}.{s}{bits}", f"{s}{bits}", k) for k in FLOATS for s in "us" for bits in (8, 16, 32, 64)]
TESTED.update(form for form, *_ in FROM_INTEGER)


@pytest.mark.parametrize(("form", "source", "to"), FROM_INTEGER, ids=[form for form, *_ in FROM_INTEGER])
def test_conversion_from_an_integer(form, source, to):
    rng = random.Random(form)
    columns = samples((source,))
    columns[0] += [(1 << rng.randrange(8, 64)) + rng.choice([-1, 0, 1, 3 << 10]) for _ in range(200)]
    columns[0] = [value % (1 << storage(source)) for value in columns[0]]
    (found,) = evaluate(f"{form} {{z0}}, {{a0}};", (to,), (source,), columns)
    for bits, value in zip(columns[0], found, strict=True):
        number = interpret(bits, source)
        assert value == encode(int(number < 0), Fraction(abs(number)), to), number


COMPARE = {n: getattr(operator, n) for n in ("eq", "ne", "lt", "le", "gt", "ge")}
COMBINE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
NAMES = [*COMPARE, *(f"{name}u" for name in COMPARE), "num", "nan"]
COMPARISONS = [(f"setp.{n}{c}.{k}", n, c[1:], k) for k in FLOATS for n in NAMES for c in ("", ".and", ".or", ".xor")]
TESTED.update(form for form, *_ in COMPARISONS)


def compared(name, a, b):
    values = [float(m) if m in (NAN, INF) else m for _, m in (a, b)]
    x, y = (-v if s else v for v, (s, _) in zip(values, (a, b), strict=True))
    unordered = NAN in (a[1], b[1])
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    return name.endswith("u") if unordered else COMPARE[name[:2]](x, y)


@pytest.mark.parametrize(("form", "name", "combine", "kind"), COMPARISONS, ids=[form for form, *_ in COMPARISONS])
def test_comparison(form, name, combine, kind):
    columns = samples((kind, kind))
    columns.append([i % 3 & 1 for i in range(len(columns[0]))])
    results = ("pred",) if kind == "f16" else ("pred", "pred")
    to = "|".join(f"{{z{i}}}" for i in range(len(results)))
    found = evaluate(
        f"{form} {to}, {{a0}}, {{a1}}{', {a2}' if combine else ''};", results, (kind, kind, "pred"), columns
    )
    for (a, b, c), *values in zip(zip(*columns, strict=True), *found, strict=True):
        true = int(compared(name, decode(a, kind), decode(b, kind)))
        want = (COMBINE[combine](true, c), COMBINE[combine](1 - true, c)) if combine else (true, 1 - true)
        assert tuple(values) == want[: len(results)], (a, b, c)
