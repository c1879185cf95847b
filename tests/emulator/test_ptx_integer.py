"""Integer, logic, comparison and conversion instructions against their definitions in the PTX ISA, in Python ints."""

from __future__ import annotations

import functools
import operator

import pytest

from tests.emulator.ptx_check import Covered, evaluate, interpret, samples, signed, storage
from tests.emulator.ptx_frame import PtxFaultError
from tests.emulator.ptx_text import SIZES

TESTED = Covered()
INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
BITS = ("b16", "b32", "b64")
CASES: dict[str, tuple] = {}  # form: (result kinds, source kinds, definition over interpreted operands)


def twice(kind):
    return f"{kind[0]}{2 * SIZES[kind]}"


def truncated_division(a, b):
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def truncated_remainder(a, b):
    return a - b * truncated_division(a, b)


def bit(value, at):
    return value >> at & 1


def shl(width, a, b):
    return 0 if b >= width else a << b


def shr(width, a, b):
    return a >> min(b, width)  # of a negative Python int: fills with the sign


def shf(left, wrap, a, b, c):
    n = c & 31 if wrap else min(c, 32)
    return (b << 32 | a) << n >> 32 if left else (b << 32 | a) >> n


def bfe(kind, a, b, c):
    top = SIZES[kind] - 1
    pos, length = b & 255, c & 255
    sign = 0 if kind[0] == "u" or length == 0 else bit(a, min(pos + length - 1, top))
    return sum((bit(a, pos + i) if i < length and pos + i <= top else sign) << i for i in range(top + 1))


def bfi(width, a, b, c, d):
    pos, length = c & 255, d & 255
    found = b
    for i in range(length):
        if pos + i < width:
            found = found & ~(1 << pos + i) | bit(a, i) << pos + i
    return found


def prmt(mode, a, b, c):
    source = [(b << 32 | a) >> 8 * i & 255 for i in range(8)]
    n = c & 3
    if mode == "":
        chosen = [source[c >> 4 * i & 7] for i in range(4)]
        chosen = [(255 if byte & 128 else 0) if c >> 4 * i & 8 else byte for i, byte in enumerate(chosen)]
    else:
        index = {
            ".f4e": lambda i: n + i,
            ".b4e": lambda i: (n - i) % 8,
            ".rc8": lambda i: n,
            ".ecl": lambda i: max(n, i),
            ".ecr": lambda i: min(n, i),
            ".rc16": lambda i: 2 * (n & 1) + (i & 1),
        }[mode]
        chosen = [source[index(i)] for i in range(4)]
    return sum(byte << 8 * i for i, byte in enumerate(chosen))


def span(kind):
    bits = SIZES[kind]
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def saturated(to, value):
    return min(max(value, span(to)[0]), span(to)[1])


def add_cases():
    for k in INTEGERS:
        two, three, bits = (k, k), (k, k, k), SIZES[k]
        CASES[f"add.{k}"] = (k,), two, operator.add
        CASES[f"sub.{k}"] = (k,), two, operator.sub
        CASES[f"mul.lo.{k}"] = (k,), two, operator.mul
        CASES[f"mul.hi.{k}"] = (k,), two, lambda a, b, bits=bits: a * b >> bits
        CASES[f"mad.lo.{k}"] = (k,), three, lambda a, b, c: a * b + c
        CASES[f"mad.hi.{k}"] = (k,), three, lambda a, b, c, bits=bits: (a * b >> bits) + c
        if bits < 64:
            CASES[f"mul.wide.{k}"] = (twice(k),), two, operator.mul
            CASES[f"mad.wide.{k}"] = (twice(k),), (k, k, twice(k)), lambda a, b, c: a * b + c
        CASES[f"min.{k}"] = (k,), two, min
        CASES[f"max.{k}"] = (k,), two, max
        CASES[f"div.{k}"] = (k,), two, truncated_division
        CASES[f"rem.{k}"] = (k,), two, truncated_remainder
        CASES[f"shr.{k}"] = (k,), (k, "u32"), functools.partial(shr, bits)
        if k[0] == "s":
            CASES[f"neg.{k}"] = (k,), (k,), operator.neg
            CASES[f"abs.{k}"] = (k,), (k,), abs
    for k in BITS:
        CASES[f"shl.{k}"] = (k,), (k, "u32"), functools.partial(shl, SIZES[k])
        CASES[f"shr.{k}"] = (k,), (k, "u32"), functools.partial(shr, SIZES[k])
    for k in ("pred", *BITS):
        CASES[f"and.{k}"] = (k,), (k, k), operator.and_
        CASES[f"or.{k}"] = (k,), (k, k), operator.or_
        CASES[f"xor.{k}"] = (k,), (k, k), operator.xor
        CASES[f"not.{k}"] = (k,), (k,), operator.invert if k != "pred" else lambda a: 1 - a
    for side in "lr":
        for mode in ("clamp", "wrap"):
            definition = functools.partial(shf, side == "l", mode == "wrap")
            CASES[f"shf.{side}.{mode}.b32"] = ("b32",), ("b32", "b32", "u32"), definition
    for k in ("u32", "s32", "u64", "s64"):
        CASES[f"bfe.{k}"] = (k,), (k, "u32", "u32"), functools.partial(bfe, k)
    for k in ("b32", "b64"):
        bits = SIZES[k]
        CASES[f"bfi.{k}"] = (k,), (k, k, "u32", "u32"), functools.partial(bfi, bits)
        CASES[f"popc.{k}"] = ("u32",), (k,), lambda a: bin(a).count("1")
        CASES[f"clz.{k}"] = ("u32",), (k,), lambda a, bits=bits: bits - a.bit_length()
        CASES[f"brev.{k}"] = (k,), (k,), lambda a, bits=bits: int(f"{a:0{bits}b}"[::-1], 2)
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        CASES[f"prmt.b32{mode}"] = ("b32",), ("b32", "b32", "b32"), functools.partial(prmt, mode)
    for k in (*BITS, *INTEGERS, "f32", "f64"):
        CASES[f"selp.{k}"] = (k,), (k, k, "pred"), lambda a, b, c: a if c else b
    for name in ("cvta.to.global.u64", "cvta.global.u64"):
        CASES[name] = ("u64",), ("u64",), lambda a: a
    small = [f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64)]
    for to in small:
        for k in small:
            CASES[f"cvt.{to}.{k}"] = (to,), (k,), lambda a: a
            if span(k)[0] < span(to)[0] or span(k)[1] > span(to)[1]:  # else nothing saturates, and ptxas refuses it
                CASES[f"cvt.sat.{to}.{k}"] = (to,), (k,), functools.partial(saturated, to)


COMPARE = {"eq": operator.eq, "ne": operator.ne}
ORDER = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
UNSIGNED = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
COMBINE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def add_comparisons():
    for k in (*BITS, *INTEGERS):
        known = {"b": COMPARE, "s": COMPARE | ORDER, "u": COMPARE | ORDER | UNSIGNED}[k[0]]
        for name, compare in known.items():
            both = lambda a, b, f=compare: (int(f(a, b)), int(not f(a, b)))  # noqa: E731
            CASES[f"setp.{name}.{k}"] = ("pred", "pred"), (k, k), both
            for word, combine in COMBINE.items():
                joined = lambda a, b, c, f=both, g=combine: tuple(g(p, c) for p in f(a, b))  # noqa: E731
                CASES[f"setp.{name}.{word}.{k}"] = ("pred", "pred"), (k, k, "pred"), joined


add_cases()
add_comparisons()
TESTED.update(CASES)


def code(form, results, sources):
    return f"{form} {'|'.join(f'{{z{i}}}' for i in range(results))}, {', '.join(f'{{a{i}}}' for i in range(sources))};"


@pytest.mark.parametrize("form", CASES)
def test_instruction_follows_its_definition(form):
    results, sources, definition = CASES[form]
    columns = samples(sources)
    if form.startswith(("div.", "rem.")):
        columns[1] = [b or 1 for b in columns[1]]
    found = evaluate(code(form, len(results), len(sources)), results, sources, columns)
    for row, *values in zip(zip(*columns, strict=True), *found, strict=True):
        operands = [interpret(v, k) for v, k in zip(row, sources, strict=True)]
        want = definition(*operands)
        want = want if isinstance(want, tuple) else (want,)
        # a result narrower than its register is extended by its own signedness
        want = [interpret(w, k) % (1 << storage(k)) for w, k in zip(want, results, strict=True)]
        assert values == want, operands


@pytest.mark.parametrize("form", ["div.u32", "rem.u32", "div.s64", "rem.s16", "div.u16", "rem.u64"])
def test_division_by_zero_is_refused(form):
    kind = form[4:]
    with pytest.raises(PtxFaultError, match=r"cta 0, thread 2: the result is not defined"):
        evaluate(code(form, 1, 2), (kind,), (kind, kind), [[1, 2, 3], [1, 2, 0]])


def test_division_by_zero_in_lanes_that_do_not_execute_is_none():
    text = "setp.ne.u32 %p40, {a1}, 0; @%p40 div.u32 {z0}, {a0}, {a1};"
    assert evaluate(text, ("u32",), ("u32", "u32"), [[9, 9], [2, 0], [5, 5]]) == [[4, 5]]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", ["add", "sub"])
def test_carry_chains(name, kind):
    bits = SIZES[kind]
    text = f"{name}.cc.{kind} {{z0}}, {{a0}}, {{a1}}; {name}c.cc.{kind} {{z1}}, {{a2}}, {{a3}};"
    text += f"{name}c.{kind} {{z2}}, {{a4}}, {{a5}};"
    columns = samples((kind,) * 6)
    found = evaluate(text, (kind,) * 3, (kind,) * 6, columns)
    for (a0, b0, a1, b1, a2, b2), *values in zip(zip(*columns, strict=True), *found, strict=True):
        a, b = (x | y << bits | z << 2 * bits for x, y, z in ((a0, a1, a2), (b0, b1, b2)))
        want = (a + b if name == "add" else a - b) % (1 << 3 * bits)
        assert sum(v << bits * i for i, v in enumerate(values)) == want


TESTED.update(f"{n}{c}.{k}" for n in ("add", "sub") for c in (".cc", "c", "c.cc") for k in ("u32", "s32", "u64", "s64"))


@pytest.mark.parametrize("negated", [False, True])
def test_combined_comparison_takes_a_negated_predicate(negated):
    text = f"setp.lt.and.s32 {{z0}}|{{z1}}, {{a0}}, {{a1}}, {'!' if negated else ''}{{a2}};"
    columns = samples(("s32", "s32", "pred"))
    found = evaluate(text, ("pred", "pred"), ("s32", "s32", "pred"), columns)
    for (a, b, c), p, q in zip(zip(*columns, strict=True), *found, strict=True):
        less, third = signed(a, 32) < signed(b, 32), bool(c) != negated
        assert (p, q) == (less and third, not less and third)


def test_comparison_with_one_destination_leaves_the_other_alone():
    assert evaluate("setp.lt.u32 {z0}, {a0}, 5;", ("pred", "pred"), ("u32",), [[4, 5], [0, 0], [1, 0]]) == [
        [1, 0],
        [1, 0],
    ]


@pytest.mark.parametrize(
    ("literal", "kind", "want"),
    [
        ("-1", "u32", 0xFFFFFFFF),
        ("0xFFU", "u32", 255),
        ("4294967295", "s32", 0xFFFFFFFF),
        ("-9223372036854775808", "s64", 1 << 63),
        ("0xFFFFFFFFFFFFFFFF", "b64", (1 << 64) - 1),
        ("-32768", "s16", 0x8000),
        ("0f3F800000", "f32", 0x3F800000),
        ("0dC000000000000000", "f64", 0xC000000000000000),
    ],
)
def test_literals(literal, kind, want):
    assert evaluate(f"mov.{kind} {{z0}}, {literal};", (kind,), ("u32",), [[0]]) == [[want]]


MOVES = ("pred", "b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")


@TESTED.by(*(f"mov.{kind}" for kind in MOVES))
@pytest.mark.parametrize("kind", MOVES)
def test_move(kind):
    columns = samples((kind,))
    assert evaluate(f"mov.{kind} {{z0}}, {{a0}};", (kind,), (kind,), columns) == columns


@TESTED.by("mov.b32 pack", "mov.b64 pack", "mov.b32 unpack", "mov.b64 unpack")
@pytest.mark.parametrize(("whole", "part", "count"), [("b32", "b16", 2), ("b64", "b32", 2), ("b64", "b16", 4)])
def test_packing_puts_the_first_part_lowest(whole, part, count):
    bits = SIZES[part]
    columns = samples((part,) * count)
    packed = [sum(v << bits * i for i, v in enumerate(row)) for row in zip(*columns, strict=True)]
    braces = ", ".join(f"{{{{a{i}}}}}" for i in range(count))
    text = f"mov.{whole} {{z0}}, {{{{{braces.replace('{{', '{').replace('}}', '}')}}}}};"
    assert evaluate(text, (whole,), (part,) * count, columns) == [packed]
    text = f"mov.{whole} {{{{{', '.join(f'{{z{i}}}' for i in range(count))}}}}}, {{a0}};"
    assert evaluate(text, (part,) * count, (whole,), [packed]) == columns


@pytest.mark.parametrize("negated", [False, True])
def test_a_false_guard_keeps_the_old_value(negated):
    text = f"@{'!' if negated else ''}{{a2}} add.u32 {{z0}}, {{a0}}, {{a1}};"
    columns = [[1, 2, 3, 4], [10, 20, 30, 40], [0, 1, 0, 1], [7, 7, 7, 7]]
    want = [7, 22, 7, 44] if not negated else [11, 7, 33, 7]
    assert evaluate(text, ("u32",), ("u32", "u32", "pred"), columns) == [want]


def test_an_instruction_may_write_its_own_guard_and_sources():
    text = "@{a0} setp.eq.u32 {a0}|{z1}, {a1}, 3; selp.u32 {z0}, 1, 0, {a0};"
    text += "mul.lo.u32 {a1}, {a1}, {a1}; mov.u32 {z2}, {a1};"
    columns = [[0, 1, 1], [3, 3, 4], [9, 9, 9], [0, 0, 0], [0, 0, 0]]
    want = [[0, 1, 0], [0, 0, 1], [9, 9, 16]]
    assert evaluate(text, ("u32", "pred", "u32"), ("pred", "u32"), columns) == want
