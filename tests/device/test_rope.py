"""Key re-rotation in host memory, on the emulator and on a GPU: bit for bit what rounding each operation gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvraw
import kvraw.arrays
from kvraw.rope import rerotate_keys
from tests.helpers import coder_oracle as oracle
from tests.helpers.codec_cases import Place

DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture
def place(codec_device: int | None) -> Iterator[Place]:
    where = Place(codec_device)
    yield where
    where.close()


def bits(values: np.ndarray, dtype: str) -> np.ndarray:
    return oracle.to_bits(values, dtype)


def check(found: np.ndarray, want: np.ndarray, dtype: str) -> None:
    if dtype == "float32":
        np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
        same = ~np.isnan(want)
        np.testing.assert_array_equal(found[same].view(np.uint32), want[same].view(np.uint32))
    else:
        np.testing.assert_array_equal(found, want)


def table(positions: int, rotary: int, dtype: str) -> np.ndarray:
    angle = np.arange(positions)[:, None] / 10000.0 ** (np.arange(rotary // 2) * 2 / max(rotary, 1))
    return bits(np.concatenate([np.cos(angle), np.sin(angle)], axis=1), dtype)


# tokens, heads, head size, rotary dimension, distance of heads, elements that shift the key's base
SHAPES = [
    (5, 8, 64, 64, 64, 0),
    (7, 3, 80, 32, 80, 0),
    (4, 1, 64, 64, 64, 0),
    (6, 5, 32, 32, 48, 0),
    (3, 9, 16, 16, 24, 0),
    (9, 2, 10, 6, 11, 0),
    (4, 4, 64, 64, 64, 1),
    (40, 4, 128, 128, 128, 0),
    (3, 2, 7, 2, 7, 0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys(shape: tuple[int, ...], neox: bool, dtype: str, place: Place) -> None:
    tokens, heads, size, rotary, stride, shift = shape
    rng = np.random.default_rng(3)
    padded = bits(rng.standard_normal((tokens, heads, stride)) * 4, dtype)
    cache = table(50, rotary, dtype)
    old, new = rng.integers(0, 50, tokens), rng.integers(0, 50, tokens)
    want = padded.copy()
    want[:, :, :size] = oracle.rerotate(padded[:, :, :size], old, new, cache, neox, dtype)
    for width in (np.int64, np.int32):
        for on_device in (True, False):
            key, held = place.put(padded, shift), place.put(cache)
            where = [place.put(p.astype(width)).tensor if on_device else p.astype(width) for p in (old, new)]
            view: Any = key.tensor
            if stride != size:
                address = key.address if place.device is not None else int(key.array.ctypes.data)
                step = padded.itemsize
                strides = (heads * stride * step, stride * step, step)
                view = kvraw.arrays.TensorView(address, (tokens, heads, size), strides, step, place.device, key)
            rerotate_keys(view, *where, held.tensor, neox=neox, dtype=dtype, stream=place.stream).wait()
            check(key.fetch(), want, dtype)
            np.testing.assert_array_equal(held.fetch(), cache)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flat_keys_with_a_stride(dtype: str, place: Place) -> None:
    rng = np.random.default_rng(4)
    flat = bits(rng.standard_normal((6, 3 * 40)), dtype)
    cache = table(9, 32, dtype)
    old, new = rng.integers(0, 9, 6), rng.integers(0, 9, 6)
    want = flat.reshape(6, 3, 40).copy()
    want[:, :, :32] = oracle.rerotate(want[:, :, :32], old, new, cache, True, dtype)
    key, held = place.put(flat), place.put(cache)
    rerotate_keys(
        key.tensor, old, new, held.tensor, head_size=32, head_stride=40, dtype=dtype, stream=place.stream
    ).wait()
    check(key.fetch().reshape(want.shape), want, dtype)


def test_positions_of_two_widths(place: Place) -> None:
    rng = np.random.default_rng(6)
    key, cache = rng.standard_normal((9, 2, 16)).astype(np.float32), table(30, 16, "float32")
    positions = rng.integers(0, 30, (2, 9))
    want = oracle.rerotate(key, positions[0], positions[1], cache, True, "float32")
    for old, new in ((np.int64, np.int32), (np.int32, np.int64)):
        held = place.put(key)
        given = [place.put(p.astype(w)).tensor for p, w in zip(positions, (old, new), strict=True)]
        rerotate_keys(held.tensor, *given, place.put(cache).tensor, stream=place.stream).wait()
        check(held.fetch(), want, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("size", [64, 10])
def test_any_bits(size: int, neox: bool, dtype: str, place: Place) -> None:
    """Infinities, NaNs, subnormal numbers, zeros of both signs, and what overflows."""
    rng = np.random.default_rng(size)
    kind = np.uint32 if dtype == "float32" else np.uint16
    draw = lambda shape: rng.integers(0, np.iinfo(kind).max, shape, kind, endpoint=True)  # noqa: E731
    key, cache = draw((16, 5, size)), draw((7, size))
    top = 8 * key.itemsize - 1
    edges = np.array([0, 1 << top, 1, 3, 0x7F80 << (top - 15), 0x7C00 << (top - 15), 0x0080 << (top - 15)], kind)
    where = rng.random(key.shape) < 0.4
    key[where] = rng.choice(edges, where.sum())
    cache[rng.random(cache.shape) < 0.3] = 0
    if dtype == "float32":
        key, cache = key.view(np.float32), cache.view(np.float32)
    old, new = rng.integers(0, 7, 16), rng.integers(0, 7, 16)
    want = oracle.rerotate(key, old, new, cache, neox, dtype)
    held, table_held = place.put(key), place.put(cache)
    rerotate_keys(held.tensor, old, new, table_held.tensor, neox=neox, dtype=dtype, stream=place.stream).wait()
    check(held.fetch(), want, dtype)


@pytest.mark.parametrize("bad", [-1, 50, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("on_device", [True, False])
def test_a_position_outside_the_cache(bad: int, which: int, on_device: bool, place: Place) -> None:
    key = np.random.default_rng(1).standard_normal((4, 2, 16)).astype(np.float32)
    positions = np.array([[3, 4, 5, 6], [7, 8, 9, 10]])
    positions[which, 2] = bad
    cache = table(50, 16, "float32")
    held, put = place.put(key), place.put(cache)
    name = ("old_positions", "new_positions")[which]
    given = [place.put(p).tensor if on_device else p for p in positions]
    with pytest.raises(kvraw.BoundsError, match=rf"{name}\[2\] is {bad}, must be in \[0, 50\)"):
        rerotate_keys(held.tensor, *given, put.tensor, stream=place.stream).wait()
    found, want = held.fetch(), key.copy()
    if place.device is not None and on_device:
        ok = np.array([0, 1, 3])
        want[ok] = oracle.rerotate(key[ok], positions[0, ok], positions[1, ok], cache, True, "float32")
    np.testing.assert_array_equal(found, want)


# layers, tokens, heads, head size, rotary dimension; elements between layers, between heads, that shift the key's base
STACKS = [
    (3, 5, 2, 64, 64, 16, 0, 0),
    (4, 7, 5, 32, 16, 0, 8, 0),
    (2, 6, 3, 10, 6, 3, 1, 1),
    (1, 9, 1, 16, 16, 0, 0, 0),
    (5, 1, 4, 16, 16, 8, 0, 0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("shape", STACKS, ids=str)
def test_layers_that_share_positions_which_may_be_ranges(
    shape: tuple[int, ...], neox: bool, dtype: str, place: Place
) -> None:
    layers, tokens, heads, size, rotary, gap, room, shift = shape
    rng = np.random.default_rng(8)
    row = heads * (size + room)
    padded = bits(rng.standard_normal((layers, tokens * row + gap)) * 4, dtype)
    cache = table(50, rotary, dtype)
    old, new, scattered = range(41, 41 + tokens), range(3, 3 + tokens), rng.permutation(50)[:tokens]
    for before, after in ((old, new), (np.array(old, np.int32), new), (old, np.array(new)), (scattered, old)):
        want = padded.copy()
        for layer in want:
            keys = layer[: tokens * row].reshape(tokens, heads, size + room)[:, :, :size]
            keys[:] = oracle.rerotate(keys, np.array(before), np.array(after), cache, neox, dtype)
        key, held = place.put(padded, shift), place.put(cache)
        address = key.address if place.device is not None else int(key.array.ctypes.data)
        step = padded.itemsize
        strides = ((tokens * row + gap) * step, row * step, (size + room) * step, step)
        view: Any = kvraw.arrays.TensorView(address, (layers, tokens, heads, size), strides, step, place.device, key)
        given = [p if isinstance(p, range) else place.put(p).tensor for p in (before, after)]
        rerotate_keys(view, *given, held.tensor, neox=neox, dtype=dtype, stream=place.stream).wait()
        check(key.fetch(), want, dtype)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("start", "at", "value"), [(-1, 0, -1), (47, 3, 50), (2**40, 0, 2**40)])
def test_a_range_outside_the_cache(start: int, at: int, value: int, which: int, place: Place) -> None:
    key = np.random.default_rng(1).standard_normal((2, 4, 2, 16)).astype(np.float32)
    held, cache = place.put(key), place.put(table(50, 16, "float32"))
    given = [range(4), range(4)]
    given[which] = range(start, start + 4)
    name = ("old_positions", "new_positions")[which]
    with pytest.raises(kvraw.BoundsError, match=rf"{name}\[{at}\] is {value}, must be in \[0, 50\)"):
        rerotate_keys(held.tensor, *given, cache.tensor, stream=place.stream)
    np.testing.assert_array_equal(held.fetch(), key)
    with pytest.raises(kvraw.BoundsError, match="old_positions has 3 positions, key has 4 tokens"):
        rerotate_keys(held.tensor, range(3), range(4), cache.tensor, stream=place.stream)


def test_a_range_with_steps_is_a_list(place: Place) -> None:
    key, cache = np.random.default_rng(2).standard_normal((4, 2, 16)).astype(np.float32), table(50, 16, "float32")
    held = place.put(key)
    rerotate_keys(held.tensor, range(9, 1, -2), range(0, 40, 10), place.put(cache).tensor, stream=place.stream).wait()
    want = oracle.rerotate(key, np.array([9, 7, 5, 3]), np.array([0, 10, 20, 30]), cache, True, "float32")
    check(held.fetch(), want, "float32")


@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 0, 8), (0, 2, 2, 8), (2, 0, 2, 8)])
def test_nothing_to_do(shape: tuple[int, ...], place: Place) -> None:
    positions = np.zeros(shape[-3], np.int64)
    held, cache = place.put(np.zeros(shape, np.float32)), place.put(table(4, 8, "float32"))
    rerotate_keys(held.tensor, positions, positions, cache.tensor, stream=place.stream).wait()
