"""Instructions by which the lanes of a warp act together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.emulator.ptx_frame import WARP, Frame, Lanes, Mask, Slots, Step, write
from tests.emulator.ptx_memory import Array
from tests.emulator.ptx_text import Immediate, Instruction, Operand, Pair, PtxSyntaxError, Register

SHUFFLES = {f"shfl.sync.{mode}.b32": mode for mode in ("idx", "up", "down", "bfly")}
VOTES = ("vote.sync.ballot.b32",)
SYNCHRONISING = (*SHUFFLES, *VOTES)
_ALL = np.uint32(0xFFFFFFFF)


def _bits(lanes: Lanes) -> Array:
    """The lanes of each warp as one word, lane 0 lowest; shape (warps, 1)."""
    return np.packbits(lanes.reshape(-1, WARP), axis=1, bitorder="little").view(np.uint32)


def _word(instruction: Instruction, operand: Operand, slots: Slots) -> int:
    if isinstance(operand, Immediate):
        return slots.constant(instruction, operand, "u32")
    if isinstance(operand, Register) and operand.bits == 32 and not operand.negated:
        return slots.register(operand, "u32")
    raise PtxSyntaxError(instruction.line, f"{operand} is no 32-bit operand")


def members(instruction: Instruction, slots: Slots) -> int:
    """Return the slot of the member mask, the last operand of each of these instructions."""
    return _word(instruction, instruction.operands[-1], slots)


def ready(frame: Frame, instruction: Instruction, slot: int, mask: Mask) -> Lanes:
    """Return which of the lanes here have all the living lanes of their member mask here with them."""
    here = frame.alive if mask is None else mask
    whole = ((frame.rows[slot] == _ALL) | ~here).all()
    if whole and (mask is None or np.array_equal(mask, frame.alive)):
        return here
    bits, alive = _bits(here), _bits(frame.alive)
    named = frame.rows[slot].reshape(-1, WARP)
    going: Lanes = (((named & alive) & ~bits) == 0).reshape(-1) & here
    if not whole:
        _check_members(frame, instruction, named, here, going)
    return going


def _check_members(frame: Frame, instruction: Instruction, named: Array, here: Lanes, going: Lanes) -> None:
    own = np.left_shift(np.uint32(1), np.arange(WARP, dtype=np.uint32))
    lane = frame.first(((named & own) == 0).reshape(-1), here)
    if lane is not None:
        frame.fault(instruction, lane, "the executing lane is not in its own member mask")
    together = (named[:, :, None] & own) & np.where(going.reshape(-1, 1, WARP), _ALL, np.uint32(0))
    different = (together != 0) & (named[:, :, None] != named[:, None, :])
    lane = frame.first(different.any(axis=2).reshape(-1), going)
    if lane is not None:
        frame.fault(instruction, lane, "lanes of one warp give different member masks")


def _source_lanes(mode: str, lane: Array, b: Array, c: Array) -> tuple[Array, Lanes]:
    """The lane each lane reads, and whether it is in range; out of range it reads itself."""
    segments = (c >> np.uint32(8)) & np.uint32(31)
    clamp, offset, me = c & np.uint32(31), (b & np.uint32(31)).astype(np.int64), lane.astype(np.int64)
    low = lane & segments
    high = (low | (clamp & ~segments)).astype(np.int64)
    if mode == "up":
        source = me - offset
        valid = source >= high
    else:
        if mode == "down":
            source = me + offset
        elif mode == "bfly":
            source = me ^ offset
        else:
            source = low.astype(np.int64) | (offset & ~segments.astype(np.int64))
        valid = source <= high
    return np.where(valid, source, me), valid  # in range is also within the warp, whatever the operands


def build_shuffle(instruction: Instruction, slots: Slots) -> Step:
    """Compile a shuffle."""
    mode = SHUFFLES[instruction.opcode]
    to, *sources = instruction.operands
    if len(sources) != 4:
        raise PtxSyntaxError(instruction.line, f"{instruction.opcode}: wrong number of operands")
    a, b, c, member = (_word(instruction, operand, slots) for operand in sources)
    second = to.second if isinstance(to, Pair) else None
    first = to.first if isinstance(to, Pair) else to
    row = _word(instruction, first, slots)
    if isinstance(first, Immediate) or (second is not None and (second.bits != 1 or second.negated)):
        raise PtxSyntaxError(instruction.line, f"{to} is no destination of {instruction.opcode}")
    flag = None if second is None else slots.register(second, "pred")

    def shuffle(frame: Frame, mask: Mask) -> None:
        rows = frame.rows
        source, valid = _source_lanes(mode, frame.lane_id, rows[b], rows[c])
        inside = (rows[member] >> source.astype(np.uint32)) & np.uint32(1)
        source += frame.warp_starts
        if mask is not None or not inside.all():
            here = frame.alive if mask is None else mask
            lane = frame.first(~(here[source] & inside.astype(np.bool_)), mask)
            if lane is not None:
                frame.fault(instruction, lane, f"reads lane {int(source[lane]) % WARP}, which does not take part")
        value = rows[a].take(source)
        write(rows[row], value, mask)
        if flag is not None:
            write(rows[flag], valid, mask)

    return shuffle


def build_ballot(instruction: Instruction, slots: Slots) -> Step:
    """Compile a ballot."""
    to, source, _ = instruction.operands
    row, member = _word(instruction, to, slots), members(instruction, slots)
    if isinstance(to, Immediate) or not isinstance(source, Register) or source.bits != 1:
        raise PtxSyntaxError(instruction.line, f"operands of {instruction.opcode}")
    slot, negated = slots.register(source, "pred"), source.negated

    def ballot(frame: Frame, mask: Mask) -> None:
        votes = ~frame.rows[slot] if negated else frame.rows[slot]
        bits = _bits(votes if mask is None else votes & mask)
        found = np.broadcast_to(bits, (len(bits), WARP)).reshape(-1) & frame.rows[member]
        write(frame.rows[row], found, mask)

    return ballot


Builder = Callable[[Instruction, Slots], Step]
BUILDERS: dict[str, Builder] = {**dict.fromkeys(SHUFFLES, build_shuffle), **dict.fromkeys(VOTES, build_ballot)}
