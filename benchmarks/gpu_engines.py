"""Kernel engine beside the copy engine's ceiling, in one run: `python -m benchmarks.gpu_engines [--json FILE]`.

Bandwidth is bytes moved once, over the median of event times; block ids in random order; chunks pinned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

import kvraw
from kvraw.layout import Geometry
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver

DEVICE = 0
ROUNDS = 8
CALLS = 4


def gpu_seconds(work: Callable[[], None], stream: kvraw.Stream, rounds: int = ROUNDS) -> float:
    """Median device time of one call of `work`, by events around `CALLS` calls in a row, after two warm-ups."""
    d = driver()
    start, end = d.event_create(timing=True), d.event_create(timing=True)
    times = []
    for k in range(rounds + 2):
        d.event_record(start, stream.handle)
        for _ in range(CALLS):
            work()
        d.event_record(end, stream.handle)
        d.event_synchronize(end)
        if k >= 2:
            times.append(d.event_milliseconds(start, end) / 1e3 / CALLS)
    return statistics.median(times)


def host_seconds(work: Callable[[], object], stream: kvraw.Stream, rounds: int = 60) -> float:
    """Median host time of one call, the stream idle before each."""
    times = []
    for _ in range(rounds):
        stream.synchronize()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


SHAPES = {
    "llama-3.1-8b, 32 KiB runs": (1, Geometry(32, 2048, 16, 8, 128, 2)),
    "tp8 head, 4 KiB runs": (1, Geometry(32, 8192, 16, 1, 128, 2)),
    "HND, 256 B runs": (6, Geometry(32, 2048, 16, 8, 128, 2)),
    "cross-layer, 1 MiB runs": (0, Geometry(32, 512, 256, 8, 128, 2)),
    "HND, 128 B runs": (6, Geometry(32, 4096, 16, 8, 64, 2)),
    "MLA 576 x 2, 18 KiB runs": (3, Geometry(61, 4096, 16, 1, 576, 2, planes=1)),
    "MLA 656 B rows, 41 KiB runs": (3, Geometry(61, 4096, 64, 1, 656, 1, planes=1)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--ctas", type=int, nargs="*", default=[2, 3, 4, 8, 16])
    options = parser.parse_args()
    d = driver()
    rows: list[dict[str, object]] = []
    rng = np.random.default_rng(0)
    with DeviceScope(DEVICE):
        stream = kvraw.Stream(DEVICE)
        size = 512 << 20
        big = kvraw.DeviceBuffer(size, DEVICE)
        other = kvraw.DeviceBuffer(size, DEVICE)
        pool = kvraw.HostPool(size + (1 << 20), device=DEVICE)
        (host,) = pool.chunks(1, size)
        ceiling = {
            "D2H": size
            / gpu_seconds(lambda: d.memcpy_async(host.address, big.address, size, stream.handle), stream)
            / 1e9,
            "H2D": size
            / gpu_seconds(lambda: d.memcpy_async(big.address, host.address, size, stream.handle), stream)
            / 1e9,
            "D2D": size
            / gpu_seconds(lambda: d.memcpy_async(other.address, big.address, size, stream.handle), stream)
            / 1e9,
        }
        host.free()
        print(f"{d.device_name(DEVICE)}, driver {d.version()}; ceiling (one {size >> 20} MiB copy), GB/s: "
              + ", ".join(f"{k} {v:.1f}" for k, v in ceiling.items()))  # fmt: skip
        for name, (number, geometry) in SHAPES.items():
            tokens = 256 // geometry.block_size * geometry.block_size
            layout_bytes = geometry.blocks * geometry.block_size * geometry.token_bytes
            memory = kvraw.DeviceBuffer(layout_bytes, DEVICE)
            base = [memory.address + k * layout_bytes // geometry.layers for k in range(geometry.layers)]
            cache = kvraw.PagedCache.from_pointers(base, number, geometry, device=DEVICE)
            chunk = cache.chunk_bytes(tokens)
            count = max(1, (256 << 20) // chunk)
            chunks = pool.chunks(count, chunk)
            ids = rng.permutation(geometry.blocks)[: count * tokens // geometry.block_size]
            total = count * chunk
            row = f"{name:30s} {total >> 20:4d} MiB "
            for direction, key in (("store", "D2H"), ("load", "H2D")):
                row += f"| {key} "
                for engine in ("auto", "staged", "copy"):
                    plan = kvraw.TransferPlan(cache, direction, chunk_tokens=tokens, engine=engine)  # type: ignore[arg-type]
                    if engine == "copy" and len(ids) * plan.plan.runs_per_item > 70_000:
                        continue
                    t = gpu_seconds(lambda p=plan: p(chunks, ids, stream=stream), stream)  # type: ignore[misc]
                    rows.append({"shape": name, "direction": key, "engine": engine, "GB/s": total / t / 1e9})
                    row += f"{engine} {total / t / 1e9:.1f} ({total / t / 1e9 / ceiling[key]:.3f}) "
                row += "kernel "
                for ctas in options.ctas:
                    plan = kvraw.TransferPlan(cache, direction, chunk_tokens=tokens, ctas=ctas, engine="kernel")
                    t = gpu_seconds(lambda p=plan: p(chunks, ids, stream=stream), stream)  # type: ignore[misc]
                    rows.append({"shape": name, "direction": key, "ctas": ctas, "GB/s": total / t / 1e9})
                    row += f"{ctas}:{total / t / 1e9:5.1f} "
            device_chunks = [kvraw.DeviceBuffer(chunk, DEVICE) for _ in range(count)]
            for direction in ("store", "load"):
                plan = kvraw.TransferPlan(cache, direction, chunk_tokens=tokens)
                t = gpu_seconds(lambda p=plan: p(device_chunks, ids, stream=stream), stream)  # type: ignore[misc]
                rows.append({"shape": name, "direction": f"D2D {direction}", "ctas": 0, "GB/s": total / t / 1e9})
                row += f"| D2D {direction} {total / t / 1e9:6.0f} "
            few = chunks[: min(16, count)]
            part = ids[: len(few) * tokens // geometry.block_size]
            t = host_seconds(lambda: kvraw.store(cache, few, part, stream=stream), stream)
            rows.append({"shape": name, "direction": "host us per store of 16 chunks", "us": t * 1e6})
            print(row + f"| host {t * 1e6:.1f} us")
            pool.free(chunks)
            for buffer in device_chunks:
                buffer.close()
            memory.close()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"ceiling": ceiling, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
