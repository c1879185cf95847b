"""A program on a device by both runners: the same bytes, the same errors. On the emulator Python alone runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.copying import kernel_args as ka
from kvraw.copying.kernel import copy_kernel, launch_shape
from kvraw.copying.plan import CopyPlan, Side
from kvraw.errors import BoundsError, DriverError
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import CudaDriver, driver
from kvraw.runtime.module import ArgumentBlock
from kvraw.runtime.program import IDS, IDS_COUNT, Commands, Program, Value, warm_up

BLOCKS, BLOCK, MOST = 64, 4096, 24
PLAN = CopyPlan(Side(BLOCK, limit=BLOCKS), Side(BLOCK), 1, 1, 1, 1, BLOCK)


class Case:
    """Blocks on a device, a slot there that a kernel packs ids' blocks into, and pinned memory for the results."""

    def __init__(self, device: int, stack: ExitStack) -> None:
        self.device, self.driver = device, driver()
        stack.enter_context(DeviceScope(device))
        self.cache = stack.enter_context(kvraw.DeviceBuffer(BLOCKS * BLOCK, device)).address
        self.slot = stack.enter_context(kvraw.DeviceBuffer(MOST * BLOCK, device)).address
        self.source, self.out = stack.enter_context(kvraw.HostPool(4 << 20, device=device)).chunks(2, BLOCKS * BLOCK)
        self.stream, self.other = (stack.enter_context(kvraw.Stream(device)) for _ in range(2))
        self.events = [self.driver.event_create() for _ in range(3)]
        for event in self.events:
            stack.callback(self.driver.event_destroy, event)
        self.block = ArgumentBlock(ka.ARGS)
        ka.fill_plan(self.block.record, PLAN)
        self.split = ka.fill_width(self.block.record, PLAN, 16)
        short, words = self.block.record.view(np.uint32), self.block.record.view(np.uint64)
        short[ka.FLAGS[0]], short[ka.FLAGS[1]] = ka.INDEX_INLINE | ka.TABLE_INLINE, ka.TABLE_INLINE
        words[ka.TABLE[0]], words[ka.TABLE[1]], words[ka.INDEX[0]] = 0, 1, 2
        words[ka.WORDS_AT], words[ka.WORDS_AT + 1] = self.cache, self.slot

    def word(self, at: int) -> int:
        return int(self.block.record.ctypes.data) + 8 * at

    def synchronize(self) -> None:
        for stream in (self.stream, self.other):
            self.driver.stream_synchronize(stream.handle)

    def commands(self) -> tuple[Commands, Value, Value, Value]:
        """Blocks by ids into the slot, and from there to pinned memory on another stream, behind a fill of both."""
        c, s, t = Commands(), self.stream.handle, self.other.handle
        packed, copied, loaded = self.events
        blocks, nbytes, segments = (c.value() for _ in range(3))
        c.on_device(self.device)
        c.uncaptured(s)
        c.check("block_ids", IDS, IDS_COUNT, BLOCKS, distinct=True)
        c.write(self.word(ka.WORDS_AT + 2), IDS, IDS_COUNT)
        c.write(self.word(ka.SEGMENTS), segments.address, 1)
        c.copy(self.cache, self.source.address, BLOCKS * BLOCK, s)
        c.record(loaded, s)
        c.memset(self.slot, 0xEE, MOST * BLOCK, s)
        c.launch(copy_kernel(16).handle(), blocks, 128, s, self.block.address)
        c.record(packed, s)
        c.wait(t, packed)
        c.copy(self.out.address, self.slot, nbytes, t)
        # The last blocks of the slot, each second half left out.
        c.copy_2d(self.out.address + MOST * BLOCK, BLOCK, self.slot, BLOCK, BLOCK // 2, MOST, t)
        c.record(copied, t)
        c.wait(s, copied)
        return c, blocks, nbytes, segments


@pytest.fixture
def case(device: int) -> Iterator[Case]:
    with ExitStack() as stack:
        made = Case(device, stack)
        yield made
        made.synchronize()


def runners(case: Case, commands: Commands, **options: Any) -> dict[str, tuple[Program, Callable[..., bool]]]:
    one, other = (Program(commands, case.driver, **options) for _ in range(2))
    both = {"python": (other, other.run_python)}
    if isinstance(case.driver, CudaDriver):
        assert warm_up()
        assert one.compiled
        both["compiled"] = (one, one.run)
    return both


@pytest.mark.parametrize("release", [False, True])
def test_both_runners_move_the_same_bytes(case: Case, release: bool) -> None:
    c, blocks, nbytes, segments = case.commands()
    rng = np.random.default_rng(1)
    for program, run in runners(case, c, release=release).values():
        for count in (1, 7, MOST):
            ids = rng.permutation(BLOCKS)[:count]
            case.source.numpy()[:] = rng.integers(0, 256, BLOCKS * BLOCK)
            case.out.numpy()[:] = 0
            v, n = program.values, count * PLAN.runs_per_item * case.split
            v[segments.index], v[nbytes.index] = n, count * BLOCK
            v[blocks.index] = launch_shape(n, 16, 128)[0]
            assert run(ids)
            case.driver.event_synchronize(case.events[1])
            wanted = case.source.numpy().reshape(BLOCKS, BLOCK)[ids]
            out = case.out.numpy()
            np.testing.assert_array_equal(out[: count * BLOCK].reshape(count, BLOCK), wanted)
            rows = out[MOST * BLOCK : 2 * MOST * BLOCK].reshape(MOST, BLOCK)
            np.testing.assert_array_equal(rows[:count, : BLOCK // 2], wanted[:, : BLOCK // 2])
            assert (rows[count:, : BLOCK // 2] == 0xEE).all()
            assert not rows[:, BLOCK // 2 :].any()
        with pytest.raises(BoundsError, match=r"block_ids\[2\] is 64, must be in \[0, 64\)"):
            run(np.array([1, 2, 64]))
        with pytest.raises(BoundsError, match="block_ids has 5 more than once"):
            run(np.array([5, 2, 5]))


def test_a_batch(case: Case) -> None:
    rng = np.random.default_rng(2)
    order = rng.permutation(BLOCKS)
    dst = (case.out.address + np.arange(BLOCKS) * BLOCK).astype(np.uint64)
    src, sizes = (case.cache + order * BLOCK).astype(np.uint64), np.full(BLOCKS, BLOCK, np.uint64)
    c = Commands()
    count, first = c.value(), c.value()
    s = case.stream.handle
    c.copy(case.cache, case.source.address, BLOCKS * BLOCK, s)
    c.copy_batch(first, int(src.ctypes.data), int(sizes.ctypes.data), count, s)
    c.record(case.events[0], s)
    case.source.numpy()[:] = rng.integers(0, 256, BLOCKS * BLOCK)
    wanted = case.source.numpy().reshape(BLOCKS, BLOCK)[order]
    bad = dst.copy()
    pageable = np.zeros(BLOCK, np.uint8)
    bad[5] = int(pageable.ctypes.data)
    met = []
    for program, run in runners(case, c).values():
        for n in (0, 1, BLOCKS):
            case.out.numpy()[:] = 0
            program.values[count.index], program.values[first.index] = n, int(dst.ctypes.data)
            assert run()
            case.driver.event_synchronize(case.events[0])
            out = case.out.numpy().reshape(BLOCKS, BLOCK)
            np.testing.assert_array_equal(out[:n], wanted[:n])
            assert not out[n:].any()
        program.values[first.index] = int(bad.ctypes.data)
        try:
            run()
        except DriverError as error:
            met.append((str(error), error.call, error.code, error.index, error.command))
        case.driver.stream_synchronize(s)
    assert len(set(met)) <= 1  # some drivers take pageable memory
    assert all(one[-1] == 1 for one in met)


def test_a_command_that_fails(case: Case) -> None:
    c = Commands()
    c.record(case.events[0], case.stream.handle)
    c.launch(copy_kernel(16).handle(), 1, 4096, case.stream.handle, case.block.address)
    met = []
    for _, run in runners(case, c).values():
        with pytest.raises(DriverError) as error:
            run()
        met.append((str(error.value), error.value.name, error.value.call, error.value.command))
    assert len(set(met)) == 1
    assert met[0][1] == "CUDA_ERROR_INVALID_VALUE"
    assert met[0][3] == 1


def test_rows_that_end_a_program(case: Case) -> None:
    c = Commands()
    device, event = c.value(), c.value()
    c.on_device(device)
    c.reached(event)
    c.record(case.events[2], case.stream.handle)
    for program, run in runners(case, c).values():
        d = case.driver
        program.values[device.index], program.values[event.index] = case.device + 1, case.events[0]
        assert not run()
        assert program.ended_at == 0
        program.values[device.index] = case.device
        for _ in range(4):  # enough for the first of them to be under way
            d.memcpy_async(case.out.address, case.cache, BLOCKS * BLOCK, case.stream.handle)
        d.event_record(case.events[0], case.stream.handle)
        if not run():
            assert program.ended_at == 1
        d.stream_synchronize(case.stream.handle)
        assert run()


@pytest.mark.gpu
def test_beside_and_inside_a_capture(gpu: int) -> None:
    """An event is asked for without an end to a capture in the strictest mode, and a program can be captured itself."""
    from cuda.bindings import driver as cu

    with ExitStack() as stack:
        case = Case(gpu, stack)
        d, s, t = case.driver, case.stream.handle, case.other.handle
        d.event_record(case.events[0], t)
        d.stream_synchronize(t)
        asks, guarded, moves = Commands(), Commands(), Commands()
        asks.reached(case.events[0])
        guarded.uncaptured(s)
        guarded.memset(case.slot, 1, BLOCK, s)
        moves.memset(case.slot, 7, BLOCK, s)
        moves.copy(case.out.address, case.slot, BLOCK, s)
        moves.record(case.events[1], s)
        moves.wait(t, case.events[1])
        moves.copy(case.out.address + BLOCK, case.slot, BLOCK, t)
        moves.record(case.events[2], t)
        moves.wait(s, case.events[2])
        for name in ("compiled", "python"):
            case.out.numpy()[:] = 0
            assert cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)[0] == 0
            assert runners(case, asks)[name][1]()
            assert not runners(case, guarded)[name][1]()
            assert runners(case, moves)[name][1]()
            code, graph = cu.cuStreamEndCapture(s)
            assert code == 0
            code, ready = cu.cuGraphInstantiate(graph, 0)
            assert code == 0
            assert not case.out.numpy().any()
            assert cu.cuGraphLaunch(ready, s)[0] == 0
            d.stream_synchronize(s)
            out = case.out.numpy()
            assert (out[: 2 * BLOCK] == 7).all()
            assert cu.cuGraphExecDestroy(ready)[0] == cu.cuGraphDestroy(graph)[0] == 0
            assert runners(case, guarded)[name][1]()
            d.stream_synchronize(s)
