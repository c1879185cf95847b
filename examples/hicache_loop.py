"""A hierarchical KV cache's loop: ``python examples/hicache_loop.py [--device cpu|cuda]``.

Prompts come back after their pages were taken by others. Each one's pages are backed up to host memory when it is done;
when it returns, its pages are loaded layer by layer, and each layer's "attention" (here: a sum) starts as soon as that
layer is there, while the next still moves. Needs torch.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

import kvraw

LAYERS, PAGES, PAGE_SIZE, HEADS, HEAD_SIZE = 8, 32, 16, 4, 64
PROMPTS, PROMPT_PAGES = 6, 8  # together more than the pages of the device


def slots_of(pages: np.ndarray) -> np.ndarray:
    """All slots of pages."""
    return (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()


def run(device: str, layout: str) -> bool:
    """Serve every prompt twice; whether each layer of each saw the same keys and values both times."""
    shape = (PAGES * PAGE_SIZE, HEADS, HEAD_SIZE)
    keys, values = ([torch.zeros(shape, dtype=torch.float16, device=device) for _ in range(LAYERS)] for _ in "kv")
    cache = kvraw.PagedCache.from_tensors((keys, values), engine="sglang", block_size=PAGE_SIZE)
    stream = torch.cuda.current_stream() if device != "cpu" else None
    rng, same = np.random.default_rng(0), True
    with kvraw.HostKVPool.like(cache, PROMPTS * PROMPT_PAGES * PAGE_SIZE, layout=layout) as pool:
        saved: dict[int, tuple[np.ndarray, list[torch.Tensor]]] = {}
        for prompt in range(PROMPTS):  # each takes pages that an earlier one had, and fills them
            mine = slots_of(rng.permutation(PAGES)[:PROMPT_PAGES])
            at = torch.from_numpy(mine).to(device)
            for layer in (*keys, *values):
                layer[at] = torch.randn(len(mine), *shape[1:], device=device).half()
            seen = [attention(k, v, at) for k, v in zip(keys, values, strict=True)]
            host = pool.alloc(len(mine))
            assert host is not None
            # Enqueued behind the writes above and, on the same stream, before the next prompt's.
            pool.backup(cache, mine, host, stream=stream)
            saved[prompt] = host, seen
        for prompt in rng.permutation(PROMPTS):  # and they return, to other pages
            host, seen = saved[prompt]
            mine = slots_of(rng.permutation(PAGES)[:PROMPT_PAGES])
            at = torch.from_numpy(mine).to(device)
            loading = pool.load_layers(cache, host, mine, stream=stream)
            for layer in range(LAYERS):
                loading.wait_on(stream, layer)
                same &= torch.equal(attention(keys[layer], values[layer], at), seen[layer])
            loading.wait()
            pool.free(host)
    return bool(same)


def attention(keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """What stands for attention: something that reads every key and value."""
    return torch.stack([keys[at].double().sum(0), (values[at].double() * 3).sum(0)])


def main(arguments: list[str] | None = None) -> int:
    """Run with every layout; 0 where nothing was lost."""
    parser = argparse.ArgumentParser(description="Back up and load pages of a KV cache, layer by layer.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    device = parser.parse_args(arguments).device
    results = {x: run(device, x) for x in ("layer_first", "page_first", "page_first_direct", "page_head")}
    for layout, same in results.items():
        print(f"{layout}: {'every layer saw the same keys and values' if same else 'DIFFERS'}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
