"""What a transfer waits for that arrives late: a load behind queued stores, and first calls beside a busy GPU."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kvraw
from kvraw.adapters import lmcache, sglang
from kvraw.bench.beside.adapter_doors import LMCacheBlocks, SGLang
from kvraw.bench.beside.doors import Planned
from kvraw.bench.beside.ground import Case, Ground, Lane
from kvraw.bench.matmul import require_torch

__all__ = ["FIRST", "behind_stores", "first_calls"]

MIB = 1 << 20
QUEUED = 2 << 30  # bytes of stores that are queued when the load arrives
STORE, LOAD = 32 * MIB, 2 * MIB  # bytes of each of them, and of the load
ROUNDS = 5
BUSY = 1.5  # seconds
PROBE = MIB  # bytes of the copies of another thread
_TIMEOUT = 300

FIRST = ("plan", "lmcache.blocks", "sglang.page_first")


def _until_done(done: Any) -> None:
    while not done.done():
        time.sleep(0)


def behind_stores(ground: Ground, engines: Sequence[str], tick: Callable[[str], None]) -> list[dict[str, Any]]:
    """A load of 2 MiB, alone and behind 2 GiB of stores on another stream: until it is done, in milliseconds.

    What it takes longer is the time until it starts to move, and more only where it shares the link.
    """
    rows = []
    for engine in engines:
        tick(f"a load behind stores, {engine}")
        store = Planned(ground, Case("plan", engine, "store", STORE, 32 << 10))
        load = Planned(ground, Case("plan", engine, "load", LOAD, 32 << 10))
        try:
            for lane in (store, load):
                lane.verify()
                for at in range(6):
                    lane.call(at)
            alone, behind, left = [], [], []
            for at in range(ROUNDS):
                ground.settle()
                begin = time.perf_counter()
                _until_done(load.call(at))
                alone.append(time.perf_counter() - begin)
                stores = [store.call(k) for k in range(QUEUED // STORE)]
                begin = time.perf_counter()
                _until_done(load.call(at + ROUNDS))
                behind.append(time.perf_counter() - begin)
                left.append(sum(not one.done() for one in stores) * STORE)
                ground.settle()
        finally:
            store.close()
            load.close()
        rows.append(
            {
                "engine": engine,
                "bytes": LOAD,
                "queued_bytes": QUEUED,
                "alone_milliseconds": statistics.median(alone) * 1e3,
                "behind_milliseconds": statistics.median(behind) * 1e3,
                "waits_milliseconds": (statistics.median(behind) - statistics.median(alone)) * 1e3,
                "stores_left_bytes": int(statistics.median(left)),
            }
        )
    return rows


def first_calls(device: int) -> list[dict[str, Any]]:
    """First calls after `kvraw.warm_up` in a process of their own, each beside a GPU that is busy for 1.5 s.

    How long the call takes on the host, and the longest copy of another thread meanwhile, in milliseconds.
    """
    path = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "kvraw.bench.beside.arrivals", str(device)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=_TIMEOUT
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [{"door": "first calls", "error": last}]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


class _Copies:
    """Another thread that copies to the host on a stream of its own, waits, and again."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        torch = ground.torch
        self._stream = torch.cuda.Stream(ground.place)
        self._device = torch.zeros(PROBE, dtype=torch.uint8, device=ground.place)
        self._host = torch.zeros(PROBE, dtype=torch.uint8, pin_memory=True)
        self.times: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        torch = self._ground.torch
        with torch.cuda.stream(self._stream):
            event = torch.cuda.Event()
            while not self._stop.is_set():
                begin = time.perf_counter()
                self._host.copy_(self._device, non_blocking=True)
                event.record(self._stream)
                while not event.query():
                    time.sleep(0)
                self.times.append(time.perf_counter() - begin)
                time.sleep(1e-3)

    def __enter__(self) -> _Copies:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _busy(torch: Any, place: Any) -> Callable[[], None]:
    """What keeps the GPU busy for `BUSY` seconds, on a stream of its own."""
    stream, begin, end = torch.cuda.Stream(place), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1000)
        begin.record(stream)
        torch.cuda._sleep(20_000_000)
        end.record(stream)
    end.synchronize()
    cycles = int(20_000_000 * BUSY * 1e3 / begin.elapsed_time(end))

    def busy() -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)

    return busy


def _lane(ground: Ground, door: str, way: Any) -> Lane:
    row = {"plan": 32 << 10, "lmcache.blocks": 32 << 10}.get(door, 2 << 10)
    case = Case(door, "auto", way, 8 * MIB, row)
    if door == "plan":
        return Planned(ground, case)
    return (
        LMCacheBlocks(ground, case, lmcache) if door == "lmcache.blocks" else SGLang(ground, case, sglang, "page_first")
    )


def _first(device: int) -> list[dict[str, Any]]:
    torch = require_torch(device, "the first call")
    kvraw.warm_up(device=device)
    ground = Ground(torch, device, 128 * MIB, 64 * MIB)
    make_busy, rows = _busy(torch, ground.place), []
    for door in FIRST:
        for way in ("store", "load"):
            lane = _lane(ground, door, way)  # tensors, ids and tables: what an engine has before its first call
            ground.settle()
            with _Copies(ground) as copies:
                time.sleep(0.05)
                usual = statistics.median(copies.times)
                make_busy()
                time.sleep(0.02)
                copies.times.clear()
                times = []
                for at in range(2):
                    begin = time.perf_counter()
                    lane.call(at)
                    times.append(time.perf_counter() - begin)
                time.sleep(0.02)
            longest = max(copies.times)  # the one that was under way at the end as well
            ground.settle()
            lane.close()
            rows.append(
                {
                    "door": door,
                    "way": way,
                    "first_milliseconds": times[0] * 1e3,
                    "second_milliseconds": times[1] * 1e3,
                    "copy_milliseconds": usual * 1e3,
                    "longest_copy_milliseconds": longest * 1e3,
                    "error": None,
                }
            )
    return rows


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_first(int(sys.argv[1]))) + "\n")
