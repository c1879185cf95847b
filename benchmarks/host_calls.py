"""Host time of a repeated store and load: python -m benchmarks.host_calls

128 MiB in 32 KiB runs (32 layers, K and V, 8 heads of 128, bf16): 4 chunks of 256 tokens of pinned memory, ids on the
host in another random order each time, the stream idle ahead of each call; medians and 99th percentiles of 2,000.
"""

from __future__ import annotations

import time

import numpy as np

import kvraw


def main() -> None:
    """Print a row for each engine and direction."""
    kvraw.warm_up(0)
    g = kvraw.Geometry(layers=32, blocks=2048, block_size=16, heads=8, head_size=128, element_size=2)
    with (
        kvraw.DeviceBuffer(g.blocks * g.block_size * g.token_bytes, 0) as memory,
        kvraw.HostPool(1 << 28, device=0) as pool,
        kvraw.Stream(0) as stream,
    ):
        each = memory.nbytes // g.layers
        bases = [memory.address + k * each for k in range(g.layers)]
        cache = kvraw.PagedCache.from_pointers(bases, "NL_X_TWO_NB_BS_NH_HS", g, device=0)
        chunks = pool.chunks(4, cache.chunk_bytes(tokens=256))
        order = np.random.default_rng(0)
        ids = [order.permutation(g.blocks)[:64].astype(np.int64) for _ in range(32)]
        for engine in ("kernel", "staged", "auto"):
            for direction in ("store", "load"):
                plan = kvraw.TransferPlan(cache, direction, chunk_tokens=256, engine=engine)
                begin = time.perf_counter()
                plan(chunks, ids[0], stream=stream)
                first = time.perf_counter() - begin
                taken = []
                for k in range(2100):
                    stream.synchronize()
                    begin = time.perf_counter()
                    done = plan(chunks, ids[k % 32], stream=stream)
                    taken.append(time.perf_counter() - begin)
                stream.synchronize()
                p50, p99 = np.percentile(taken[100:], [50, 99]) * 1e6
                name = engine if engine == done.engine else f"{engine}={done.engine}"
                print(
                    f"{name} {direction}: first {first * 1e6:.0f} us, then p50 {p50:.1f} p99 {p99:.1f} us", flush=True
                )


if __name__ == "__main__":
    main()
