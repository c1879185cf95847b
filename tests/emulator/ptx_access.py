"""Loads, stores and atomics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.emulator.ptx_frame import Frame, Mask, Slots, Step, write
from tests.emulator.ptx_memory import Addresses, Array, gather, scatter
from tests.emulator.ptx_ops import DTYPES
from tests.emulator.ptx_text import (
    SIZES,
    Address,
    Immediate,
    Instruction,
    Operand,
    PtxSyntaxError,
    Register,
    Symbol,
    Variable,
    Vector,
)

# Cache operators say where data should live, not what an access does. None is non-coherent (`.nc`): what a kernel of
# ours reads may be written while it runs, by its own other half or by another stream.
_LOAD_CACHE = ("", ".ca", ".cg", ".cs", ".lu", ".L1::no_allocate")
_STORE_CACHE = ("", ".wb", ".cg", ".cs", ".wt", ".L1::no_allocate")
_KINDS = [kind for kind in SIZES if kind not in ("pred", "f16")]


@dataclass(frozen=True, slots=True)
class Access:
    """What a load or store moves."""

    space: str
    kind: str
    count: int


@dataclass(frozen=True, slots=True)
class Atomic:
    """What an atomic does; without `returns` it is a reduction."""

    space: str
    name: str
    kind: str
    returns: bool


def _accesses(name: str, caches: dict[str, tuple[str, ...]]) -> dict[str, Access]:
    return {
        f"{name}.{space}{cache}{vector}.{kind}": Access(space, kind, count)
        for space, names in caches.items()
        for cache in names
        for vector, count in (("", 1), (".v2", 2), (".v4", 4))
        for kind in _KINDS
        if SIZES[kind] * count <= 128
    }


LOADS = _accesses("ld", {"global": _LOAD_CACHE, "shared": ("",), "param": ("",)})
STORES = _accesses("st", {"global": _STORE_CACHE, "shared": ("",)})
ATOMICS = {
    f"{verb}.{space}.{name}.{kind}": Atomic(space, name, kind, verb == "atom")
    for verb in ("atom", "red")
    for space in ("global", "shared")
    for name, kinds in (
        ("add", ("u32", "u64")),
        ("min", ("u32", "u64")),
        ("max", ("u32", "u64")),
        ("cas", ("b32", "b64")),
        ("exch", ("b64",)),
    )
    for kind in kinds
    if verb == "atom" or name not in ("cas", "exch")
}
_COMBINE: dict[str, Callable[[int, int], int]] = {"add": lambda a, b: a + b, "min": min, "max": max}
_COMBINE["exch"] = lambda _, b: b


def _address(
    instruction: Instruction, operand: Operand, space: str, slots: Slots, variables: dict[str, Variable]
) -> Callable[[Frame, Mask], Addresses]:
    """Return a function that gives the addresses of the executing lanes within the space."""
    if not isinstance(operand, Address):
        raise PtxSyntaxError(instruction.line, f"{instruction.opcode} needs an [address]")
    base, offset = operand.base, operand.offset
    if isinstance(base, Symbol):
        found = variables.get(base.name)
        if found is None or found.space != space:
            raise PtxSyntaxError(instruction.line, f"{base.name} is no {space} variable")
        slot = slots.constant(instruction, Immediate(found.offset + offset), "u64")
        offset = 0
    elif isinstance(base, Register) and not base.negated and base.bits in ((32, 64) if space == "shared" else (64,)):
        slot = slots.register(base, f"u{base.bits}")
    else:
        raise PtxSyntaxError(instruction.line, f"{base} is no base of a {space} address")
    wrap = np.uint64(offset % (1 << 64))

    def addresses(frame: Frame, mask: Mask) -> Addresses:
        row = frame.rows[slot]
        chosen = row if mask is None else row[mask]
        if chosen.dtype != np.uint64:  # a 32-bit shared address wraps at 32 bits
            chosen = (chosen + np.uint32(offset % (1 << 32))).astype(np.uint64)
        elif offset:
            chosen = chosen + wrap
        return chosen

    return addresses


def _registers(instruction: Instruction, operand: Operand, access: Access, slots: Slots) -> list[int]:
    """Return the slots of the data operands, which may be wider than the type."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != access.count or (access.count > 1) != isinstance(operand, Vector):
        raise PtxSyntaxError(instruction.line, f"{instruction.opcode} needs {access.count} data operands")
    found = []
    for item in items:
        if isinstance(item, Immediate) and instruction.opcode in STORES:
            found.append(slots.constant(instruction, item, access.kind))
        elif isinstance(item, Register) and not item.negated and item.bits >= max(SIZES[access.kind], 16):
            same = item.bits == SIZES[access.kind]  # else numpy extends by the sign of what was read, or truncates
            found.append(slots.register(item, access.kind if same else f"u{item.bits}"))
        else:
            raise PtxSyntaxError(instruction.line, f"{item} cannot hold {access.kind}")
    return found


def build_load(instruction: Instruction, slots: Slots, variables: dict[str, Variable]) -> Step:
    """Compile a load."""
    access, dtype = LOADS[instruction.opcode], DTYPES[LOADS[instruction.opcode].kind]
    to, source = instruction.operands
    where = _address(instruction, source, access.space, slots, variables)
    rows = _registers(instruction, to, access, slots)
    size = dtype.itemsize * access.count

    def load(frame: Frame, mask: Mask) -> None:
        addresses = where(frame, mask)
        if not len(addresses):
            return
        if access.space == "param" and (addresses == addresses[0]).all():
            place = frame.resolve(instruction, "param", addresses[:1], mask, size, False)
        else:
            place = frame.resolve(instruction, access.space, addresses, mask, size, False)
        if access.space == "shared":
            frame.note(instruction, addresses, mask, size, False)
        data = gather(place, dtype, access.count)
        for i, row in enumerate(rows):
            column = data[:, i] if access.count > 1 else data
            if mask is None:
                frame.rows[row][...] = column
            else:
                frame.rows[row][mask] = column

    return load


def build_store(instruction: Instruction, slots: Slots, variables: dict[str, Variable]) -> Step:
    """Compile a store."""
    access, dtype = STORES[instruction.opcode], DTYPES[STORES[instruction.opcode].kind]
    to, source = instruction.operands
    where = _address(instruction, to, access.space, slots, variables)
    rows = _registers(instruction, source, access, slots)
    size = dtype.itemsize * access.count

    def store(frame: Frame, mask: Mask) -> None:
        addresses = where(frame, mask)
        if not len(addresses):
            return
        place = frame.resolve(instruction, access.space, addresses, mask, size, True)
        if access.space == "shared":
            frame.note(instruction, addresses, mask, size, True)
        data = np.empty((len(addresses), access.count), dtype)
        for i, row in enumerate(rows):
            column = frame.rows[row]
            data[:, i] = (column if mask is None else column[mask]).astype(dtype)
        scatter(place, data if access.count > 1 else data[:, 0], access.count)

    return store


def build_atomic(instruction: Instruction, slots: Slots, variables: dict[str, Variable]) -> Step:
    """Compile an atomic or a reduction; the lanes take their turns in order."""
    atomic, dtype = ATOMICS[instruction.opcode], DTYPES[ATOMICS[instruction.opcode].kind]
    operands = list(instruction.operands)
    result = operands.pop(0) if atomic.returns else None
    where = _address(instruction, operands.pop(0), atomic.space, slots, variables)
    row = None
    if result is not None:
        if not isinstance(result, Register) or result.negated or result.bits != SIZES[atomic.kind]:
            raise PtxSyntaxError(instruction.line, f"{result} cannot hold {atomic.kind}")
        row = slots.register(result, atomic.kind)
    sources = []
    for operand in operands:
        if isinstance(operand, Immediate):
            sources.append(slots.constant(instruction, operand, atomic.kind))
        elif isinstance(operand, Register) and not operand.negated and operand.bits == SIZES[atomic.kind]:
            sources.append(slots.register(operand, atomic.kind))
        else:
            raise PtxSyntaxError(instruction.line, f"{operand} is no {atomic.kind}")
    if len(sources) != (2 if atomic.name == "cas" else 1):
        raise PtxSyntaxError(instruction.line, f"{instruction.opcode}: wrong number of operands")
    limit = 1 << SIZES[atomic.kind]

    def run(frame: Frame, mask: Mask) -> None:
        addresses = where(frame, mask)
        if not len(addresses):
            return
        place = frame.resolve(instruction, atomic.space, addresses, mask, dtype.itemsize, True)
        if atomic.space == "shared":
            frame.note(instruction, addresses, mask, dtype.itemsize, True, True)
        unique, inverse = np.unique(place, return_inverse=True)
        cells = [int(v) for v in gather(unique, dtype, 1)]
        values = [(frame.rows[s] if mask is None else frame.rows[s][mask]).tolist() for s in sources]
        old = []
        for cell, *given in zip(inverse.reshape(-1).tolist(), *values, strict=True):
            before = cells[cell]
            old.append(before)
            if atomic.name == "cas":
                cells[cell] = given[1] if before == given[0] else before
            else:
                cells[cell] = _COMBINE[atomic.name](before, given[0]) % limit
        scatter(unique, np.array(cells, dtype), 1)
        if row is not None:
            found: Array = np.zeros(frame.lanes, dtype)
            found[mask if mask is not None else slice(None)] = old
            write(frame.rows[row], found, mask)

    return run
