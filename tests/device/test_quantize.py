"""Quantization and whole chunks in host memory, on the emulator and on a GPU, against the oracle."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import kvraw
import kvraw.arrays
from kvraw import codec
from tests.helpers import coder_oracle as oracle
from tests.helpers.codec_cases import Place

DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture
def place(codec_device: int | None) -> Iterator[Place]:
    where = Place(codec_device)
    yield where
    where.close()


def bits_of(values: np.ndarray, dtype: str) -> np.ndarray:
    found = oracle.to_bits(values.astype(np.float64), dtype)
    return found.view(np.float16) if dtype == "float16" else found


def values_of(bits: np.ndarray, dtype: str) -> np.ndarray:
    return oracle.from_bits(bits.view(np.uint16) if dtype == "float16" else bits, dtype).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "bins"), [((3, 7, 100), 32), ((2, 2, 5, 130), [32, 16, 4, 255]), ((1, 1, 1), 16)])
def test_quantization(shape: tuple[int, ...], bins: int | list[int], dtype: str, place: Place) -> None:
    rng = np.random.default_rng(4)
    chunk = bits_of(rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, (*shape[:-1], 1)), dtype)
    chunk[..., 0, :] = 0  # a row of zeros has no scale
    flat = (int(np.prod(shape[:-2])), *shape[-2:])
    per_layer = bins if isinstance(bins, list) else [bins] * flat[0]
    values = values_of(chunk, dtype).reshape(flat)
    want, largest = oracle.quantize(values, per_layer)
    held, q = place.put(chunk), place.put(np.full(flat, 0xCC, np.uint8))
    m = place.put(np.full(flat[:2], -1, np.float32))
    name = dtype if dtype == "bfloat16" else None
    codec.quantize_into(held.tensor, bins, q.tensor, m.tensor, dtype=name, stream=place.stream).wait()
    np.testing.assert_array_equal(q.fetch(), want)
    np.testing.assert_array_equal(m.fetch(), largest)
    back = place.put(np.zeros_like(chunk))
    codec.dequantize_into(q.tensor, m.tensor, bins, back.tensor, dtype=name, stream=place.stream).wait()
    restored = oracle.dequantize(want, largest, per_layer)
    np.testing.assert_array_equal(back.fetch(), bits_of(restored, dtype).reshape(shape))
    middle = np.array([b // 2 - 1 for b in per_layer])[:, None, None]
    assert (np.abs(restored - values) <= largest[:, :, None] / middle * 0.5001).all()


def test_rows_at_the_ends_of_the_range(place: Place) -> None:
    chunk = np.zeros((1, 4, 6), np.float32)
    chunk[0, 0] = [1e-44, -1e-44, 0, 0, 0, 0]  # the scale would be infinite
    chunk[0, 1] = np.finfo(np.float32).max * np.array([1, -1, 0.5, 0, 1, 1])
    chunk[0, 2] = [1e-38, -1e-38, 5e-39, 0, 0, 0]
    want, largest = oracle.quantize(chunk, [32])
    q, m = place.put(np.full(chunk.shape, 0xCC, np.uint8)), place.put(np.zeros((1, 4), np.float32))
    codec.quantize_into(place.put(chunk).tensor, 32, q.tensor, m.tensor, stream=place.stream).wait()
    np.testing.assert_array_equal(q.fetch(), want)
    np.testing.assert_array_equal(m.fetch(), largest)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_not_finite_is_reported(bad: float, dtype: str, place: Place) -> None:
    values = np.ones((3, 5, 140), np.float32)
    values[2, 3, 137] = bad
    chunk = place.put(bits_of(values, dtype))
    with pytest.raises(kvraw.BoundsError, match="not finite in layer 2, token 3"):
        codec.compress(chunk.tensor, dtype=dtype, stream=place.stream)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunk_there_and_back(dtype: str, place: Place) -> None:
    rng = np.random.default_rng(5)
    shape, bins = (2, 3, 40, 65), [32, 32, 16, 32, 16, 16]
    chunk = bits_of(rng.standard_normal(shape), dtype)
    values = values_of(chunk, dtype)
    symbols, maxima = oracle.quantize(values.reshape(6, 40, 65), bins)
    want = bits_of(oracle.dequantize(symbols, maxima, bins), dtype).reshape(shape)
    held = place.put(chunk)
    for _ in range(2):  # the second call uses the first one's memory
        compressed = codec.compress(held.tensor, bins, dtype=dtype, stream=place.stream)
    stored = compressed.to_bytes()
    assert len(stored) == compressed.nbytes
    assert compressed.ratio == chunk.nbytes / len(stored)
    streams = oracle.encode(oracle.cdf(symbols, 31), symbols)
    assert compressed.encoded.data.tobytes() == b"".join(s for row in streams for s in row)
    loaded = codec.Compressed.from_bytes(stored)
    found = codec.decompress(loaded)
    np.testing.assert_array_equal(found.view(want.dtype), want)
    out = place.put(np.zeros_like(chunk))
    codec.decompress(loaded, out.tensor, dtype=dtype, stream=place.stream).wait()
    np.testing.assert_array_equal(out.fetch(), want)
    error = np.abs(values_of(want, dtype) - values) / np.abs(values).max(axis=3, keepdims=True)
    assert error.max() <= 0.5 / 7 + 0.01


def test_a_chunk_with_gaps(place: Place) -> None:
    rng = np.random.default_rng(6)
    whole = rng.standard_normal((2, 6, 8)).astype(np.float32)
    held = place.put(whole)
    address = held.address if place.device is not None else int(held.array.ctypes.data)
    view = kvraw.arrays.TensorView(address + 4, (2, 3, 5), (6 * 8 * 4, 8 * 8, 4), 4, place.device, held)
    want, largest = oracle.quantize(whole[:, ::2, 1:6], [16, 16])
    compressed = codec.compress(view, 16, dtype="float32", stream=place.stream)
    np.testing.assert_array_equal(codec.decode(compressed.encoded), want)
    codec.decompress(compressed, view, dtype="float32", stream=place.stream).wait()
    whole[:, ::2, 1:6] = oracle.dequantize(want, largest, [16, 16])
    np.testing.assert_array_equal(held.fetch(), whole)


@pytest.mark.parametrize("shape", [(2, 0, 5, 8), (2, 3, 0, 8), (2, 3, 4, 0)])
def test_empty_chunks(shape: tuple[int, ...], place: Place) -> None:
    chunk = place.put(np.zeros(shape, np.float16))
    compressed = codec.compress(chunk.tensor, stream=place.stream)
    again = codec.Compressed.from_bytes(compressed.to_bytes())
    assert codec.decompress(again).shape == shape
    codec.decompress(again, chunk.tensor, stream=place.stream).wait()
