"""What holding back costs on an idle GPU: `python -m benchmarks.neighbour`.

Stores and loads by `kvraw.TransferPlan` as it is by default (`neighbour="busy"`) and for an idle GPU
(`neighbour="idle"`), from call to done, medians in microseconds, with the engine of each. Both are measured in turns.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

import kvraw

SIZES = [64 << 10, 512 << 10, 1 << 20, 2 << 20, 8 << 20, 32 << 20, 128 << 20, 256 << 20]
RUNS = {"2 KiB": (1, 8, 128), "32 KiB": (16, 8, 128), "2 MiB": (1024, 8, 128)}  # tokens of a block, heads, head size
ROUNDS = 25
NEIGHBOURS = ("busy", "idle")


def measure(run: str, shape: tuple[int, int, int], direction: str) -> None:
    tokens, heads, dim = shape
    layers = 32 if tokens < 1024 else 8
    step = 2 * layers * heads * dim * 2  # bytes of a token: K and V of all layers
    blocks = max(SIZES) // (step * tokens) * 2
    geometry = kvraw.Geometry(layers, blocks, tokens, heads, dim, 2)
    with (
        kvraw.DeviceBuffer(blocks * tokens * step, 0) as memory,
        kvraw.HostPool(max(SIZES) + (64 << 20), device=0) as pool,
        kvraw.Stream(0) as stream,
    ):
        bases = [memory.address + k * (memory.nbytes // layers) for k in range(layers)]
        cache = kvraw.PagedCache.from_pointers(bases, 1, geometry, device=0)
        order = np.random.default_rng(0)
        for size in SIZES:
            chunk = max(tokens, min(256, size // step // tokens * tokens))
            count = max(1, size // (chunk * step))
            nbytes = count * chunk * step
            if nbytes > 2 * size:
                continue
            chunks = pool.chunks(count, chunk * step)
            ids = order.permutation(blocks)[: count * chunk // tokens]
            plans = {}
            for how in NEIGHBOURS:
                plans[how] = kvraw.TransferPlan(cache, direction, chunk_tokens=chunk, neighbour=how)  # type: ignore[arg-type]
            times: dict[str, list[float]] = {how: [] for how in plans}
            engines = {}
            for k in range(ROUNDS + 5):
                for how, plan in plans.items():
                    start = time.perf_counter()
                    done = plan(chunks, ids, stream=stream)
                    done.wait()
                    if k >= 5:
                        times[how].append((time.perf_counter() - start) * 1e6)
                    engines[how] = done.engine
            busy, idle = (statistics.median(times[how]) for how in NEIGHBOURS)
            print(
                f"{direction:6} runs of {run:7} {nbytes / 2**20:8.2f} MiB  busy {busy:8.0f} us ({engines['busy']:6})  "
                f"idle {idle:8.0f} us ({engines['idle']:6})  {busy / idle:.2f}",
                flush=True,
            )
            for one in chunks:
                one.free()


def main() -> None:
    kvraw.warm_up(0)
    for run, shape in RUNS.items():
        for direction in ("store", "load"):
            measure(run, shape, direction)


if __name__ == "__main__":
    main()
