"""Every operation of the adapters that takes tensors, as a call on host memory whose tensors can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvraw.adapters import lmcache, sglang, vllm

__all__ = ["ADDRESSES", "CALLS", "Call", "table"]

N, LAYERS, HEADS, DIM, BS = 12, 2, 2, 8, 4
ROW = HEADS * DIM
SRC, DST = [3, 0, 7, 1], [5, 2, 11, 8]
PAGES = [[4, 5, 6, 7], [8, 9, 10, 11]]

Call = tuple[dict[str, tuple[int, ...]], Callable[..., None]]
"""Shapes of bytes by name, and the call with them; what begins with ``x`` is given by address or not used there."""


def ids(values: list[int]) -> torch.Tensor:
    return torch.tensor(values)


def table(*layers: torch.Tensor) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in layers], dtype=torch.uint64)


def _desc(planes: int, layers: int) -> Any:
    d = lmcache.PageBufferShapeDesc()
    d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size = planes, layers, N // BS, BS, HEADS, DIM, 1
    return d


def _blocks(to_host: int, number: int, planes: int) -> Callable[..., None]:
    def call(**t: torch.Tensor) -> None:
        paged, objects = [x for name, x in t.items() if name[1:] in "pq"], [t["do" if to_host else "so"]]
        lmcache.multi_layer_block_kv_transfer(
            paged, objects, [2, 0], "cpu", to_host, _desc(planes, len(paged)), 2 * BS, number, 0
        )

    return call


def _retrieve(s: torch.Tensor, d: torch.Tensor) -> None:
    lmcache.lmcache_memcpy_async(d, s, N * ROW, 0, 0, 1 << 12)


_TOKENS = (N, HEADS, DIM)
_FIRST = (N, LAYERS, HEADS, DIM)
_HEADS = (N // BS, HEADS, BS, LAYERS, DIM)
_DIRECT = (N // BS, LAYERS, BS, HEADS, DIM)
_PAGED = (N // BS, BS, HEADS, DIM)
_TWO = {"sk": _TOKENS, "sv": _TOKENS, "dk": _TOKENS, "dv": _TOKENS}
_AT = {"src_indices": ids(SRC), "dst_indices": ids(DST)}

CALLS: dict[str, Call] = {
    "vllm.swap_blocks": (
        {"s": _TOKENS, "d": _TOKENS},
        lambda s, d: vllm.swap_blocks(s, d, ROW, torch.tensor([SRC, DST]).T),
    ),
    "sglang.transfer_kv_per_layer": (
        _TWO,
        lambda sk, sv, dk, dv: sglang.transfer_kv_per_layer(sk, dk, sv, dv, **_AT, item_size=ROW),
    ),
    "sglang.transfer_kv_per_layer_mla": (
        {"s": _TOKENS, "d": _TOKENS},
        lambda s, d: sglang.transfer_kv_per_layer_mla(s, d, **_AT, item_size=ROW),
    ),
    "sglang.transfer_kv_per_layer_mla_pf_lf": (
        {"s": _FIRST, "d": _TOKENS},
        lambda s, d: sglang.transfer_kv_per_layer_mla_pf_lf(s, d, ids(SRC), ids(DST), 1, ROW, LAYERS * ROW),
    ),
    "sglang.transfer_kv_per_layer_mla_lf_pf": (
        {"s": _TOKENS, "d": _FIRST},
        lambda s, d: sglang.transfer_kv_per_layer_mla_lf_pf(s, d, ids(SRC), ids(DST), 1, ROW, LAYERS * ROW),
    ),
    "sglang.transfer_kv_per_layer_pf_lf": (
        {"sk": _FIRST, "sv": _FIRST, "dk": _TOKENS, "dv": _TOKENS},
        lambda sk, sv, dk, dv: sglang.transfer_kv_per_layer_pf_lf(
            sk, dk, sv, dv, ids(SRC), ids(DST), 1, ROW, LAYERS * ROW
        ),
    ),
    "sglang.transfer_kv_per_layer_ph_lf": (
        {"sk": _HEADS, "sv": _HEADS, "dk": _TOKENS, "dv": _TOKENS},
        lambda sk, sv, dk, dv: sglang.transfer_kv_per_layer_ph_lf(
            sk, dk, sv, dv, ids(SRC), ids(DST), 1, ROW, LAYERS * ROW, BS, HEADS
        ),
    ),
    "sglang.transfer_kv_all_layer_lf_ph": (
        {"xs": (4, *_TOKENS), "dk": _HEADS, "dv": _HEADS},
        lambda xs, dk, dv: sglang.transfer_kv_all_layer_lf_ph(
            table(xs[0], xs[1]), dk, table(xs[2], xs[3]), dv, ids(SRC), ids(DST), ROW, LAYERS * ROW, LAYERS, BS, HEADS
        ),
    ),
    "sglang.transfer_kv_direct": (
        _TWO,
        lambda sk, sv, dk, dv: sglang.transfer_kv_direct([sk, sv], [dk, dv], ids(SRC), ids(DST), 1),
    ),
    "sglang.transfer_kv_per_layer_direct_pf_lf": (
        {"s": _DIRECT, "d": _TOKENS},
        lambda s, d: sglang.transfer_kv_per_layer_direct_pf_lf([s], [d], ids(PAGES[0]), ids(PAGES[1]), 1, BS),
    ),
    "sglang.transfer_kv_all_layer_direct_lf_pf": (
        {"s": _TOKENS, "st": _TOKENS, "d": _DIRECT},
        lambda s, st, d: sglang.transfer_kv_all_layer_direct_lf_pf([s, st], [d], ids(PAGES[0]), ids(PAGES[1]), BS),
    ),
    "sglang.transfer_hicache_one_layer": (
        _TWO,
        lambda sk, sv, dk, dv: sglang.transfer_hicache_one_layer(dk, dv, ids(DST), sk, sv, ids(SRC), element_dim=ROW),
    ),
    "sglang.transfer_hicache_one_layer_mla": (
        {"s": _TOKENS, "d": _TOKENS},
        lambda s, d: sglang.transfer_hicache_one_layer_mla(d, ids(DST), s, ids(SRC), element_dim=ROW),
    ),
    "sglang.transfer_hicache_all_layer_mla_staged_lf_pf": (
        {"xs": (2, *_TOKENS), "xt": _FIRST, "d": _FIRST},
        lambda xs, xt, d: sglang.transfer_hicache_all_layer_mla_staged_lf_pf(
            table(*xs), ids(SRC), ids(PAGES[1]), xt, d, page_size=BS, element_size=ROW
        ),
    ),
    "sglang.transfer_embedding_ranges_direct": (
        {"s": _TOKENS, "d": _TOKENS},
        lambda s, d: sglang.transfer_embedding_ranges_direct(s, d, [1, 5], [4, 0], [3, 2]),
    ),
    "lmcache.multi_layer_block_kv_transfer to the host": (
        {"sp": (2, *_PAGED), "sq": (2, *_PAGED), "do": (2, 2, 2 * BS, ROW)},
        _blocks(1, 1, 2),
    ),
    "lmcache.multi_layer_block_kv_transfer to the cache": (
        {"dp": (N // BS, 2, *_PAGED[1:]), "dq": (N // BS, 2, *_PAGED[1:]), "so": (2, 2, 2 * BS, ROW)},
        _blocks(0, 2, 2),
    ),
    "lmcache.multi_layer_block_kv_transfer of MLA": (
        {"sp": (N // BS, BS, ROW), "sq": (N // BS, BS, ROW), "do": (1, 2, 2 * BS, ROW)},
        _blocks(1, 3, 1),
    ),
    "lmcache.multi_layer_kv_transfer": (
        {"s": (2, *_PAGED), "st": (2, *_PAGED), "d": (2, 2, 4, ROW)},
        lambda s, st, d: lmcache.multi_layer_kv_transfer(d, [s, st], ids(SRC), "cpu", N, 1, 1, BS, DIM),
    ),
    "lmcache.single_layer_kv_transfer": (
        {"s": (2, 4, ROW), "d": (2, *_PAGED)},
        lambda s, d: lmcache.single_layer_kv_transfer(s, d, ids(DST), 0, 1),
    ),
    "lmcache.single_layer_kv_transfer_sgl": (
        {"sk": _PAGED, "sv": _PAGED, "d": (4, 2, ROW)},
        lambda sk, sv, d: lmcache.single_layer_kv_transfer_sgl(d, sk, sv, ids(SRC), 1, True),
    ),
    "lmcache.load_and_reshape_flash": (
        {"sk": _PAGED, "sv": _PAGED, "d": (2, 3, 4, ROW)},
        lambda sk, sv, d: lmcache.load_and_reshape_flash(d, sk, sv, ids(SRC), 1),
    ),
    "lmcache.gather_paged_kv_to_cpu": (
        {"s": (2, *_PAGED), "st": (2, *_PAGED), "d": (2, 2, BS, ROW)},
        lambda s, st, d: lmcache.gather_paged_kv_to_cpu(
            {"a": s, "b": st}, [2, 0], 1, {"kv_layout": "NHD"}, 1, [d, torch.zeros_like(d)]
        ),
    ),
    "lmcache.scatter_cpu_to_paged_kv": (
        {"s": (2, 2, BS, ROW), "d": (2, *_PAGED), "dt": (2, *_PAGED)},
        lambda s, d, dt: lmcache.scatter_cpu_to_paged_kv({"a": d, "b": dt}, [1], [s], 1, 0, {"kv_layout": "NHD"}, 1),
    ),
    "lmcache.lmcache_memcpy_async": ({"s": _TOKENS, "d": _TOKENS}, _retrieve),
}

ADDRESSES: dict[str, Callable[[int], None]] = {
    "vllm.swap_blocks_batch": lambda a: vllm.swap_blocks_batch(
        *(torch.tensor([x], dtype=torch.uint64) for x in (a, _HERE.data_ptr(), 8))
    ),
    "sglang.transfer_kv_all_layer_mla": lambda a: sglang.transfer_kv_all_layer_mla(
        table(_HERE, _HERE), torch.tensor([_HERE.data_ptr(), a], dtype=torch.uint64), ids([1]), ids([2]), 8, 2
    ),
    "sglang.transfer_hicache_all_layer_mla": lambda a: sglang.transfer_hicache_all_layer_mla(
        table(_HERE), ids([1]), torch.tensor([a], dtype=torch.uint64), ids([2]),
        cache_src_stride_bytes=8, cache_dst_stride_bytes=8,
    ),
    "sglang.copy_all_layer_kv_cache_cpu": lambda a: sglang.copy_all_layer_kv_cache_cpu(
        torch.tensor([a], dtype=torch.uint64), ids([8]), ids([0]), ids([1])
    ),
    "lmcache.multi_layer_kv_transfer": lambda a: lmcache.multi_layer_kv_transfer(
        torch.zeros((2, 1, 2, 8), dtype=torch.uint8), torch.tensor([a], dtype=torch.uint64), ids([1, 2]), "cpu", 8, 1, 1
    ),
    "lmcache.multi_layer_block_kv_transfer, tables": lambda a: lmcache.multi_layer_block_kv_transfer(
        torch.tensor([a], dtype=torch.uint64), [_HERE.data_ptr()], [1], "cpu", 1, _desc(2, 1), BS, 1, 0
    ),
    "lmcache.multi_layer_block_kv_transfer, objects": lambda a: lmcache.multi_layer_block_kv_transfer(
        [torch.zeros((2, *_PAGED), dtype=torch.uint8)], [a], [1], "cpu", 1, _desc(2, 1), BS, 1, 0
    ),
    "lmcache.lmcache_memcpy_async": lambda a: lmcache.lmcache_memcpy_async(a, _HERE.data_ptr(), 8, 0, 0, 4096),
    "lmcache.batched_memcpy, few": lambda a: lmcache.batched_memcpy([a], [_HERE.data_ptr()], [8]),
    "lmcache.batched_memcpy, many": lambda a: lmcache.batched_memcpy([_HERE.data_ptr()] * 9, [a] * 9, [8] * 9),
    "lmcache.execute_object_group_transfer, tables": lambda a: _groups(table=a),
    "lmcache.execute_object_group_transfer, entries": lambda a: _groups(entry=a),
    "lmcache.execute_object_group_transfer, objects": lambda a: _groups(thing=a),
    "lmcache.execute_object_group_transfer, ids": lambda a: _groups(at=a),
    "lmcache.execute_object_group_transfer, staging": lambda a: _groups(staging=a),
    "lmcache.execute_cb_retrieve_plan_flat, table": lambda a: _retrieval(paged_kv_ptrs=a),
    "lmcache.execute_cb_retrieve_plan_flat, slots": lambda a: _retrieval(temp_buffer_ptrs=[a]),
    "lmcache.execute_cb_retrieve_plan_flat, mapping": lambda a: _retrieval(slot_mapping_base=a),
    "lmcache.execute_cb_retrieve_plan_flat, cosines": lambda a: _retrieval(cos_sin_cache=a or 8),
    "lmcache.execute_direct_copy_transfer, layers": lambda a: _direct(layer=a),
    "lmcache.execute_direct_copy_transfer, objects": lambda a: _direct(thing=a),
}  # fmt: skip

_HERE = torch.zeros(1 << 14, dtype=torch.uint8)
_IDS = ids([1, 0, 2, 1])
_ENTRIES = table(_HERE, _HERE)
_COSINES = torch.zeros((64, 8))


def _groups(**bad: int) -> None:
    here = _HERE.data_ptr()
    entries = torch.tensor([bad.get("entry", here)] * 2, dtype=torch.uint64)
    ends = bad.get("table", entries.data_ptr()), [bad.get("thing", here)]
    spec = lmcache.KernelGroupSpec(*ends, _desc(2, 1), BS, 1, bad.get("at", _IDS.data_ptr()), 4)
    staging = [lmcache.StagingCopy(bad["staging"], here, 8, 0)] if "staging" in bad else []
    step = lmcache.BatchStep(staging, [lmcache.LaunchVar(0, 0, 1, 1, 0)])
    lmcache.execute_object_group_transfer(1, "cpu", 4096, [spec], [step])


def _retrieval(**bad: Any) -> None:
    here = _HERE.data_ptr()
    good = {"paged_kv_ptrs": _ENTRIES.data_ptr(), "temp_buffer_ptrs": [here + (1 << 13)]}
    good |= {"slot_mapping_base": _IDS.data_ptr(), "cos_sin_cache": _COSINES.data_ptr()}
    spec = lmcache.CBGroupSpec(
        num_layers=1, slot_tokens=4, hidden_elems=16, element_size=4, engine_kv_format=1, page_buffer_size=N,
        block_size=BS, head_size=8, slot_mapping_capacity=4, rot_dim=8, rope_num_kv_heads=2, rope_head_stride=8,
        key_scalar_type=6, is_neox=True, **(good | bad),
    )  # fmt: skip
    rows = [[], [[0, 0, 0, 3]], [[0, 0, 0, 4]], [[0, 1, 1]]]
    lmcache.execute_cb_retrieve_plan_flat("cpu", 4096, [spec], *rows)


def _direct(**bad: int) -> None:
    here = _HERE.data_ptr()
    group = lmcache.DirectCopyGroupSpec([bad.get("layer", here)], _desc(2, 1), 1, BS, 0, [1])
    thing = lmcache.DirectCopyObject(bad.get("thing", here + (1 << 13)), 0, 2 * BS * ROW, 0, [0])
    lmcache.execute_direct_copy_transfer(1, "cpu", 4096, [group], [thing])
