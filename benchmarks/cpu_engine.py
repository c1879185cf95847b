"""CPU engine beside memmove and a torch index_select gather: `python -m benchmarks.cpu_engine [--json FILE]`.

Each round times all of them once, in turn; figures are medians of per-round bandwidths and of per-round ratios.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

import kvraw
from kvraw.copying import cpu
from kvraw.layouts.geometry import Geometry

SHAPES = {
    "llama-3.1-8b, 32 KiB runs": (1, Geometry(32, 320, 16, 8, 128, 2)),
    "tp8 head, 4 KiB runs": (1, Geometry(32, 2560, 16, 1, 128, 2)),
    "HND, 256 B runs": (6, Geometry(32, 320, 16, 8, 128, 2)),
}
TOKENS = 256


def torch_gather(
    cache: np.ndarray, chunks: list[np.ndarray], ids: np.ndarray, g: Geometry, hnd: bool
) -> Callable[[], None]:
    """Per layer and plane: index_select of the blocks, then a copy into the chunk."""
    import torch

    torch.set_num_threads(cpu.threads())
    paged = [torch.from_numpy(c) for c in cache]
    objects = [torch.from_numpy(c) for c in chunks]
    per = TOKENS // g.block_size

    def work() -> None:
        for at, chunk in enumerate(objects):
            index = torch.from_numpy(ids[at * per : (at + 1) * per])
            for layer, tensor in enumerate(paged):
                for plane in range(2):
                    picked = tensor[plane].index_select(0, index)
                    if hnd:
                        picked = picked.permute(0, 2, 1, 3)
                    chunk[plane, layer].copy_(picked.reshape(TOKENS, -1))

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    kvraw.warm_up()
    rows = []
    print(f"{cpu.threads()} threads; GB/s, bytes counted once; ratio to one memmove of the same bytes")
    for name, (number, g) in SHAPES.items():
        hnd = number == 6
        shape = (2, g.blocks, g.heads, g.block_size, 128) if hnd else (2, g.blocks, g.block_size, g.heads, 128)
        tensors = [rng.integers(0, 2**15, shape, dtype=np.int16) for _ in range(g.layers)]
        cache = kvraw.PagedCache.from_pointers([int(t.ctypes.data) for t in tensors], number, g, owner=tensors)
        count = max(1, g.blocks * g.block_size * 3 // 4 // TOKENS)
        chunks = [np.zeros((2, g.layers, TOKENS, g.heads * 128), np.int16) for _ in range(count)]
        ids = rng.permutation(g.blocks)[: count * TOKENS // g.block_size]
        total = count * cache.chunk_bytes(TOKENS)
        flat_src, flat_dst = np.ones(total, np.uint8), np.zeros(total, np.uint8)
        gather = torch_gather(tensors, chunks, ids, g, hnd)  # type: ignore[arg-type]
        todo: dict[str, Callable[[], object]] = {
            "memmove": lambda: ctypes.memmove(flat_dst.ctypes.data, flat_src.ctypes.data, total),
            "store": lambda: kvraw.store(cache, chunks, ids),
            "load": lambda: kvraw.load(cache, chunks, ids),
            "torch store": gather,
        }
        times: dict[str, list[float]] = {k: [] for k in todo}
        for k in range(options.rounds + 1):
            for what, work in todo.items():
                begin = time.perf_counter()
                work()
                if k:
                    times[what].append(time.perf_counter() - begin)
        gbs = {what: total / statistics.median(t) / 1e9 for what, t in times.items()}
        ratio = {
            what: statistics.median(m / x for m, x in zip(times["memmove"], t, strict=True))
            for what, t in times.items()
        }
        rows.append({"shape": name, "MiB": total >> 20, "GB/s": gbs, "ratio": ratio})
        print(f"{name:28s} {total >> 20} MiB  " + "  ".join(f"{k} {gbs[k]:.1f} ({ratio[k]:.2f})" for k in todo))
    a = rng.integers(0, 256, 128 << 20, dtype=np.uint8)
    b = np.zeros_like(a)
    n = 32768
    order = rng.permutation(n).astype(np.uint64) * np.uint64(4096)
    dst, src = (
        np.arange(n, dtype=np.uint64) * np.uint64(4096) + np.uint64(b.ctypes.data),
        order + np.uint64(a.ctypes.data),
    )
    sizes = np.full(n, 4096, np.uint64)
    pairs: list[list[float]] = [[], []]
    for k in range(options.rounds + 1):
        for which, work in enumerate(
            (
                lambda: ctypes.memmove(b.ctypes.data, a.ctypes.data, a.nbytes),
                lambda: kvraw.memcpy_batch(dst, src, sizes),
            )
        ):
            begin = time.perf_counter()
            work()
            if k:
                pairs[which].append(time.perf_counter() - begin)
    ratio_batch = statistics.median(x / y for x, y in zip(*pairs, strict=True))
    print(f"memcpy_batch of {n} descriptors of 4 KiB in random order: {ratio_batch:.2f} of one memmove")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"threads": cpu.threads(), "rows": rows, "memcpy_batch": ratio_batch}, file, indent=1)


if __name__ == "__main__":
    main()
