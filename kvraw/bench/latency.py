"""Costs of a call beside moving bytes: host time, one block from call to done, bounds checks, batch descriptors."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

import kvraw
from kvraw.bench.shapes import BLOCKS, Shape
from kvraw.bench.workload import CPU, DIRECTIONS, Engine, Workload
from kvraw.copying import kernel_args as ka
from kvraw.copying.kernel import copy_kernel
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.module import ArgumentBlock
from kvraw.runtime.timing import Pace, host_seconds

__all__ = ["batch_descriptors", "bounds_checks", "driver_calls", "host_times", "one_block"]

Row = dict[str, Any]
Tick = Callable[[str], None]

_GPU = (Engine("kernel"), Engine("copy"), Engine("staged"), Engine("auto"))
# What a serving engine's call looks like: 16 chunks of 16 blocks of 32 layers, one head of a tensor-parallel rank.
CHUNKS = 16
DESCRIPTORS, DESCRIPTOR_BYTES = 8192, 4096
IN_A_ROW = 8
STORE = Shape("one head of 128, 32 layers", 1, replace(BLOCKS.geometry, heads=1))


def host_times(nbytes: int, device: int | None, pace: Pace, tick: Tick) -> list[Row]:
    """Host time of a plan's first call and of later ones with other ids, the stream idle ahead of each."""
    rows = []
    fitted = STORE.within(max(nbytes // CHUNKS, 1)) or STORE
    with Workload(fitted, CHUNKS * fitted.chunk_bytes, device) as work:
        if device is not None:
            work.plan("store", Engine("kernel"))(work.chunks, work.ids, stream=work.stream).wait()  # compiles
        for engine in CPU if device is None else _GPU:
            for direction in DIRECTIONS:
                tick(f"host time, {engine.label}, {direction}")
                firsts = []
                for _ in range(min(pace.rounds, 5)):
                    work.settle()
                    begin = time.perf_counter()
                    plan = work.plan(direction, engine)
                    plan(work.chunks, work.ids, stream=work.stream)
                    firsts.append(time.perf_counter() - begin)
                order = np.random.default_rng(2)
                ids = itertools.cycle([order.permutation(work.ids) for _ in range(32)])
                prepared: list[Any] = [work.ids]

                def ready(prepared: list[Any] = prepared, ids: Any = ids) -> None:
                    work.settle()
                    prepared[0] = next(ids)

                def again(prepared: list[Any] = prepared, plan: kvraw.TransferPlan = plan) -> kvraw.Transfer:
                    return plan(work.chunks, prepared[0], stream=work.stream)

                again_seconds = host_seconds(again, ready, pace)
                row_seconds = host_seconds(again, ready, pace, most=12, every=IN_A_ROW)
                rows.append(
                    {
                        "engine": engine.label,
                        "direction": direction,
                        "chunks": work.count,
                        "blocks": len(work.ids),
                        "layers": fitted.geometry.layers,
                        "bytes": work.nbytes,
                        "first_microseconds": statistics.median(firsts) * 1e6,
                        "microseconds": again_seconds * 1e6,
                        "in_a_row_microseconds": row_seconds * 1e6,
                    }
                )
    return rows


def one_block(shape: Shape | None, nbytes: int, device: int | None, pace: Pace, tick: Tick) -> list[Row]:
    """Time of one block from call to done, the stream idle ahead of it."""
    rows = []
    shape = replace(shape or BLOCKS, chunk_tokens=(shape or BLOCKS).geometry.block_size)
    fitted = shape.within(nbytes) or shape
    with Workload(fitted, fitted.chunk_bytes, device) as work:
        for direction in DIRECTIONS:
            for engine in CPU if device is None else _GPU:
                tick(f"one block, {engine.label}, {direction}")
                call = work.call(work.plan(direction, engine), 1)
                seconds = host_seconds(lambda c=call: c().wait(), work.settle, pace)  # type: ignore[misc]
                rows.append(
                    {
                        "engine": engine.label,
                        "direction": direction,
                        "chosen": call().engine,
                        "bytes": fitted.plan().item_bytes,
                        "runs": fitted.plan().runs_per_item,
                        "microseconds": seconds * 1e6,
                    }
                )
    return rows


class _DeviceIds:
    """Ids in device memory, as a tensor of any library would show them."""

    dtype = "int64"

    def __init__(self, ids: Any, stream: kvraw.Stream) -> None:
        self._shape = ids.shape
        self._memory = kvraw.DeviceBuffer(ids.nbytes, stream.device)
        self.close = self._memory.close
        with DeviceScope(stream.device):
            driver().memcpy_async(self._memory.address, int(ids.ctypes.data), ids.nbytes, stream.handle)
            stream.synchronize()

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        data = (self._memory.address, False)
        return {"shape": self._shape, "typestr": "<i8", "data": data, "version": 3}


def bounds_checks(shape: Shape, nbytes: int, device: int | None, pace: Pace, tick: Tick) -> list[Row]:
    """Calls with and without checks, in turn: ids on the host, and ids on the device, where the kernel checks them."""
    rows: list[Row] = []
    fitted = shape.within(nbytes)
    if fitted is None:
        return rows
    with ExitStack() as stack:
        work = stack.enter_context(Workload(fitted, nbytes, device))
        places: dict[str, Any] = {"host": work.ids}
        if work.stream is not None:
            places["device"] = on_device = _DeviceIds(work.ids, work.stream)
            stack.callback(on_device.close)
            stack.callback(work.settle)
        for place, ids in places.items():
            for direction in DIRECTIONS:
                tick(f"bounds checks, ids on the {place}, {direction}")
                times: dict[bool, list[float]] = {True: [], False: []}
                for _ in range(min(5, pace.rounds)):
                    for check, taken in times.items():
                        plan = work.plan(direction, Engine("cpu" if device is None else "auto"), check)
                        taken.append(work.seconds(work.call(plan, ids=ids), pace))
                on, off = (statistics.median(times[check]) for check in (True, False))
                rows.append(
                    {
                        "ids": place,
                        "direction": direction,
                        "run_bytes": fitted.run_bytes,
                        "bytes": work.nbytes,
                        "checked_microseconds": on * 1e6,
                        "unchecked_microseconds": off * 1e6,
                        "cost_percent": (on / off - 1) * 100,
                    }
                )
    return rows


def driver_calls(device: int, pace: Pace, tick: Tick) -> list[Row]:
    """Host time of the driver calls that a transfer makes, each alone: no call can take less than its own."""
    tick("driver calls")
    d = driver()
    with DeviceScope(device), kvraw.Stream(device) as stream, kvraw.DeviceBuffer(4096, device) as memory:
        event, other = d.event_create(), d.event_create()
        d.event_record(event, stream.handle)
        stream.synchronize()
        block, kernel = ArgumentBlock(ka.ARGS), copy_kernel(16)  # no segments: the kernel does nothing
        calls: dict[str, Callable[[], object]] = {
            "nothing, in Python": lambda: None,
            "cuCtxGetDevice": d.context_device,
            "cuStreamIsCapturing": lambda: d.stream_capturing(stream.handle),
            "cuEventQuery": lambda: d.event_done(event),
            "cuEventRecord": lambda: d.event_record(other, stream.handle),
            "cuStreamWaitEvent": lambda: d.stream_wait_event(stream.handle, event),
            "cuMemcpyAsync": lambda: d.memcpy_async(memory.address, memory.address + 2048, 2048, stream.handle),
            "cuLaunchKernel": lambda: kernel.launch(1, 32, stream.handle, block),
        }
        rows = [
            {"call": name, "microseconds": host_seconds(call, stream.synchronize, pace) * 1e6}
            for name, call in calls.items()
        ]
        stream.synchronize()
        for one in (event, other):
            d.event_destroy(one)
    return rows


def batch_descriptors(device: int, pace: Pace, tick: Tick) -> Row:
    """Time per descriptor of `memcpy_batch`, beside the bare driver call on the same vectors."""
    tick("batch memcpy")
    d, count, size = driver(), DESCRIPTORS, DESCRIPTOR_BYTES
    with (
        DeviceScope(device),
        kvraw.Stream(device) as stream,
        kvraw.HostPool(count * size, device=device) as pool,
        kvraw.DeviceBuffer(count * size, device) as memory,
    ):
        order = np.random.default_rng(3).permutation(count).astype(np.uint64) * np.uint64(size)
        src = order + np.uint64(memory.address)
        dst = np.arange(count, dtype=np.uint64) * np.uint64(size) + np.uint64(pool.address)
        sizes = np.full(count, size, np.uint64)
        row: Row = {"descriptors": count, "bytes_each": size, "bare_nanoseconds": None, "ratio": None}
        taken = host_seconds(
            lambda: kvraw.memcpy_batch(dst, src, sizes, stream=stream, device=device).wait(),
            stream.synchronize,
            pace,
            15,
        )
        row["nanoseconds"] = taken / count * 1e9
        if d.batch_supported():

            def bare() -> None:
                d.memcpy_batch_async(dst, src, sizes, stream.handle)
                stream.synchronize()

            alone = host_seconds(bare, stream.synchronize, pace, 15)
            row |= {"bare_nanoseconds": alone / count * 1e9, "ratio": taken / alone}
    return row
