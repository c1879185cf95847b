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


def tables(device: str, rotary: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(64.0), 1.0 / 10000 ** (torch.arange(0, rotary, 2) / rotary))
    return torch.cat([angles.cos(), angles.sin()], 1).to(device, torch.bfloat16)


def turn(keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor, cache: torch.Tensor, neox: bool) -> None:
    """Turn keys [tokens, heads, elements] in place, as torch would."""
    for at, back in ((old, True), (new, False)):
        cos, sin = (x.unsqueeze(1) for x in cache[at].chunk(2, 1))
        sin = -sin if back else sin
        part = keys[..., : cache.shape[1]]
        a, b = part.chunk(2, -1) if neox else (part[..., ::2], part[..., 1::2])
        a, b = a * cos - b * sin, b * cos + a * sin
        part[...] = torch.cat([a, b], -1) if neox else torch.stack([a, b], -1).flatten(-2)


@pytest.mark.parametrize("stride", [16, 24])
@pytest.mark.parametrize("neox", [True, False])
def test_keys_are_rotated_as_torch_would(device: str, neox: bool, stride: int) -> None:
    torch.manual_seed(1)
    size, heads = 16, 3
    key = torch.randn(5, heads * stride, dtype=torch.bfloat16, device=device)
    cache = tables(device, 8)
    old, new = torch.tensor([0, 5, 9, 63, 1], device=device), torch.tensor([7, 5, 60, 0, 2], device=device)
    want = key.clone().view(5, heads, stride)
    turn(want, old, new, cache, neox)
    if stride == size:
        ops.rotary_embedding_k_fused(old, new, key, size, cache, neox)
    else:
        ops.rotary_embedding_k_fused_strided(old, new, key, size, stride, cache, neox)
    assert torch.equal(key.view(5, heads, stride), want)


# What keys are a view of, the view, the elements from head to head if the call says so, and [tokens, heads, elements].
VIEWS = [
    ((6, 1, 64), lambda t: t[..., 48:], 64, lambda t: t[..., 48:]),  # the rotary part of latent rows
    ((6, 3, 64), lambda t: t[..., 48:], 64, lambda t: t[..., 48:]),
    ((6, 3, 2, 16), lambda t: t[:, :, 0], 32, lambda t: t[:, :, 0]),  # keys beside values
    ((6, 3, 32), lambda t: t, 32, lambda t: t[..., :16]),
    ((6, 6, 16), lambda t: t, 32, lambda t: t[:, ::2]),
    ((6, 1, 96), lambda t: t, 32, lambda t: t.view(6, 3, 32)[..., :16]),
    ((6, 3, 24), lambda t: t[..., :16], None, lambda t: t[..., :16]),
    ((3, 6, 16), lambda t: t.transpose(0, 1), None, lambda t: t.transpose(0, 1)),
    ((6, 4, 16), lambda t: t[:, :3], None, lambda t: t[:, :3]),
    ((2, 3, 3, 16), lambda t: t, None, lambda t: t.view(6, 3, 16)),  # a batch
    ((2, 3, 3, 24), lambda t: t[..., :16], 24, lambda t: t.view(6, 3, 24)[..., :16]),
    ((1, 7, 3, 16), lambda t: t[:, :6], None, lambda t: t[0, :6]),
    ((6, 2, 3, 16), lambda t: t[:, :1], None, lambda t: t[:, 0]),
]


@pytest.mark.parametrize("case", range(len(VIEWS)))
@pytest.mark.parametrize("neox", [True, False])
def test_views_of_keys(device: str, case: int, neox: bool) -> None:
    torch.manual_seed(2)
    shape, view, stride, heads = VIEWS[case]
    whole, cache = torch.randn(shape, dtype=torch.bfloat16, device=device), tables(device, 16)
    for _ in range(2):  # the second call finds its launch
        old, new = torch.randint(0, 64, (2, 6), device=device)
        want = whole.clone()
        turn(heads(want), old, new, cache, neox)
        if stride is None:
            ops.rotary_embedding_k_fused(old, new, view(whole), 16, cache, neox)
        else:
            ops.rotary_embedding_k_fused_strided(old, new, view(whole), 16, stride, cache, neox)
        assert torch.equal(whole, want)


def test_no_keys(device: str) -> None:
    cache, none = tables(device, 16), torch.zeros(0, dtype=torch.int64, device=device)
    want = cache.clone()
    for shape in ((0, 48), (0, 3, 16), (2, 0, 3, 16), (0, 5, 3, 16)):
        keys = torch.zeros(shape, dtype=cache.dtype, device=device)
        assert ops.rotary_embedding_k_fused(none, none, keys, 16, cache, True) is None
        assert keys.shape == shape
    assert torch.equal(cache, want)


def test_keys_that_cannot_be_taken(device: str) -> None:
    whole, cache = torch.randn(2, 6, 3, 16, dtype=torch.bfloat16, device=device), tables(device, 16)
    want, positions = whole.clone(), torch.arange(10, device=device)
    with pytest.raises(ValueError, match="rows of tokens must follow each other"):
        ops.rotary_embedding_k_fused(positions, positions + 1, whole[:, :5], 16, cache, True)
    with pytest.raises(ValueError, match="head_size is 16 and head_stride 20"):
        ops.rotary_embedding_k_fused_strided(positions[:6], positions[1:7], whole[0], 16, 20, cache, True)
    with pytest.raises(ValueError, match="must be a multiple of head_stride 32"):
        ops.rotary_embedding_k_fused_strided(positions[:6], positions[1:7], whole[0].view(6, 48), 16, 32, cache, True)
    assert torch.equal(whole, want)
