"""The codec and key re-rotation on a GPU at full size, on torch's tensors and streams, beside the CPU and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw import codec
from kvraw.rope import rerotate_keys
from tests.helpers.codec_cases import Place

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch(gpu: int) -> Any:
    module = pytest.importorskip("torch", reason="torch is not installed")
    if not module.cuda.is_available():
        pytest.skip("torch sees no device")
    return module


@pytest.mark.parametrize("alphabet", [31, 33, 64, 256])
@pytest.mark.parametrize("shape", [(32, 256, 1024), (3, 1000, 333)])
def test_the_cpu_and_the_gpu_agree(shape: tuple[int, ...], alphabet: int, torch: Any) -> None:
    rng = np.random.default_rng(alphabet)
    symbols = np.clip(np.rint(rng.normal(alphabet / 2, alphabet / 8, shape)), 0, alphabet - 1).astype(np.uint8)
    here = codec.encode(symbols, alphabet)
    on_gpu, stream = torch.from_numpy(symbols).cuda(), torch.cuda.current_stream()
    there = codec.encode(on_gpu, alphabet, stream=stream)
    assert there.to_bytes() == here.to_bytes()
    out = torch.full_like(on_gpu, 0xCC)
    codec.decode(there, out, stream=stream).wait()
    assert torch.equal(out, on_gpu)


def test_single_steps_on_a_side_stream(torch: Any) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        symbols = torch.randint(0, 32, (4, 256, 512), dtype=torch.int8, device="cuda")
        cdf = torch.zeros(4, 512, 33, dtype=torch.int16, device="cuda")
        out = torch.zeros(4, 512, 300, dtype=torch.uint8, device="cuda")
        lengths = torch.zeros(4, 512, dtype=torch.int32, device="cuda")
        back, packed_back = torch.zeros_like(symbols), torch.zeros_like(symbols)
        codec.write_cdf(symbols, cdf, stream=stream)
        codec.encode_into(cdf, symbols, out, lengths, stream=stream)
        codec.decode_into(cdf, out, lengths, back, stream=stream)
        packed = out[torch.arange(300, device="cuda") < lengths[:, :, None]]
        ends = lengths.flatten().cumsum(0).reshape(lengths.shape)
        codec.decode_into(cdf, packed, ends, packed_back, packed=True, stream=stream).wait()
        assert torch.equal(back, symbols)
        assert torch.equal(packed_back, symbols)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_chunks(dtype: str, torch: Any) -> None:
    chunk = torch.randn(2, 8, 256, 1024, dtype=getattr(torch, dtype), device="cuda")
    stream, bins = torch.cuda.current_stream(), [32] * 4 + [16] * 12
    there = codec.compress(chunk, bins, stream=stream)
    here = codec.compress(chunk.cpu(), bins)
    assert there.to_bytes() == here.to_bytes()
    restored, beside = torch.zeros_like(chunk), torch.zeros_like(chunk, device="cpu")
    codec.decompress(there, restored, stream=stream).wait()
    codec.decompress(here, beside)
    assert torch.equal(restored.cpu(), beside)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("rotary", "size"), [(128, 128), (64, 80), (6, 7)])
def test_keys_beside_torch(rotary: int, size: int, neox: bool, dtype: str, torch: Any) -> None:
    kind, half = getattr(torch, dtype), rotary // 2
    key = (torch.randn(3000, 8, size, device="cuda") * 3).to(kind)
    angle = torch.arange(4096, device="cuda")[:, None] / 10000 ** (torch.arange(half, device="cuda") / half)
    cache = torch.cat([angle.cos(), angle.sin()], 1).to(kind)
    old, new = torch.randint(0, 4096, (2, 3000), device="cuda")
    want = key.clone()
    x, y = (want[..., :half], want[..., half:rotary]) if neox else (want[..., 0:rotary:2], want[..., 1:rotary:2])
    oc, os = cache[old][:, None].chunk(2, -1)
    nc, ns = cache[new][:, None].chunk(2, -1)
    u, v = x * oc + y * os, y * oc - x * os
    first, second = u * nc - v * ns, v * nc + u * ns
    x.copy_(first)
    y.copy_(second)
    host = key.cpu()
    rerotate_keys(key, old, new, cache, neox=neox, stream=torch.cuda.current_stream()).wait()
    rerotate_keys(host, old.cpu(), new.cpu(), cache.cpu(), neox=neox)
    assert torch.equal(key, want)
    assert torch.equal(key.cpu(), host)


def test_damaged_streams_leave_the_guards_alone(gpu: int) -> None:
    place = Place(gpu)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        alphabet = int(rng.choice([2, 16, 32, 50, 256]))
        symbols = rng.integers(0, alphabet, (2, int(rng.integers(1, 300)), 333)).astype(np.uint8)
        encoded = codec.encode(symbols, alphabet)
        data = encoded.data ^ (rng.random(encoded.data.size) < 0.1).astype(np.uint8) * np.uint8(rng.integers(1, 256))
        ends = encoded.ends
        if seed % 3 == 0:
            data = data[: rng.integers(0, data.size)]
        held = place.put(data, seed % 4)
        found = place.put(np.full(symbols.shape, 0xCC, np.uint8), seed % 3)
        table = place.put(encoded.cdf)
        try:
            codec.decode_into(
                table.tensor, held.tensor, place.put(ends).tensor, found.tensor, packed=True, stream=place.stream
            ).wait()
        except kvraw.BoundsError:
            assert seed % 3 == 0
        here = np.zeros_like(symbols)
        try:
            codec.decode_into(encoded.cdf, data, ends, here, packed=True)
        except kvraw.BoundsError:
            assert seed % 3 == 0
        np.testing.assert_array_equal(found.fetch(), here)
        np.testing.assert_array_equal(held.fetch(), data)
    place.close()
