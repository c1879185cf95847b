"""Runs the kernels of a PTX module over numpy arrays, one lane per thread.

The lanes of some CTAs run together. Each step takes the lanes at the lowest block of the program, so lanes that went
different ways meet again where their ways join. Where a seed is given, the warps of a CTA that has barriers take turns
between them, in an order drawn from it.
"""

from __future__ import annotations

import functools
from collections import deque

import numpy as np

from tests.emulator import ptx_warp
from tests.emulator.ptx_compile import BARRIERS, BRANCHES, Block, Program, compile_entry
from tests.emulator.ptx_frame import WARP, Frame, Lanes, Mask
from tests.emulator.ptx_memory import Array, Memory
from tests.emulator.ptx_parse import parse
from tests.emulator.ptx_text import Variable

TURNS = 4  # in which the warps of a CTA run between barriers, at most
LANES = 4096  # CTAs run together up to this many lanes
MAX_STEPS = 2_000_000


class Module:
    """A PTX text, parsed and compiled; it refuses what it does not know."""

    def __init__(self, text: str) -> None:
        parsed = parse(text)
        self._storage: dict[str, Array] = {}
        variables: dict[str, Variable] = {}
        for name, found in parsed.globals.items():
            array = np.zeros(-(-found.nbytes // 16) * 2 + found.align // 8, np.uint64).view(np.uint8)
            array = array[-array.ctypes.data % found.align :][: found.nbytes]
            array[: len(found.data)] = np.frombuffer(found.data, np.uint8)
            self._storage[name] = array
            variables[name] = Variable(name, "global", found.align, found.nbytes, array.ctypes.data)
        self.variables = {name: (v.offset, v.nbytes) for name, v in variables.items()}
        self.entries: dict[str, Program] = {n: compile_entry(e, variables) for n, e in parsed.entries.items()}

    def instructions(self) -> frozenset[str]:
        """The distinct forms of instruction, opcode and modifiers, over all entries."""
        return frozenset(i.form for program in self.entries.values() for i in program.entry.instructions)

    def run(
        self,
        entry: str,
        grid: int,
        block: int,
        params: bytes,
        memory: Memory,
        max_steps: int = MAX_STEPS,
        seed: int | None = None,
    ) -> None:
        """Run a launch to its end.

        Parameters
        ----------
        entry : str
            The name of the kernel.
        grid, block : int
            CTAs, and threads per CTA.
        params : bytes
            The whole parameter space, every argument at its aligned offset.
        memory : Memory
            What the kernel may touch; the module's own variables are added while it runs.
        max_steps : int
            Instructions, counted once for all lanes that execute them together, before the launch is given up.
        seed : int, optional
            Permutes the order of the CTAs, and where a kernel has barriers the order of the warps of each CTA between
            them; by default CTAs run in order, and their warps in step.

        Raises
        ------
        PtxFaultError
            A lane did what it must not: names kernel, instruction and lane.
        ValueError
            The launch does not fit the entry.
        """
        program = self.entries[entry]
        if not 0 < block <= program.entry.max_threads or grid <= 0:
            raise ValueError(f"{entry}: a launch of {grid} x {block}; at most {program.entry.max_threads} threads")
        if len(params) != program.param_bytes:
            raise ValueError(f"{entry}: {len(params)} bytes of parameters instead of {program.param_bytes}")
        space = np.zeros(-(-len(params) // 16) * 2 + 2, np.uint64).view(np.uint8)
        space = space[-space.ctypes.data % 16 :][: len(params)]
        space[:] = np.frombuffer(params, np.uint8)
        rng = None if seed is None else np.random.default_rng(seed)
        order = np.arange(grid) if rng is None else rng.permutation(grid)
        if not program.has_barriers:
            rng = None  # nothing is shared between the warps of a CTA that other CTAs do not share as well
        together = max(1, LANES // (-(-block // WARP) * WARP))
        added = [memory.add(array.ctypes.data, array.nbytes, name) for name, array in self._storage.items()]
        try:
            for start in range(0, grid, together):
                ctas = order[start : start + together]
                frame = Frame(entry, program.slots, ctas, (grid, block), space, program.shared_bytes, memory)
                with np.errstate(all="ignore"):
                    max_steps = _Run(program, frame, max_steps, rng).finish()
        finally:
            for known in added:
                memory.remove(known.address)


class _Run:
    """The schedule of one frame."""

    def __init__(self, program: Program, frame: Frame, steps: int, rng: np.random.Generator | None = None) -> None:
        self.program = program
        self.frame = frame
        self.steps = steps
        self.threads = frame.alive  # the lanes that exist: CTAs are padded to whole warps
        self.ready: dict[int, Mask] = {0: None if frame.alive.all() else frame.alive.copy()}
        self.parked: dict[int, Lanes] = {}  # incomplete warps before a synchronising instruction
        self.waiting = np.full(frame.lanes, -1, np.int64)  # the block after the barrier at which a lane waits
        self.turns = self.draw(rng)

    def draw(self, rng: np.random.Generator | None) -> deque[Lanes]:
        """The lanes of each turn: the warps of a CTA in a random order, dealt out to at most `TURNS` turns."""
        warps = self.frame.width // WARP
        if rng is None or warps == 1:
            return deque()
        turns = min(warps, TURNS)
        dealt = rng.permuted(np.tile(np.arange(warps) % turns, (len(self.frame.ctas), 1)), axis=1)
        return deque(np.repeat(dealt.reshape(-1), WARP) == turn for turn in range(turns))

    def next(self) -> tuple[int, Mask]:
        """The lowest block with lanes that may go on, and those of them whose turn it is."""
        for _ in range(len(self.turns)):
            turn = self.turns[0]
            for number in sorted(self.ready):
                mask = self.ready[number]
                here = (self.frame.alive if mask is None else mask) & turn
                if here.any():
                    rest = (self.frame.alive if mask is None else mask) & ~turn
                    del self.ready[number]
                    if rest.any():
                        self.ready[number] = rest
                    return number, here
            self.turns.rotate(-1)
        number = min(self.ready)
        return number, self.ready.pop(number)

    def arrive(self, number: int, mask: Mask) -> None:
        """Let lanes go on at a block, together with those that are there already."""
        parked = self.parked.pop(number, None)
        for other in (self.ready.get(number), parked):
            if other is not None and mask is not None:
                mask = mask | other
        self.ready[number] = None if mask is None or mask.all() else mask

    def finish(self) -> int:
        """Run until all lanes have exited; returns the steps left."""
        blocks, frame = self.program.blocks, self.frame
        while self.ready:
            number, mask = self.next()
            block = blocks[number]
            if block.members is not None:
                here = frame.alive if mask is None else mask
                going = ptx_warp.ready(frame, block.steps[0][0], block.members, mask)
                if not going.all():
                    if not np.array_equal(going, here):
                        self.parked[number] = here & ~going
                        if not going.any():
                            continue
                    mask = going
            for _, step in block.steps:
                step(frame, mask)
            self.steps -= len(block.steps) + 1
            if self.steps < 0:
                instruction = block.end or block.steps[0][0]
                frame.fault(instruction, self.some(mask), "the launch takes too many steps")
            self.leave(number, block, mask)
        self.stuck()
        return self.steps

    def some(self, mask: Mask) -> int:
        """One of the executing lanes."""
        return 0 if mask is None else int(np.argmax(mask))

    def leave(self, number: int, block: Block, mask: Mask) -> None:
        """Send the lanes on from the end of a block."""
        if block.end is None:
            self.arrive(number + 1, mask)
            return
        taken, rest = mask, None
        if block.guard is not None:
            row = self.frame.rows[block.guard]
            chosen = ~row if block.negated else row
            taken = chosen.copy() if mask is None else chosen & mask
            rest = ~taken if mask is None else mask & ~taken
            if block.end.opcode == "bra.uni":
                self.uniform(block, taken, rest)
        if taken is None or taken.any():
            if block.end.opcode in BRANCHES:
                self.arrive(block.target, taken)
            elif block.end.opcode in BARRIERS:
                self.wait(number + 1, block, taken)
            else:
                self.exit(taken)
        if rest is not None and rest.any():
            self.arrive(number + 1, rest)

    def uniform(self, block: Block, taken: Lanes, rest: Lanes) -> None:
        """Hold a `.uni` branch to its word."""
        split = taken.reshape(-1, WARP).any(1) & rest.reshape(-1, WARP).any(1)
        if split.any() and block.end is not None:
            lane = int(np.argmax(split)) * WARP
            self.frame.fault(block.end, lane, "a uniform branch on which the warp does not agree")

    def exit(self, mask: Mask) -> None:
        """End lanes; warps that waited for them may go on."""
        gone = self.frame.alive if mask is None else mask
        self.frame.alive = self.frame.alive & ~gone
        for number in tuple(self.parked):
            self.arrive(number, self.parked[number])

    def wait(self, after: int, block: Block, mask: Mask) -> None:
        """Hold lanes at the barrier, and let each CTA go on whose threads are all there."""
        frame = self.frame
        here = frame.alive if mask is None else mask
        self.waiting[here] = after
        complete = ((self.waiting >= 0) | ~self.threads).reshape(-1, frame.width).all(1)
        if not complete.any():
            return
        if frame.accesses is not None:
            frame.accesses.barrier(np.flatnonzero(complete))
        released = np.repeat(complete, frame.width) & (self.waiting >= 0)
        warps = np.where(released, self.waiting, -1).reshape(-1, WARP)
        uneven = (warps >= 0) & (warps != warps.max(1, keepdims=True))
        if uneven.any() and block.end is not None:
            frame.fault(block.end, int(np.argmax(uneven)), "the lanes of a warp are at different barriers")
        for target in np.unique(self.waiting[released]):
            self.arrive(int(target), released & (self.waiting == target))
        self.waiting[released] = -1

    def stuck(self) -> None:
        """Refuse to end while lanes wait for others that can no longer come."""
        for number, mask in self.parked.items():
            instruction = self.program.blocks[number].steps[0][0]
            self.frame.fault(instruction, self.some(mask), "waits for lanes of its warp that never come")
        waiting = self.waiting >= 0
        if waiting.any():
            lane = self.some(waiting)
            end = self.program.blocks[int(self.waiting[lane]) - 1].end
            if end is not None:
                self.frame.fault(end, lane, "waits for threads of its CTA that never come")


@functools.cache
def module_of(image: bytes) -> Module:
    """Parsed once per image and process."""
    return Module(image.decode())
