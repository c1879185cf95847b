"""Turns the instructions of an entry into steps over the arrays of a frame, gathered into blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.emulator import ptx_access, ptx_warp
from tests.emulator.ptx_float import FLOAT_OPS
from tests.emulator.ptx_frame import CARRY, Frame, Mask, Slots, Step, write
from tests.emulator.ptx_memory import Array
from tests.emulator.ptx_ops import DTYPES, Op
from tests.emulator.ptx_ops import OPS as _INTEGER_OPS
from tests.emulator.ptx_text import (
    CLOCK,
    SIZES,
    SPECIALS,
    Entry,
    Immediate,
    Instruction,
    Operand,
    Pair,
    PtxSyntaxError,
    Register,
    Special,
    Symbol,
    Variable,
    Vector,
)

OPS = {**_INTEGER_OPS, **FLOAT_OPS}
MOVES = {f"mov.{kind}": kind for kind in SIZES if SIZES[kind] in (1, 16, 32, 64) and kind != "f16"}
BRANCHES = ("bra", "bra.uni")
EXITS = ("ret", "exit")
BARRIERS = ("bar.sync",)
SLEEPS = ("nanosleep.u32",)
_PACKED = ("mov.b32", "mov.b64")  # those that take {a, b}
_ADDRESSES = ("mov.u64", "mov.b64", "mov.u32", "mov.b32")  # those that take the name of a variable


def accepted() -> frozenset[str]:
    """Every form of instruction that the interpreter runs."""
    forms = {*OPS, *MOVES, *BRANCHES, *EXITS, *BARRIERS, *SLEEPS, *ptx_warp.SYNCHRONISING, f"mov.u64 {CLOCK}"}
    forms |= {*ptx_access.LOADS, *ptx_access.STORES, *ptx_access.ATOMICS}
    forms |= {f"{name} {way}" for name in _PACKED for way in ("pack", "unpack")}
    forms |= {f"{name} address" for name in _ADDRESSES}
    return frozenset(forms | {f"mov.u32 {name}" for name in SPECIALS})


@dataclass(slots=True)
class Block:
    """Straight-line steps and what follows them; only its first instruction may need the warp together."""

    steps: list[tuple[Instruction, Step]] = field(default_factory=list)
    members: int | None = None  # slot of the member mask of a synchronising first instruction
    end: Instruction | None = None  # a branch, exit or barrier; None: on to the next block
    target: int = -1
    guard: int | None = None
    negated: bool = False


@dataclass(slots=True)
class Program:
    """An entry ready to run."""

    entry: Entry
    slots: Slots
    blocks: list[Block]

    @property
    def param_bytes(self) -> int:
        """The size of the parameter space."""
        return max((v.offset + v.nbytes for v in self.entry.params.values()), default=0)

    @property
    def shared_bytes(self) -> int:
        """The size of one CTA's shared memory."""
        return max((v.offset + v.nbytes for v in self.entry.shared.values()), default=0)

    @property
    def has_barriers(self) -> bool:
        """Whether the warps of a CTA wait for each other."""
        return any(block.end is not None and block.end.opcode in BARRIERS for block in self.blocks)


class _Compiler:
    def __init__(self, entry: Entry, variables: dict[str, Variable]) -> None:
        self.entry = entry
        self.slots = Slots()
        self.variables = {**variables, **entry.params, **entry.shared}

    def source(self, instruction: Instruction, operand: Operand, kind: str, wide: bool, negatable: bool) -> int:
        if isinstance(operand, Immediate):
            return self.slots.constant(instruction, operand, kind)
        if not isinstance(operand, Register) or (operand.negated and not negatable):
            raise PtxSyntaxError(instruction.line, f"{operand} is no {kind} source of {instruction.opcode}")
        if operand.bits == SIZES[kind]:
            return self.slots.register(operand, kind)
        if not wide or operand.bits < SIZES[kind] or kind[0] in "fp":
            raise PtxSyntaxError(instruction.line, f"{operand.name} has {operand.bits} bits, {kind} is asked for")
        return self.slots.register(operand, f"u{operand.bits}")

    def result(self, instruction: Instruction, operand: Operand, kind: str, wide: bool) -> int:
        if not isinstance(operand, Register) or operand.negated:
            raise PtxSyntaxError(instruction.line, f"{operand} is no destination of {instruction.opcode}")
        if operand.bits == SIZES[kind]:
            return self.slots.register(operand, kind)
        if not wide or operand.bits < SIZES[kind] or kind[0] in "fp":
            raise PtxSyntaxError(instruction.line, f"{operand.name} has {operand.bits} bits, {kind} is given")
        return self.slots.register(operand, f"{'s' if kind[0] == 's' else 'u'}{operand.bits}")

    def arithmetic(self, instruction: Instruction, op: Op) -> Step:
        results = [kind for kind in op.results if kind != "cc"]
        sources = [kind for kind in op.sources if kind != "cc"]
        to, *given = instruction.operands
        outputs = [to.first, to.second] if isinstance(to, Pair) else [to]
        optional = len(results) == 2  # the second of two predicates
        if len(given) != len(sources) or not (len(outputs) == len(results) or (optional and len(outputs) == 1)):
            raise PtxSyntaxError(instruction.line, f"{instruction.opcode}: wrong number of operands")
        setp = instruction.opcode.startswith("setp.")
        rows = [self.result(instruction, o, k, op.wide) for o, k in zip(outputs, results, strict=False)]
        reads = [
            self.source(instruction, o, k, op.wide, setp and k == "pred") for o, k in zip(given, sources, strict=True)
        ]
        if "cc" in op.results:
            rows.append(self.slots.register(CARRY, "pred"))
        if "cc" in op.sources:
            reads.append(self.slots.register(CARRY, "pred"))
        function = op.function
        if op.wide:
            function = _narrowed(function, [DTYPES[k] for k in sources])
        if setp and isinstance(given[-1], Register) and given[-1].negated:
            function = _with_last_inverted(function)
        undefined = op.undefined

        def step(frame: Frame, mask: Mask) -> None:
            values = [frame.rows[slot] for slot in reads]
            if undefined is not None:
                lane = frame.first(undefined(*values), mask)
                if lane is not None:
                    frame.fault(instruction, lane, "the result is not defined for these operands")
            found = function(*values)
            if isinstance(found, tuple):
                for row, value in zip(rows, found, strict=False):
                    write(frame.rows[row], value, mask)
            else:
                write(frame.rows[rows[0]], found, mask)

        return step

    def move(self, instruction: Instruction) -> Step:
        kind = MOVES[instruction.opcode]
        if len(instruction.operands) != 2:
            raise PtxSyntaxError(instruction.line, f"{instruction.opcode}: wrong number of operands")
        to, source = instruction.operands
        if isinstance(to, Vector) or isinstance(source, Vector):
            return self.pack(instruction, kind, to, source)
        row = self.result(instruction, to, kind, False)
        if source == Special(CLOCK) and instruction.opcode == "mov.u64":

            def read_clock(frame: Frame, mask: Mask) -> None:
                write(frame.rows[row], np.uint64(frame.memory.read_clock()), mask)

            return read_clock
        if isinstance(source, Special) and source.name in SPECIALS and kind == "u32":
            read = self.slots.special(source)
        elif isinstance(source, Symbol) and instruction.opcode in _ADDRESSES and source.name in self.variables:
            variable = self.variables[source.name]
            if SIZES[kind] == 32 and variable.space != "shared":
                raise PtxSyntaxError(instruction.line, f"the address of {source.name} has 64 bits")
            read = self.slots.constant(instruction, Immediate(variable.offset), kind)
        else:
            read = self.source(instruction, source, kind, False, False)

        def step(frame: Frame, mask: Mask) -> None:
            write(frame.rows[row], frame.rows[read], mask)

        return step

    def sleep(self, instruction: Instruction) -> Step:
        """All lanes here sleep together, as long as the one that sleeps longest."""
        read = self.source(instruction, instruction.operands[0], "u32", False, False)

        def step(frame: Frame, mask: Mask) -> None:
            lengths = frame.rows[read] if mask is None else frame.rows[read][mask]
            frame.memory.nanoseconds += int(lengths.max(initial=0))

        return step

    def pack(self, instruction: Instruction, kind: str, to: Operand, source: Operand) -> Step:
        vector, other = (to, source) if isinstance(to, Vector) else (source, to)
        if instruction.opcode not in _PACKED or not isinstance(vector, Vector) or isinstance(other, Vector):
            raise PtxSyntaxError(instruction.line, f"operands of {instruction.opcode}")
        part = SIZES[kind] // len(vector.items)
        if len(vector.items) not in (2, 4) or part < 16:
            raise PtxSyntaxError(instruction.line, f"{len(vector.items)} parts in {instruction.opcode}")
        shifts = [DTYPES[kind].type(part * i) for i in range(len(vector.items))]
        dtype = DTYPES[kind]
        if vector is to:
            rows = [self.result(instruction, item, f"b{part}", False) for item in vector.items]
            read = self.source(instruction, other, kind, False, False)

            def unpack(frame: Frame, mask: Mask) -> None:
                whole = frame.rows[read]
                pieces = [(whole >> shift).astype(f"u{part // 8}") for shift in shifts]
                for row, piece in zip(rows, pieces, strict=True):
                    write(frame.rows[row], piece, mask)

            return unpack
        row = self.result(instruction, other, kind, False)
        reads = [self.source(instruction, item, f"b{part}", False, False) for item in vector.items]

        def pack(frame: Frame, mask: Mask) -> None:
            whole = frame.rows[reads[0]].astype(dtype)
            for slot, shift in zip(reads[1:], shifts[1:], strict=True):
                whole |= frame.rows[slot].astype(dtype) << shift
            write(frame.rows[row], whole, mask)

        return pack

    def step(self, instruction: Instruction) -> Step:
        name = instruction.opcode
        if name not in _PLAIN:
            raise PtxSyntaxError(instruction.line, f"unknown instruction {name}")
        counts = {"ld": 2, "st": 2, "vote": 3, "nanosleep": 1}
        if counts.get(name.split(".")[0], len(instruction.operands)) != len(instruction.operands):
            raise PtxSyntaxError(instruction.line, f"{name}: wrong number of operands")
        if name in OPS:
            step = self.arithmetic(instruction, OPS[name])
        elif name in MOVES:
            step = self.move(instruction)
        elif name in ptx_access.LOADS:
            step = ptx_access.build_load(instruction, self.slots, self.variables)
        elif name in ptx_access.STORES:
            step = ptx_access.build_store(instruction, self.slots, self.variables)
        elif name in ptx_access.ATOMICS:
            step = ptx_access.build_atomic(instruction, self.slots, self.variables)
        elif name in SLEEPS:
            step = self.sleep(instruction)
        else:
            step = ptx_warp.BUILDERS[name](instruction, self.slots)
        if instruction.guard is not None:
            step = _guarded(step, self.slots.register(instruction.guard, "pred"), instruction.guard.negated)
        return step

    def blocks(self) -> list[Block]:
        code = self.entry.instructions
        if not code or code[-1].opcode not in (*EXITS, *BRANCHES) or code[-1].guard is not None:
            raise PtxSyntaxError(code[-1].line if code else 0, f"{self.entry.name} does not end in ret, exit or bra")
        leaders = {0, *self.entry.labels.values()}
        for at, instruction in enumerate(code):
            if instruction.opcode in (*EXITS, *BRANCHES, *BARRIERS):
                leaders.add(at + 1)
            elif instruction.opcode in ptx_warp.SYNCHRONISING:
                leaders.add(at)
        starts = sorted(leaders - {len(code)})
        numbers = {start: number for number, start in enumerate(starts)}
        blocks = []
        for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
            block = Block()
            for instruction in code[start:stop]:
                if instruction.opcode in (*EXITS, *BRANCHES, *BARRIERS):
                    self.finish(block, instruction, numbers)
                    continue
                if instruction.opcode in ptx_warp.SYNCHRONISING:
                    self.unguarded(instruction)
                    block.members = ptx_warp.members(instruction, self.slots)
                block.steps.append((instruction, self.step(instruction)))
            blocks.append(block)
        return blocks

    def unguarded(self, instruction: Instruction) -> None:
        if instruction.guard is not None:
            raise PtxSyntaxError(instruction.line, f"a guard on {instruction.opcode}")

    def finish(self, block: Block, instruction: Instruction, numbers: dict[int, int]) -> None:
        block.end, operands = instruction, instruction.operands
        if instruction.opcode in BRANCHES:
            label = operands[0] if len(operands) == 1 else None
            at = self.entry.labels.get(label.name) if isinstance(label, Symbol) else None
            if at not in numbers:
                raise PtxSyntaxError(instruction.line, f"no instruction to branch to at {label}")
            block.target = numbers[at]
        elif instruction.opcode in BARRIERS:
            self.unguarded(instruction)
            if operands != (Immediate(0),):
                raise PtxSyntaxError(instruction.line, "the only barrier is number 0 of the whole CTA")
        elif operands:
            raise PtxSyntaxError(instruction.line, f"{instruction.opcode} takes no operands")
        if instruction.guard is not None:
            block.guard, block.negated = self.slots.register(instruction.guard, "pred"), instruction.guard.negated


_PLAIN = frozenset(form.split(" ")[0] for form in accepted()) - {*EXITS, *BRANCHES, *BARRIERS}
_Function = Callable[..., Array | tuple[Array, ...]]


def _narrowed(function: _Function, dtypes: list[np.dtype[Any]]) -> _Function:
    return lambda *values: function(*(v.astype(d, copy=False) for v, d in zip(values, dtypes, strict=True)))


def _with_last_inverted(function: _Function) -> _Function:
    return lambda *values: function(*values[:-1], ~values[-1])


def _guarded(step: Step, slot: int, negated: bool) -> Step:
    def run(frame: Frame, mask: Mask) -> None:
        row = frame.rows[slot]
        chosen = ~row if negated else row.copy()  # the step may write the guard itself
        if mask is not None:
            chosen &= mask
        step(frame, chosen)

    return run


def compile_entry(entry: Entry, variables: dict[str, Variable]) -> Program:
    """Compile an entry; the offsets of the global variables are their addresses.

    Raises
    ------
    PtxSyntaxError
        An instruction, modifier or operand that is not accepted.
    """
    compiler = _Compiler(entry, variables)
    blocks = compiler.blocks()
    return Program(entry, compiler.slots, blocks)
