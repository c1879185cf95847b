"""Host time of programs of driver commands by both runners: `python -m benchmarks.program [--rounds N] [--beside]`.

Programs of 1, 4 and 40 driver calls on a GPU, the streams idle ahead of each run, without torch; without a GPU, on C
functions that do nothing. 4: device, capture, launch and record, behind a check of 256 ids that are written as well.
40: six slots of 32 MiB of a store, of launches of one warp, records, waits and copies. `--beside` has the same once
more beside a thread that counts in a loop. Figures are microseconds.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

import kvraw
from kvraw.copying import kernel_args as ka
from kvraw.copying.kernel import copy_kernel
from kvraw.copying.plan import CopyPlan, Side
from kvraw.errors import DriverError
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver, driver_or_none
from kvraw.runtime.module import ArgumentBlock
from kvraw.runtime.program import IDS, IDS_COUNT, Commands, DriverFunctions, Program, warm_up
from kvraw.runtime.program_rows import CALLS

BLOCK, LIMIT = 4096, 2048


def percentiles(run: Callable[[], Any], idle: Callable[[], None], rounds: int) -> tuple[float, float, float]:
    times = []
    for k in range(rounds + 10):
        idle()
        begin = time.perf_counter_ns()
        run()
        if k >= 10:
            times.append((time.perf_counter_ns() - begin) / 1e3)
    times.sort()
    return times[len(times) // 2], times[len(times) * 9 // 10], times[len(times) * 99 // 100]


def programs(handles: dict[str, int], events: list[int], block: ArgumentBlock) -> dict[str, Commands]:
    """Of no commands; an event; a kernel with its checks, words and event; six slots of a store, 40 commands in all."""
    s, t, kernel = handles["stream"], handles["other"], handles["kernel"]
    start = int(block.record.ctypes.data)
    one, four, forty = Commands(), Commands(), Commands()
    one.record(events[0], s)
    four.on_device(0)
    four.uncaptured(s)
    for c in (four, forty):
        c.check("block_ids", IDS, IDS_COUNT, LIMIT, distinct=True)
        c.write(start + 8 * (ka.WORDS_AT + 2), IDS, IDS_COUNT)
    four.launch(kernel, 1, 32, s, block.address)
    four.record(events[0], s)
    forty.record(events[0], s)
    forty.wait(t, events[0])
    for k in range(6):
        free, packed = events[1 + k % 2], events[3 + k % 2]
        forty.wait(s, free)
        forty.launch(kernel, 1, 32, s, block.address)
        forty.record(packed, s)
        forty.wait(t, packed)
        forty.copy(handles["host"], handles["device"], handles["bytes"], t)
        forty.record(free, t)
    forty.wait(s, events[1])
    forty.record(events[0], s)
    return {"0 commands": Commands(), "1 command": one, "4 commands": four, "40 commands": forty}


class Nothing:
    """A driver whose functions do nothing, in Python as in C."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: True

    def context_device(self) -> int:
        return 0

    def stream_capturing(self, stream: int) -> bool:
        return False


def nothing() -> tuple[DriverFunctions, object]:
    """C functions that ignore what they are given and return 0."""
    from numba import cfunc

    made = cfunc("int32(int64)")(lambda a: 0)
    return DriverFunctions(dict.fromkeys(CALLS.values(), made.address), lambda *_: DriverError("failed", 1, "")), made


def show(
    made: dict[str, Commands], functions: DriverFunctions | None, owner: Any, idle: Callable[[], None], rounds: int
) -> None:
    ids = [np.random.default_rng(k).permutation(LIMIT)[:256] for k in range(8)]
    print(
        f"{'':12}{'compiled, p50':>14}{'p90':>8}{'p99':>8}{'GIL given, p50':>16}{'p90':>8}{'p99':>9}{'Python, p50':>13}"
    )
    for name, commands in made.items():
        figures: list[float] = []
        for release in (False, True):
            program = Program(commands, owner, release=release, functions=functions)
            assert program.compiled
            at = iter(range(1 << 30))
            figures += percentiles(lambda: program.run(ids[next(at) % 8]), idle, rounds)
        program = Program(commands, owner, functions=functions)
        figures.append(percentiles(lambda: program.run_python(ids[0]), idle, rounds)[0])
        print(f"{name:12}" + "".join(f"{x:{w}.2f}" for x, w in zip(figures, (14, 8, 8, 16, 8, 9, 13), strict=True)))


def measure(rounds: int) -> None:
    if driver_or_none() is None:
        functions, kept = nothing()
        block = ArgumentBlock(ka.ARGS)
        handles = dict.fromkeys(("stream", "other", "kernel", "host", "device", "bytes"), 1)
        show(programs(handles, [1] * 5, block), functions, Nothing(), lambda: None, rounds)
        del kept
        return
    d = driver()
    with ExitStack() as stack:
        stack.enter_context(DeviceScope(0))
        streams = [stack.enter_context(kvraw.Stream(0)) for _ in range(2)]
        nbytes = 32 << 20
        device = stack.enter_context(kvraw.DeviceBuffer(2 * nbytes, 0)).address
        (chunk,) = stack.enter_context(kvraw.HostPool(nbytes + (2 << 20), device=0)).chunks(1, nbytes)
        block, plan = ArgumentBlock(ka.ARGS), CopyPlan(Side(0), Side(0), 1, 1, 1, 1, BLOCK)
        ka.fill_plan(block.record, plan)
        ka.fill_width(block.record, plan, 16)
        words, short = block.record.view(np.uint64), block.record.view(np.uint32)
        short[ka.FLAGS[0]] = short[ka.FLAGS[1]] = ka.TABLE_INLINE
        words[ka.TABLE[1]], words[ka.SEGMENTS] = 1, 1
        words[ka.WORDS_AT], words[ka.WORDS_AT + 1] = device, device + nbytes
        handles = {"stream": streams[0].handle, "other": streams[1].handle, "kernel": copy_kernel(16).handle()}
        handles |= {"host": chunk.address, "device": device, "bytes": nbytes}
        events = [d.event_create() for _ in range(5)]
        for event in events:
            d.event_record(event, streams[0].handle)

        def idle() -> None:
            for stream in streams:
                d.stream_synchronize(stream.handle)

        print(d.device_name(0))
        show(programs(handles, events, block), None, d, idle, rounds)
        idle()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--beside", action="store_true")
    options = parser.parse_args()
    begin = time.perf_counter()
    if not warm_up():
        sys.exit("the compiled runner cannot be had")
    print(f"compiled, or loaded, in {time.perf_counter() - begin:.2f} s")
    measure(options.rounds)
    if options.beside:
        stop = threading.Event()

        def count() -> None:
            k = 0
            while not stop.is_set():
                k += 1

        thread = threading.Thread(target=count)
        thread.start()
        print("beside a thread that counts")
        try:
            measure(min(options.rounds, 100))
        finally:
            stop.set()
            thread.join()


if __name__ == "__main__":
    main()
