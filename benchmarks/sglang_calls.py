"""Host time of SGLang's and vLLM's operations without a GPU: `python -m benchmarks.sglang_calls [--calls NAME]`.

As `benchmarks.adapter_calls`, whose driver it uses: Python functions of kvraw that a repeated call enters, the files
that these are in, calls of the driver from Python, and microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks.adapter_calls import DEVICE_MEMORY, PINNED, Tensor, main
from kvraw.adapters import sglang, vllm

LAYERS, TOKENS, ROW, PAGE, HEADS = 32, 4096, 1152, 64, 4
DEVICE, HOST, APART = DEVICE_MEMORY.start, PINNED.start, 1 << 36
Call = tuple[str, Callable[[], None]]


class Values(Tensor):
    """A tensor on the host, whose memory is read."""

    def __init__(self, values: Any) -> None:
        kept = np.ascontiguousarray(values, np.int64)
        super().__init__(int(kept.ctypes.data), kept.shape, 8, kept)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values


def _table(at: int) -> Tensor:
    made = Tensor(at, (LAYERS,), 8)
    made.dtype = "torch.uint64"
    return made


def _ids(rng: np.random.Generator) -> Values:
    starts = rng.permutation(TOKENS // PAGE)[:16] * PAGE
    return Values((starts[:, None] + np.arange(PAGE)).ravel())


def operations() -> Iterator[Call]:
    """Those of SGLang on rows of 1152 bytes, then the block swaps."""
    rng = np.random.default_rng(0)
    device = [[Tensor(DEVICE + k * APART + (n << 28), (TOKENS, ROW // 2)) for n in range(LAYERS)] for k in (0, 1)]
    host = [[Tensor(HOST + k * APART + n * TOKENS * ROW, (TOKENS, ROW // 2)) for n in range(LAYERS)] for k in (0, 1)]
    whole = [Tensor(HOST + k * APART, (LAYERS * TOKENS * ROW // 2,)) for k in (0, 1)]
    tables = [_table(DEVICE + 2 * APART + k * 4096) for k in range(4)]
    there = cycle([[Tensor(DEVICE + 3 * APART + k * 65536, (1024,), 8) for k in (n, n + 4)] for n in range(4)])
    here = cycle([[_ids(rng), _ids(rng)] for _ in range(4)])
    (dk, dv), (hk, hv), (fk, fv), row = [x[3] for x in device], [x[3] for x in host], whole, ROW * LAYERS
    s = sglang
    yield "one layer, MLA", lambda: s.transfer_kv_per_layer_mla(hk, dk, *next(there), ROW)
    yield "one layer", lambda: s.transfer_kv_per_layer(hk, dk, hv, dv, *next(there), ROW)
    yield (
        "page-head to one layer",
        lambda: s.transfer_kv_per_layer_ph_lf(fk, dk, fv, dv, *next(there), 3, ROW, row, 16, HEADS),
    )
    yield "all layers", lambda: s.transfer_kv_all_layer(*tables, *next(there), ROW, LAYERS)
    yield (
        "all layers to page-first",
        lambda: s.transfer_kv_all_layer_lf_pf(tables[0], fk, tables[2], fv, *next(there), ROW, row, LAYERS),
    )
    yield "hicache one layer", lambda: s.transfer_hicache_one_layer(dk, dv, next(there)[0], hk, hv, next(there)[1])
    lists = [*device[0], *device[1]], [*host[0], *host[1]]
    yield "direct", lambda: s.transfer_kv_direct(*lists, *next(here), PAGE)
    paged = [Tensor(HOST + k * APART, (TOKENS // PAGE, LAYERS, PAGE, ROW // 2)) for k in (0, 1)]
    yield "direct to pages", lambda: s.transfer_kv_all_layer_direct_lf_pf(lists[0], paged, *next(here), PAGE)
    yield (
        "direct pages to one layer",
        lambda: s.transfer_kv_per_layer_direct_pf_lf(paged, [dk, dv], *next(here), 3, PAGE),
    )
    staging, pools = ([Tensor(at + k * APART, (TOKENS, LAYERS, ROW // 2)) for k in (0, 1)] for at in (DEVICE, HOST))
    yield (
        "staged",
        lambda: s.transfer_hicache_all_layer_staged_lf_pf(
            tables[0], tables[2], next(there)[0], next(here)[0], *staging, *pools, page_size=PAGE, block_quota=2
        ),
    )
    starts, counts = list(range(0, 64, 4)), [4] * 16
    yield "embedding ranges", lambda: s.transfer_embedding_ranges_direct(dk, hk, starts, starts, counts)
    for kib, count in ((4, 1000), (4, 10_000), (256, 64), (256, 1000)):
        size, order = kib << 10, [rng.permutation(count) for _ in "ab"]
        given = [Values(DEVICE + order[0] * size), Values(HOST + order[1] * size), Values(np.full(count, size))]
        yield f"swap_blocks_batch {kib} KiB x {count}", lambda given=given: vllm.swap_blocks_batch(*given)
        mapping = Values(np.stack(order, 1))
        ends = Tensor(DEVICE, (count, size // 2)), Tensor(HOST, (count, size // 2))
        yield (
            f"swap_blocks {kib} KiB x {count}",
            lambda ends=ends, size=size, mapping=mapping: vllm.swap_blocks(*ends, size, mapping),
        )


if __name__ == "__main__":
    main(operations)
