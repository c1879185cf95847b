"""Two processes that share a prompt's cache: ``python examples/cache_server.py``. Needs kvraw[serve], no GPU.

One worker computes the cache of a prompt and stores it with a cache server. The other finds it there, loads it into
blocks of its own, and computes the rest alone; both go on with the same tokens.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import numpy as np

import kvraw
from kvraw.multiprocess import CacheKey, CacheServer, EngineWorker

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE, CHUNK = 4, 64, 16, 2, 32, 64
PROMPT = [(7 * k) % 1000 for k in range(300)]


def compute(layers: list[np.ndarray], blocks: list[int], first: int) -> int:
    """Stands for the model: the cache of the tokens from `first` on; each depends on all tokens ahead of it."""
    state = 0
    for at, token in enumerate(PROMPT):
        state = (state * 31 + token) % 65_521
        if at >= first:
            for number, layer in enumerate(layers):
                layer[:, blocks[at // BLOCK_SIZE], at % BLOCK_SIZE] = state % 1000 + number
    return len(PROMPT) - first


def generate(layers: list[np.ndarray], blocks: list[int], count: int) -> list[int]:
    """Stands for the model: tokens that follow from all of the cache, each of them from those ahead of it too."""
    state, tokens = 0, []
    for at in range(len(PROMPT)):
        for layer in layers:
            row = layer[:, blocks[at // BLOCK_SIZE], at % BLOCK_SIZE]
            state = (state * 31 + int(row.astype(np.int64).sum())) % 65_521
    for _ in range(count):
        state = (state * 31 + 7) % 65_521
        tokens.append(state % 1000)
    return tokens


def work(endpoint: str, seed: int) -> None:
    """One worker: load what is there, compute the rest, store what is new."""
    layers = [np.zeros((2, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE), np.float16) for _ in range(LAYERS)]
    cache = kvraw.PagedCache.from_tensors(layers, axes="PBTHD")
    needed = -(-len(PROMPT) // BLOCK_SIZE)
    blocks = np.random.default_rng(seed).permutation(BLOCKS)[:needed].tolist()
    with EngineWorker.connect(cache, endpoint, chunk_tokens=CHUNK) as worker:
        found = worker.context.prefetch(CacheKey("example", 1, 0, PROMPT, 0, len(PROMPT)))
        loaded = worker.retrieve(CacheKey("example", 1, 0, PROMPT, 0, found), blocks)
        computed = compute(layers, blocks, loaded)
        stored = worker.store(CacheKey("example", 1, 0, PROMPT, 0, len(PROMPT)), blocks).stored
    tokens = " ".join(map(str, generate(layers, blocks, 8)))
    print(f"loaded {loaded} tokens, computed {computed}, stored {stored} chunks; goes on with {tokens}")


def main(arguments: list[str] | None = None) -> int:
    """Run both, one after another; 0 where they go on with the same tokens."""
    given = sys.argv[1:] if arguments is None else arguments
    if given:
        work(given[0], int(given[1]))
        return 0
    with tempfile.TemporaryDirectory() as folder, CacheServer(64 << 20, f"ipc://{folder}/serve.sock").start() as server:
        lines = [
            subprocess.run(
                [sys.executable, __file__, server.endpoint, str(seed)], check=True, capture_output=True, text=True
            ).stdout.strip()
            for seed in (1, 2)
        ]
    print("\n".join(lines))
    same = lines[0].split(" with ")[1] == lines[1].split(" with ")[1]
    print("the same tokens" if same else "NOT the same tokens")
    return 0 if same and lines[1].startswith("loaded 256 tokens, computed 44") else 1


if __name__ == "__main__":
    raise SystemExit(main())
