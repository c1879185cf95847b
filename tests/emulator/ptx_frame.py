"""The state of the lanes that run together: one numpy array per register, one element per lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from tests.emulator.ptx_memory import AccessError, Addresses, Array, Memory, check_alignment
from tests.emulator.ptx_ops import DTYPES
from tests.emulator.ptx_race import SharedAccesses
from tests.emulator.ptx_text import SIZES, Immediate, Instruction, PtxError, PtxSyntaxError, Register, Special

WARP = 32
Lanes = npt.NDArray[np.bool_]
Mask = Lanes | None  # which lanes execute; None: all of the frame
CARRY = Register("carry flag", 1)
_FILL = {1: True, 16: 0xA5A5, 32: 0xA5A5A5A5, 64: 0xA5A5A5A5A5A5A5A5}  # what registers hold before they are written


class PtxFaultError(PtxError):
    """What ends a launch: the kernel, instruction and lane at fault, and the address for a memory access."""

    def __init__(
        self, kernel: str, instruction: Instruction, cta: int, thread: int, message: str, address: int | None = None
    ) -> None:
        where = f"{kernel}, line {instruction.line}: {instruction.text}"
        super().__init__(f"{where}: cta {cta}, thread {thread}: {message}")
        self.kernel = kernel
        self.line = instruction.line
        self.text = instruction.text
        self.cta = cta
        self.thread = thread
        self.address = address


@dataclass(slots=True)
class Slots:
    """Numbers the typed arrays that the steps of one kernel work on; a frame holds an array for each."""

    keys: dict[tuple[Register | Special | int, str], int] = field(default_factory=dict)

    def _slot(self, what: Register | Special | int, kind: str) -> int:
        return self.keys.setdefault((what, kind), len(self.keys))

    def register(self, register: Register, kind: str) -> int:
        """A register seen as a type of its own size."""
        assert register.bits == SIZES[kind]
        return self._slot(Register(register.name, register.bits), kind)

    def constant(self, instruction: Instruction, value: Immediate, kind: str) -> int:
        """A literal; its bits as an unsigned number name it."""
        bits = SIZES[kind]
        if value.float_bits:
            if value.float_bits != bits or kind[0] not in "fb":
                raise PtxSyntaxError(instruction.line, f"a float literal of {value.float_bits} bits as {kind}")
        elif kind[0] == "f":
            raise PtxSyntaxError(instruction.line, f"an integer as {kind}")
        if kind == "pred":
            return self._slot(int(value.value != 0), kind)
        if not -(1 << (bits - 1)) <= value.value < 1 << bits:
            raise PtxSyntaxError(instruction.line, f"{value.value} does not fit {kind}")
        return self._slot(value.value % (1 << bits), kind)

    def special(self, special: Special) -> int:
        """A special register."""
        return self._slot(special, "u32")

    def rows(self, specials: dict[str, Array], lanes: int) -> list[Array]:
        """Make the arrays for one frame."""
        names: dict[int, dict[Register, int]] = {bits: {} for bits in _FILL}
        for what, _ in self.keys:
            if isinstance(what, Register):
                names[what.bits].setdefault(what, len(names[what.bits]))
        storage = {
            bits: np.full((len(names[bits]), lanes), fill, np.bool_ if bits == 1 else f"u{bits // 8}")
            for bits, fill in _FILL.items()
        }
        rows: list[Array] = []
        for what, kind in self.keys:
            if isinstance(what, Register):
                rows.append(storage[what.bits][names[what.bits][what]].view(DTYPES[kind]))
            elif isinstance(what, Special):
                rows.append(specials[what.name])
            else:
                number = np.bool_(what) if kind == "pred" else np.array(what, f"u{SIZES[kind] // 8}").view(DTYPES[kind])
                rows.append(np.full(lanes, number))
        return rows


class Frame:
    """The lanes of some CTAs, each CTA padded to whole warps, with their registers and shared memory."""

    def __init__(
        self,
        kernel: str,
        slots: Slots,
        ctas: npt.NDArray[np.int64],
        shape: tuple[int, int],
        params: Array,
        shared_bytes: int,
        memory: Memory,
    ) -> None:
        grid, block = shape
        self.kernel = kernel
        self.ctas = ctas
        self.memory = memory
        self.width = -(-block // WARP) * WARP
        self.lanes = self.width * len(ctas)
        self.params = params
        self.shared_bytes = shared_bytes
        self.shared = np.full((len(ctas), -(-max(shared_bytes, 1) // 16) * 2), 0xA5A5A5A5A5A5A5A5, np.uint64)
        thread = np.tile(np.arange(self.width, dtype=np.uint32), len(ctas))
        self.alive: Lanes = thread < block
        self.threads = thread.astype(np.int32) + np.int32(1)  # from one
        self.lane_id = thread % np.uint32(WARP)
        self.warp_starts = np.arange(self.lanes) & ~(WARP - 1)
        self.cta_index = np.repeat(np.arange(len(ctas), dtype=np.uint64), self.width)
        self.accesses = SharedAccesses(len(ctas), shared_bytes) if shared_bytes else None
        self._shared_bases = self.cta_index * np.uint64(self.shared.strides[0]) + np.uint64(self.shared.ctypes.data)
        specials = {
            "%tid.x": thread,
            "%ntid.x": np.full(self.lanes, block, np.uint32),
            "%ctaid.x": np.repeat(ctas.astype(np.uint32), self.width),
            "%nctaid.x": np.full(self.lanes, grid, np.uint32),
            "%laneid": self.lane_id,
        }
        self.rows = slots.rows(specials, self.lanes)

    def fault(self, instruction: Instruction, lane: int, message: str, address: int | None = None) -> NoReturn:
        """Raise the fault of one lane."""
        cta, thread = int(self.ctas[lane // self.width]), lane % self.width
        raise PtxFaultError(self.kernel, instruction, cta, thread, message, address)

    def first(self, lanes: Lanes, mask: Mask) -> int | None:
        """Return the first executing lane among those marked."""
        marked = lanes if mask is None else lanes & mask
        return int(np.argmax(marked)) if marked.any() else None

    def resolve(
        self, instruction: Instruction, space: str, addresses: Addresses, mask: Mask, nbytes: int, write: bool
    ) -> Addresses:
        """Check the accesses of the executing lanes, given in lane order, and return where in host memory they go."""
        try:
            if space == "global":
                self.memory.check(addresses, nbytes, write)
                return addresses
            check_alignment(addresses, nbytes)
            size = self.shared_bytes if space == "shared" else self.params.nbytes
            inside = addresses <= np.uint64(max(size - nbytes, 0)) if size >= nbytes else np.zeros(len(addresses), bool)
            if not inside.all():
                position = int(np.argmin(inside))
                address = int(addresses[position])
                raise AccessError(position, address, f"{space} offset {address:#x} is out of bounds of {size} bytes")
        except AccessError as error:
            lane = error.position if mask is None else int(np.flatnonzero(mask)[error.position])
            self.fault(instruction, lane, str(error), error.address)
        bases: Addresses = np.array([self.params.ctypes.data], np.uint64)
        if space == "shared":
            bases = self._shared_bases if mask is None else self._shared_bases[mask]
        return np.add(addresses, bases)

    def note(
        self,
        instruction: Instruction,
        addresses: Addresses,
        mask: Mask,
        nbytes: int,
        write: bool,
        atomic: bool = False,
    ) -> None:
        """Hold accesses to shared memory, already checked, against those since the last barrier."""
        if self.accesses is None:
            return
        ctas, threads = (v if mask is None else v[mask] for v in (self.cta_index, self.threads))
        if write:
            race = self.accesses.write(ctas, addresses, nbytes, threads, instruction.line, atomic)
        else:
            race = self.accesses.read(ctas, addresses, nbytes, threads)
        if race is not None:
            lane = race[0] if mask is None else int(np.flatnonzero(mask)[race[0]])
            self.fault(instruction, lane, race[1], int(addresses[race[0]]))


Step = Callable[[Frame, Mask], None]


def write(row: Array, value: Array, mask: Mask) -> None:
    """Set a register in the executing lanes; a narrower value is extended by its own signedness."""
    if mask is None:
        row[...] = value
    else:
        np.copyto(row, value, where=mask)
