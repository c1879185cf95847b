"""Bandwidth: over run sizes, over bytes per call, in both directions at once, and between device memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvraw.bench.ceilings import Ceilings
from kvraw.bench.shapes import Shape
from kvraw.bench.workload import CPU, DIRECTIONS, GPU, Engine, Workload
from kvraw.copying.planner import profile_for
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.timing import Pace, host_seconds, stream_seconds

__all__ = ["both_at_once", "device_copies", "neighbours", "over_bytes", "over_runs"]

Row = dict[str, Any]
Tick = Callable[[str], None]

MOST_DESCRIPTORS = 16384  # of one call of the copy engine: beyond it costs the same per descriptor, and takes long

DEVICE_CHUNKS = 4
SMALLEST_CALL = 256 << 10  # bytes, of `over_bytes`


def _ratio(rate: float, ceiling: float | None) -> float | None:
    return None if ceiling is None else rate / ceiling


def _blocks(work: Workload, engine: Engine) -> int:
    """Ids of a call: all, or fewer where the copy engine would take too long."""
    runs = work.shape.plan().runs_per_item
    return len(work.ids) if engine.name != "copy" else max(1, min(len(work.ids), MOST_DESCRIPTORS // runs))


def _row(work: Workload, direction: Any, engine: Engine, ceilings: Ceilings, pace: Pace) -> Row:
    plan = work.plan(direction, engine)
    blocks = _blocks(work, engine)
    nbytes = blocks * work.shape.plan().item_bytes
    call = work.call(plan, blocks)
    rate = nbytes / work.seconds(call, pace) / 1e9
    return {
        "run_bytes": work.shape.run_bytes,
        "shape": work.shape.name,
        "direction": direction,
        "engine": engine.label,
        "chosen": call().engine,
        "bytes": nbytes,
        "gb_per_s": rate,
        "ratio": _ratio(rate, ceilings[direction]),
    }


def over_runs(
    shapes: Sequence[Shape], nbytes: int, device: int | None, ceilings: Ceilings, pace: Pace, tick: Tick
) -> list[Row]:
    """Every engine, both directions, over shapes; calls in a row, ids in random order."""
    rows = []
    for shape in shapes:
        fitted = shape.within(nbytes)
        if fitted is None:
            continue
        with Workload(fitted, nbytes, device) as work:
            for direction in DIRECTIONS:
                tick(f"runs of {shape.run_bytes} bytes, {direction}")
                rows += [_row(work, direction, e, ceilings, pace) for e in (CPU if device is None else GPU)]
    return rows


def neighbours(shape: Shape, nbytes: int, device: int, ceilings: Ceilings, pace: Pace, tick: Tick) -> list[Row]:
    """The copy engine, where blocks are in random order and where so many follow each other."""
    rows = []
    for many in (1, 16):
        fitted = shape.within(nbytes)
        if fitted is None:
            continue
        with Workload(fitted, nbytes, device, neighbours=many) as work:
            tick(f"copy engine, {many} blocks in a row")
            for direction in DIRECTIONS:
                rows.append({"in_a_row": many, **_row(work, direction, Engine("copy"), ceilings, pace)})
    return rows


def over_bytes(shape: Shape, nbytes: int, device: int | None, pace: Pace, tick: Tick) -> list[Row]:
    """Time from call to done over the bytes of a call, with what the planner's model says of it."""
    rows: list[Row] = []
    engines = CPU if device is None else (Engine("kernel"), Engine("copy"), Engine("staged"), Engine("auto"))
    # Small blocks and chunks of one, so that small calls too are whole chunks.
    small = replace(shape, chunk_tokens=shape.geometry.block_size)
    fitted = small.within(min(nbytes, SMALLEST_CALL))
    if fitted is None:
        return rows
    with Workload(fitted, nbytes, device) as work:
        item = fitted.plan().item_bytes
        counts = sorted({max(1, len(work.ids) >> shift) for shift in (0, 2, 4, 6, 8)})
        for direction in DIRECTIONS:
            tick(f"bytes per call, {direction}")
            for count in counts:
                for engine in engines:
                    if engine.name == "copy" and count * fitted.plan().runs_per_item > MOST_DESCRIPTORS:
                        continue
                    call = work.call(work.plan(direction, engine), count)
                    seconds = host_seconds(lambda c=call: c().wait(), work.settle, pace, most=30)  # type: ignore[misc]
                    chosen = call().engine
                    predicted = None
                    if device is not None:
                        taken = profile_for(device).seconds(chosen, direction, fitted.run_bytes, count * item).alone
                        predicted = taken * 1e6
                    rows.append(
                        {
                            "run_bytes": fitted.run_bytes,
                            "bytes": count * item,
                            "direction": direction,
                            "engine": engine.label,
                            "chosen": chosen,
                            "microseconds": seconds * 1e6,
                            "predicted_microseconds": predicted,
                        }
                    )
    return rows


def both_at_once(shape: Shape, nbytes: int, device: int, ceilings: Ceilings, pace: Pace, tick: Tick) -> list[Row]:
    """A store and a load on streams of their own, beside the two large copies at once."""
    fitted = shape.within(nbytes)
    if fitted is None:
        return []
    rows = []
    with Workload(fitted, nbytes, device) as down, Workload(fitted, nbytes, device) as up, DeviceScope(device):
        assert down.stream is not None
        assert up.stream is not None
        few = len(down.ids) * fitted.plan().runs_per_item <= MOST_DESCRIPTORS
        for engine in (Engine("kernel", 16), *([Engine("copy")] if few else []), Engine("staged"), Engine("auto")):
            tick(f"both directions at once, {engine.label}")
            store, load = down.call(down.plan("store", engine)), up.call(up.plan("load", engine))
            seconds = stream_seconds(lambda s=store, t=load: (s(), t()), down.stream.handle, pace, up.stream.handle)  # type: ignore[misc]
            rate = (down.nbytes + up.nbytes) / seconds / 1e9
            rows.append(
                {
                    "run_bytes": fitted.run_bytes,
                    "engine": engine.label,
                    "bytes": down.nbytes + up.nbytes,
                    "gb_per_s": rate,
                    "ratio": _ratio(rate, ceilings["both"]),
                }
            )
    return rows


def device_copies(
    shapes: Sequence[Shape], nbytes: int, device: int, ceilings: Ceilings, pace: Pace, tick: Tick
) -> list[Row]:
    """Gather and scatter between device memory, beside one device-to-device copy."""
    rows = []
    for shape in shapes:
        # Few chunks, because the host asks the driver about each: the copy is to be measured, not that.
        longer = max(1, nbytes // DEVICE_CHUNKS // shape.chunk_bytes)
        fitted = replace(shape, chunk_tokens=shape.chunk_tokens * longer).within(nbytes)
        if fitted is None:
            continue
        with Workload(fitted, nbytes, device, chunks_on_device=True) as work:
            for direction in DIRECTIONS:
                tick(f"device to device, {shape.name}, {direction}")
                plan = work.plan(direction, Engine("auto"))
                rate = work.nbytes / work.seconds(work.call(plan), pace) / 1e9
                rows.append(
                    {
                        "run_bytes": shape.run_bytes,
                        "shape": shape.name,
                        "direction": direction,
                        "bytes": work.nbytes,
                        "gb_per_s": rate,
                        "ratio": _ratio(rate, ceilings["device"]),
                    }
                )
    return rows
