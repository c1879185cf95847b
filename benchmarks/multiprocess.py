"""The cache server beside one memmove: `python -m benchmarks.multiprocess [--json FILE] [--chunks 32] [--rounds 9]`.

The server is a process of its own; store and retrieve of chunks of 2 MiB by one worker, through shared memory and by
message, from call to done: prepare, copy, commit. The memmove copies as many bytes between two buffers of one process.
Needs no GPU; with `--device N` the cache lies on a GPU, and the ceiling is one large copy over the link.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import kvraw
from kvraw.multiprocess import CacheKey, EngineWorker

LAYERS, BLOCK, HEADS, DIM, TOKENS = 8, 16, 8, 128, 64  # a chunk of 64 tokens has 2 MiB
BLOCKS_EACH = TOKENS // BLOCK
_serials = itertools.count(1)
NBYTES = 2 * LAYERS * TOKENS * HEADS * DIM * 2


class Case:
    """A cache, on the host or a GPU, and a worker."""

    def __init__(self, endpoint: str, chunks: int, device: int | None, **options: Any) -> None:
        blocks, self.chunks = chunks * BLOCKS_EACH, chunks
        geometry = kvraw.Geometry(LAYERS, blocks, BLOCK, HEADS, DIM, 2)
        each = blocks * BLOCK * HEADS * DIM * 2 * 2
        self.stream = None if device is None else kvraw.Stream(device)
        if device is None:
            self.memory: Any = np.random.default_rng(0).integers(0, 256, each * LAYERS, np.uint8)
            base = self.memory.ctypes.data
        else:
            self.memory = kvraw.DeviceBuffer(each * LAYERS, device)
            base = self.memory.address
        pointers = [base + each * k for k in range(LAYERS)]
        self.cache = kvraw.PagedCache.from_pointers(pointers, 1, geometry, device=device)
        self.worker = EngineWorker.connect(self.cache, endpoint, chunk_tokens=TOKENS, **options)
        self.ids = np.random.default_rng(1).permutation(blocks).tolist()
        self.serial = 0

    def key(self, new: bool) -> CacheKey:
        if new:
            self.serial = next(_serials)
        tokens = np.arange(self.chunks * TOKENS, dtype=np.int64) + self.serial * 1_000_003
        made = CacheKey("bench", 1, 0, tokens, 0, len(tokens))
        made.hashes(self.worker.context.metadata)
        return made

    def store(self) -> float:
        key = self.key(True)
        begin = time.perf_counter()
        stored = self.worker.store(key, self.ids, stream=self.stream)
        seconds = time.perf_counter() - begin
        assert stored.stored == self.chunks, stored
        return seconds

    def retrieve(self) -> float:
        key = self.key(False)
        begin = time.perf_counter()
        found = self.worker.retrieve(key, self.ids, stream=self.stream)
        seconds = time.perf_counter() - begin
        assert found == self.chunks * TOKENS
        return seconds

    def calls(self, count: int) -> dict[str, float]:
        """Microseconds of prepare and commit of one chunk, nothing copied."""
        context, found = self.worker.context, {name: [] for name in ("store", "retrieve")}
        self.chunks, before = 1, self.chunks
        for _ in range(count):
            for name in found:
                key = self.key(name == "store")
                begin = time.perf_counter()
                slots = context.prepare_store(key) if name == "store" else context.prepare_retrieve(key)
                middle = time.perf_counter()
                assert slots is not None
                (context.commit_store if name == "store" else context.commit_retrieve)(slots)
                found[name].append((middle - begin, time.perf_counter() - middle))
        self.chunks = before
        rows = {f"{phase} {name}": [pair[at] for pair in pairs] for name, pairs in found.items()
                for at, phase in enumerate(("prepare", "commit"))}  # fmt: skip
        return {name: statistics.median(times) * 1e6 for name, times in rows.items()} | {
            f"{name} p99": float(np.percentile(times, 99)) * 1e6 for name, times in rows.items()
        }


def ceiling(nbytes: int, device: int | None) -> tuple[Callable[[], float], Callable[[], float]]:
    """One large copy each way."""
    if device is None:
        a, b = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

        def move() -> float:
            begin = time.perf_counter()
            b[:] = a
            return time.perf_counter() - begin

        return move, move
    stream, pool, memory = (
        kvraw.Stream(device),
        kvraw.HostPool(nbytes, device=device),
        kvraw.DeviceBuffer(nbytes, device),
    )

    def one_way(to: int, source: int) -> float:
        begin = time.perf_counter()
        kvraw.memcpy_batch([to], [source], [nbytes], stream=stream).wait()
        return time.perf_counter() - begin

    return lambda: one_way(pool.address, memory.address), lambda: one_way(memory.address, pool.address)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", type=int)
    parser.add_argument("--json")
    options = parser.parse_args()
    chunks, nbytes = options.chunks, options.chunks * NBYTES
    result: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "chunks": chunks}
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/s.sock"
        # Room for what a round stores: a store that has to evict does so ahead of its copy.
        mib = (nbytes >> 20) * 3 + 64
        command = [sys.executable, "-m", "kvraw", "serve", f"--mib={mib}", "--endpoint", endpoint]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            assert "listening" in server.stderr.readline()
            cases = {"shared memory": Case(endpoint, chunks, options.device),
                     "message": Case(endpoint, chunks, options.device, use_messages=True)}  # fmt: skip
            out, back = ceiling(nbytes, options.device)
            times: dict[str, list[float]] = {}
            for _ in range(options.rounds + 2):  # of which the first two warm up
                for name, run in (("ceiling store", out), ("ceiling retrieve", back)):
                    times.setdefault(name, []).append(run())
                for name, case in cases.items():
                    times.setdefault(f"{name} store", []).append(case.store())
                    times.setdefault(f"{name} retrieve", []).append(case.retrieve())
            median = {name: statistics.median(found[2:]) for name, found in times.items()}
            for name, seconds in median.items():
                ratio = median[f"ceiling {name.split()[-1]}"] / seconds
                result[name] = {"gb_per_s": nbytes / seconds / 1e9, "ratio": ratio}
                print(f"{name:24} {nbytes / seconds / 1e9:7.2f} GB/s  {ratio:5.2f} of one copy")
            for name, case in cases.items():
                result[f"{name} calls"] = case.calls(500)
                for call, microseconds in result[f"{name} calls"].items():
                    print(f"{name:14} {call:24} {microseconds:7.0f} us")
            for case in cases.values():
                case.worker.close()
        finally:
            server.terminate()
            server.communicate(timeout=30)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
