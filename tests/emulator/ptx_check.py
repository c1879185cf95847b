"""Helpers for the semantics tests: one instruction in a kernel, its operands from arrays, its results to arrays."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from tests.emulator.ptx_memory import Array, Memory
from tests.emulator.ptx_run import Module
from tests.emulator.ptx_text import SIZES

HEADER = ".version 8.0\n.target sm_75\n.address_size 64\n"
BLOCK = 256
_REGISTERS = {1: "%p", 16: "%h", 32: "%r", 64: "%d"}
FRACTION = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}  # bits of the fraction
_Test = TypeVar("_Test", bound=Callable[..., Any])


class Covered(set[str]):
    """The forms of instruction that the tests of one file check."""

    def by(self, *forms: str) -> Callable[[_Test], _Test]:
        """Mark a test as the one of these forms."""

        def mark(test: _Test) -> _Test:
            self.update(forms)
            return test

        return mark


def storage(kind: str) -> int:
    """Bits of the array elements and registers that hold a type; predicates travel as 32-bit words."""
    return 32 if kind == "pred" else max(SIZES[kind], 16)


def kernel(code: str, results: Sequence[str], sources: Sequence[str], declarations: str = "") -> str:
    """Write the module: each lane loads ``{a0}``, ``{a1}``..., runs the code, and stores ``{z0}``..."""
    names = [f"a{i}" for i in range(len(sources))] + [f"z{i}" for i in range(len(results))]
    kinds = [*sources, *results]
    registers = {
        n: f"{_REGISTERS[1 if k == 'pred' else storage(k)]}{i}"
        for i, (n, k) in enumerate(zip(names, kinds, strict=True))
    }
    lines = ["mov.u32 %r40, %tid.x;", "mov.u32 %r41, %ctaid.x;", "mov.u32 %r42, %ntid.x;"]
    lines.append("mad.lo.u32 %r40, %r41, %r42, %r40;")
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        bits, address = storage(kind), f"%d{20 + i}"
        lines += [f"mul.wide.u32 %d40, %r40, {bits // 8};", f"ld.param.u64 {address}, [{name}];"]
        lines.append(f"add.s64 {address}, {address}, %d40;")
        if kind == "pred":
            lines += [f"ld.global.b32 %r43, [{address}];", f"setp.ne.b32 {registers[name]}, %r43, 0;"]
        else:
            lines.append(f"ld.global.b{bits} {registers[name]}, [{address}];")
    lines.append(code.format(**registers))
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if name[0] == "z" and kind == "pred":
            lines += [f"selp.b32 %r43, 1, 0, {registers[name]};", f"st.global.b32 [%d{20 + i}], %r43;"]
        elif name[0] == "z":
            lines.append(f"st.global.b{storage(kind)} [%d{20 + i}], {registers[name]};")
    params = ", ".join(f".param .u64 {name}" for name in names)
    declared = ".reg .pred %p<50>; .reg .b16 %h<50>; .reg .b32 %r<50>; .reg .b64 %d<50>;"
    body = "\n".join(lines)
    return f"{HEADER}{declarations}\n.visible .entry k({params})\n{{\n{declared}\n{body}\nret;\n}}\n"


def evaluate(
    code: str,
    results: Sequence[str],
    sources: Sequence[str],
    columns: Sequence[Sequence[int]],
    declarations: str = "",
    block: int = BLOCK,
) -> list[list[int]]:
    """Run the code once per row of the source columns; returns the result columns as bit patterns.

    Results start as the last source columns, where there are more columns than sources, or as zero.
    """
    count = len(columns[0])
    lanes = -(-count // block) * block
    memory = Memory()
    arrays: list[Array] = []
    for i, kind in enumerate([*sources, *results]):
        array = np.zeros(lanes, f"u{storage(kind) // 8}")
        if i < len(columns):
            array[:count] = [value % (1 << storage(kind)) for value in columns[i]]
            array[count:] = array[0]
        memory.add_array(array, f"operand {i}")
        arrays.append(array)
    params = np.array([a.ctypes.data for a in arrays], np.uint64).tobytes()
    Module(kernel(code, results, sources, declarations)).run("k", lanes // block, block, params, memory)
    return [a[:count].tolist() for a in arrays[len(sources) :]]


def signed(value: int, bits: int) -> int:
    """Read the low bits as two's complement."""
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


def interpret(value: int, kind: str) -> int:
    """Read a bit pattern as a type of the ISA: only its own low bits count."""
    if kind == "pred":
        return int(value != 0)
    return signed(value, SIZES[kind]) if kind[0] == "s" else value % (1 << SIZES[kind])


def edges(kind: str) -> list[int]:
    """Bit patterns at which instructions go wrong."""
    if kind == "pred":
        return [0, 1]
    if kind[0] == "f":
        return float_edges(kind)
    bits = storage(kind)
    small = [0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256]
    near = [1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1, (1 << (bits // 2)), (1 << (bits // 2)) - 1]
    pattern = [0x5555555555555555, 0xAAAAAAAAAAAAAAAA, 0x0123456789ABCDEF, 0xFEDCBA9876543210]
    values = [*small, *near, *pattern, *(-value for value in (1, 2, 3, 7, 8, 128, 129, 256))]
    return sorted({value % (1 << bits) for value in values})


def float_edges(kind: str) -> list[int]:
    """Zeros, subnormals, ones, halves, integers at the limits, infinities and NaNs, of both signs."""
    bits, fraction = SIZES[kind], FRACTION[kind]
    one = (1 << (bits - 2)) - (1 << fraction)
    infinity = (1 << (bits - 1)) - (1 << fraction)
    found = [
        0,
        1,
        2,
        (1 << fraction) - 1,
        1 << fraction,
        (1 << fraction) + 1,
        one,
        one + 1,
        one - 1,
        one - (1 << fraction),
    ]
    found += [one + 3 * (1 << (fraction - 1)), one + (7 << (fraction - 2)), one + (13 << (fraction - 3))]  # 3.., 2.5..
    found += [one + (exponent << fraction) for exponent in (-24, -14, 7, 15, 16, 31, 32, 63, 64)]
    found += [one + (exponent << fraction) - 1 for exponent in (8, 15) if exponent < bits]
    found += [infinity - 1, infinity, infinity + 1, (1 << (bits - 1)) - 1, infinity | 1 << (fraction - 1)]
    found = [value for value in found if 0 <= value < 1 << (bits - 1)]
    return [value | sign << (bits - 1) for value in dict.fromkeys(found) for sign in (0, 1)]


def samples(kinds: Sequence[str], count: int = 1024, seed: int = 0) -> list[list[int]]:
    """Columns of operands: all pairs of edges for one or two, else a seeded choice of edges and random bits."""
    rng = random.Random(f"{kinds}{seed}")
    rows: list[tuple[int, ...]]
    if len(kinds) == 1:
        rows = [(a,) for a in edges(kinds[0])]
    elif len(kinds) == 2:
        rows = [(a, b) for a in edges(kinds[0]) for b in edges(kinds[1])]
    else:
        rows = [tuple(rng.choice(edges(kind)) for kind in kinds) for _ in range(count)]
    rows += [
        tuple(rng.getrandbits(storage(k)) if k != "pred" else rng.getrandbits(1) for k in kinds) for _ in range(256)
    ]
    return [list(column) for column in zip(*rows, strict=True)]
