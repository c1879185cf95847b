"""CacheBlend's retrievals whose keys and cosines have different types, and caches whose blocks lie apart."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="these tests are about torch's tensors, and torch is not installed")

import kvraw.adapters.lmcache as ops  # noqa: E402

TYPES = {"float16": 5, "float32": 6, "bfloat16": 15, "float8_e5m2": 23, "float8_e4m3fn": 24}
LAYERS, TOKENS, HEADS, DIM, ROTARY, BLOCKS, BS, POSITIONS = 2, 4, 2, 16, 8, 6, 2, 40
SLOTS = [7, 2, 0, 9]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        number = request.getfixturevalue("gpu")
        if not torch.cuda.is_available():
            pytest.skip("there is a GPU, but torch is built without CUDA")
        torch.cuda.set_device(number)
    return str(request.param)


def turned(keys: Any, table: Any, old: int, new: int, neox: bool) -> Any:
    """Keys [layers, tokens, heads, dim] as a chain of tensor operations in the table's type turns them."""
    x = keys[..., :ROTARY].to(table.dtype)
    half = ROTARY // 2
    at = (slice(0, half), slice(half, ROTARY)) if neox else (slice(0, ROTARY, 2), slice(1, ROTARY, 2))
    a, b = x[..., at[0]], x[..., at[1]]
    (oc, os), (nc, ns) = (
        (t[:, None, :half], t[:, None, half:]) for t in (table[p : p + keys.shape[1]] for p in (old, new))
    )
    u, v = a * oc + b * os, b * oc - a * os
    out = torch.empty_like(x)
    out[..., at[0]], out[..., at[1]] = u * nc - v * ns, v * nc + u * ns
    return torch.cat([out.float().to(keys.dtype), keys[..., ROTARY:]], -1)


@pytest.mark.parametrize("neox", [True, False], ids=["halves", "neighbours"])
@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("float8_e4m3fn", "bfloat16"), ("float8_e4m3fn", "float16"), ("float8_e4m3fn", "float32"),
        ("float8_e5m2", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("padding", [0, 24], ids=["tight", "padded"])
def test_types_and_strides(device: str, key: str, table: str, neox: bool, padding: int) -> None:
    keys, floats = getattr(torch, key), getattr(torch, table)
    size, row = keys.itemsize, HEADS * DIM
    slot = (torch.randn((2, LAYERS, TOKENS, row)) * 3).to(keys).to(device)
    before = slot.cpu().view(torch.uint8).clone()
    angle = torch.arange(POSITIONS)[:, None] / 10.0 ** torch.arange(ROTARY // 2)
    cosines = torch.cat([angle.cos(), angle.sin()], -1).to(floats).to(device)
    paged = [torch.zeros((BLOCKS, 2 * BS * row + padding), dtype=keys, device=device) for _ in range(LAYERS)]
    pointers = torch.tensor([t.data_ptr() for t in paged], device=device)
    mapping = torch.tensor(SLOTS, device=device)
    spec = ops.CBGroupSpec(
        paged_kv_ptrs=pointers.data_ptr(), temp_buffer_ptrs=[slot.data_ptr()], num_layers=LAYERS, slot_tokens=TOKENS,
        hidden_elems=row, element_size=size, engine_kv_format=2, page_buffer_size=BLOCKS * BS, block_size=BS,
        head_size=DIM, block_stride_elems=padding and 2 * BS * row + padding, slot_mapping_base=mapping.data_ptr(),
        slot_mapping_capacity=len(SLOTS), cos_sin_cache=cosines.data_ptr(), rot_dim=ROTARY, rope_num_kv_heads=HEADS,
        rope_head_stride=DIM, key_scalar_type=TYPES[key], cache_scalar_type=TYPES[table], is_neox=neox,
    )  # fmt: skip
    where = "cpu" if device == "cpu" else torch.device(device, torch.cuda.current_device())
    ops.execute_cb_retrieve_plan_flat(where, 4096, [spec], [], [[0, 0, 3, 11]], [[0, 0, 0, TOKENS]], [[0, 1, 1]])
    found = slot.cpu()
    given = before.view(keys).reshape(2, LAYERS, TOKENS, HEADS, DIM)
    want = turned(given[0], cosines.cpu(), 3, 11, neox).reshape(LAYERS, TOKENS, row)
    assert torch.equal(found[0].view(torch.uint8), want.contiguous().view(torch.uint8))
    assert torch.equal(found[1].view(torch.uint8), before[1])
    for layer, one in enumerate(paged):
        blocks = one.cpu().view(torch.uint8).reshape(BLOCKS, -1)
        expected = torch.zeros_like(blocks)
        for token, at in enumerate(SLOTS):
            for plane in range(2):
                begin = ((plane * BS) + at % BS) * row * size
                expected[at // BS, begin : begin + row * size] = found[plane, layer, token].view(torch.uint8)
        assert torch.equal(blocks, expected)


def test_types_that_cannot_be(device: str) -> None:
    for key, table, message in [
        (24, -1, "cache_scalar_type is 24, must be 5"), (24, 0, "cache_scalar_type is 0"),
        (1, 6, "key_scalar_type is 1 with elements of 1 bytes"), (15, 15, "key_scalar_type is 15 with elements of 1"),
    ]:  # fmt: skip
        spec = ops.CBGroupSpec(
            1 << 20, [1 << 20], 1, TOKENS, HEADS * DIM, 1, 2, BLOCKS * BS, BS, DIM, 1 << 20, 4, 1 << 20, ROTARY, HEADS,
            DIM, key, True, cache_scalar_type=table,
        )  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ops.execute_cb_retrieve_plan_flat("cpu", 4096, [spec], [], [[0, 0, 3, 11]], [], [[0, 1, 0]])
