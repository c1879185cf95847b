"""Calls on the same tensors use what was worked out for the first, and only then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvraw
from kvraw import codec
from kvraw.codec import coder
from kvraw.rope import rerotate_keys, rotate
from tests.helpers import coder_oracle as oracle
from tests.helpers.codec_cases import DeviceArray, Place


class Where(NamedTuple):
    type: str
    index: int


class TorchLike:
    """A device array with the methods of a torch tensor."""

    def __init__(self, place: Place, values: np.ndarray) -> None:
        self.array: DeviceArray = place.put(values)
        self.shape, self.dtype, self.device = values.shape, values.dtype, Where("cuda", place.device)
        self.is_cuda = True

    def get_device(self) -> int:
        return self.device.index

    def data_ptr(self) -> int:
        return self.array.address

    def element_size(self) -> int:
        return int(self.dtype.itemsize)

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.dtype.itemsize for s in np.empty(self.shape, self.dtype).strides)

    def write(self, values: np.ndarray) -> None:
        self.array.host.array[...] = values
        self.array._world.copy(self.array.address, int(self.array.host.array.ctypes.data), values.nbytes)


@pytest.fixture
def place(device: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(coder, "_launches", coder.LaunchCache())
    monkeypatch.setattr(rotate, "_launches", rotate.LaunchCache())
    where = Place(device)
    yield where
    where.close()


def made(module: Any) -> int:
    return len(module._launches._made)


def test_the_coder(place: Place) -> None:
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        "symbols": TorchLike(place, np.zeros((2, 30, 40), np.uint8)),
        "cdf": TorchLike(place, np.zeros((2, 40, 17), np.uint16)),
        "out": TorchLike(place, np.zeros((2, 40, 64), np.uint8)),
        "lengths": TorchLike(place, np.zeros((2, 40), np.int32)),
        "back": TorchLike(place, np.zeros((2, 30, 40), np.uint8)),
    }
    symbols, cdf, out, lengths, back = tensors.values()
    for k in range(3):
        values = rng.integers(0, 16, (2, 30, 40)).astype(np.uint8)
        symbols.write(values)
        codec.write_cdf(symbols, cdf, stream=place.stream).wait()
        codec.encode_into(cdf, symbols, out, lengths, stream=place.stream).wait()
        codec.decode_into(cdf, out, lengths, back, stream=place.stream).wait()
        np.testing.assert_array_equal(cdf.array.fetch(), oracle.cdf(values, 16))
        np.testing.assert_array_equal(back.array.fetch(), values)
        assert made(coder) == 3, k
    values[1, 2, 3] = 99
    symbols.write(values)
    for _ in range(2):
        with pytest.raises(kvraw.BoundsError, match="symbols holds 99 in layer 1, channel 3"):
            codec.write_cdf(symbols, cdf, stream=place.stream).wait()
    codec.write_cdf(symbols, cdf, clamp=True, stream=place.stream).wait()
    assert made(coder) == 4
    symbols.shape, cdf.shape = (1, 60, 40), (1, 40, 34)
    codec.write_cdf(symbols, cdf, clamp=True, stream=place.stream).wait()
    assert made(coder) == 5
    want = oracle.cdf(np.minimum(values, 32).reshape(1, 60, 40), 33)
    np.testing.assert_array_equal(cdf.array.fetch().reshape(want.shape), want)
    with pytest.raises(TypeError, match="stream is None"):
        codec.write_cdf(symbols, cdf, clamp=True)
    watched = [weakref.ref(t) for t in tensors.values()]
    del symbols, cdf, out, lengths, back
    tensors.clear()
    gc.collect()
    assert [w() for w in watched] == [None] * 5


def test_keys(place: Place) -> None:
    rng = np.random.default_rng(1)
    cache = rng.standard_normal((20, 16)).astype(np.float32)
    values = rng.standard_normal((6, 2, 16)).astype(np.float32)
    key, table = TorchLike(place, values), TorchLike(place, cache)
    old, new = (TorchLike(place, np.zeros(6, np.int64)) for _ in range(2))
    for _ in range(3):
        positions = rng.integers(0, 20, (2, 6))
        old.write(positions[0])
        new.write(positions[1])
        key.write(values)
        rerotate_keys(key, old, new, table, stream=place.stream).wait()
        np.testing.assert_array_equal(key.array.fetch(), oracle.rerotate(values, *positions, cache, True, "float32"))
        assert made(rotate) == 1
        key.write(values)
        rerotate_keys(
            key, positions[0], new, table, stream=place.stream
        ).wait()  # positions on the host: no launch kept
        np.testing.assert_array_equal(key.array.fetch(), oracle.rerotate(values, *positions, cache, True, "float32"))
        assert made(rotate) == 1
    key.write(values)
    rerotate_keys(key, old, new, table, neox=False, stream=place.stream).wait()
    np.testing.assert_array_equal(key.array.fetch(), oracle.rerotate(values, *positions, cache, False, "float32"))
    assert made(rotate) == 2
    new.write(np.full(6, 20))
    for _ in range(2):
        with pytest.raises(kvraw.BoundsError, match=r"new_positions\[\d\] is 20, must be in \[0, 20\)"):
            rerotate_keys(key, old, new, table, stream=place.stream).wait()


def test_few_are_kept(place: Place) -> None:
    coder._launches._made.most = 4
    for n in range(1, 8):
        codec.write_cdf(
            TorchLike(place, np.zeros((1, 3, n), np.uint8)),
            TorchLike(place, np.zeros((1, n, 5), np.uint16)),
            stream=place.stream,
        ).wait()
    assert made(coder) <= 4
