"""LMCache's names for the codec and for the re-rotation of keys, with torch's tensors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import kvraw.adapters.lmcache as ops  # noqa: E402

LAYERS, TOKENS, CHANNELS, BINS = 3, 40, 10, 32


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        request.getfixturevalue("gpu")
        if not torch.cuda.is_available():
            pytest.skip("torch sees no device")
    return str(request.param)


def test_symbols_go_through_both_forms_and_come_back(device: str) -> None:
    torch.manual_seed(0)
    symbols = torch.randint(0, BINS, (LAYERS, TOKENS, CHANNELS), dtype=torch.int8, device=device)
    cdf = ops.calculate_cdf(symbols, BINS)
    assert (cdf.dtype, tuple(cdf.shape), cdf.device.type) == (torch.int16, (LAYERS, CHANNELS, BINS + 1), device)
    counts = torch.stack([(symbols < b).sum(1) for b in range(BINS + 1)], 2)
    want = (0xFFFF - BINS) * counts // TOKENS + torch.arange(BINS + 1, device=device)
    assert torch.equal(cdf.to(torch.int32) & 0xFFFF, want.to(torch.int32))
    buffer = torch.zeros((LAYERS, CHANNELS, 64), dtype=torch.uint8, device=device)
    lengths = torch.zeros((LAYERS, CHANNELS), dtype=torch.int32, device=device)
    ops.encode_fast_new(cdf, symbols, buffer, lengths)
    out = torch.full_like(symbols, 77, dtype=torch.uint8)
    ops.decode_fast_new(cdf, buffer, lengths, out)
    assert torch.equal(out, symbols.to(torch.uint8))
    packed = torch.cat([buffer[l, c, : int(lengths[l, c])] for l in range(LAYERS) for c in range(CHANNELS)])
    ends = lengths.flatten().cumsum(0).reshape(LAYERS, CHANNELS)
    out.fill_(77)
    ops.decode_fast_prefsum(cdf, packed, ends, out)
    assert torch.equal(out, symbols.to(torch.uint8))


@pytest.mark.parametrize("stride", [16, 24])
@pytest.mark.parametrize("neox", [True, False])
def test_keys_are_rotated_as_torch_would(device: str, neox: bool, stride: int) -> None:
    torch.manual_seed(1)
    size, rotary, heads = 16, 8, 3
    key = torch.randn(5, heads * stride, dtype=torch.bfloat16, device=device)
    angles = torch.outer(torch.arange(64.0), 1.0 / 10000 ** (torch.arange(0, rotary, 2) / rotary))
    cache = torch.cat([angles.cos(), angles.sin()], 1).to(device, torch.bfloat16)
    old, new = torch.tensor([0, 5, 9, 63, 1], device=device), torch.tensor([7, 5, 60, 0, 2], device=device)
    want = key.clone().view(5, heads, stride)
    for at, back in ((old, True), (new, False)):
        cos, sin = (x.unsqueeze(1) for x in cache[at].chunk(2, 1))
        sin = -sin if back else sin
        part = want[..., :rotary]
        a, b = part.chunk(2, -1) if neox else (part[..., ::2], part[..., 1::2])
        a, b = a * cos - b * sin, b * cos + a * sin
        want[..., :rotary] = torch.cat([a, b], -1) if neox else torch.stack([a, b], -1).flatten(-2)
    if stride == size:
        ops.rotary_embedding_k_fused(old, new, key, size, cache, neox)
    else:
        ops.rotary_embedding_k_fused_strided(old, new, key, size, stride, cache, neox)
    assert torch.equal(key.view(5, heads, stride), want)
