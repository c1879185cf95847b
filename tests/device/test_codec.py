"""The coder's steps in host memory, on the emulator and on a GPU, against the oracle, with guards around buffers."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest

import kvraw
import kvraw.arrays
from kvraw import codec
from tests.helpers import coder_oracle as oracle
from tests.helpers.codec_cases import CASES, CodecCase, Place, foreign_cdf

CASE = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@pytest.fixture
def place(codec_device: int | None) -> Iterator[Place]:
    where = Place(codec_device)
    yield where
    where.close()


def table_of(case: CodecCase) -> np.ndarray:
    return foreign_cdf(case) if case.foreign else oracle.cdf(case.symbols, case.alphabet)


@functools.cache
def coded(name: str) -> tuple[np.ndarray, list[list[bytes]]]:
    """The distributions and the streams of a case, which the oracle decodes again."""
    (case,) = (c for c in CASES if c.name == name)
    table = table_of(case)
    streams = oracle.encode(table, case.symbols)
    for k, row in enumerate(streams):
        for c, stream in enumerate(row):
            found = oracle.decode_channel(table[k, c].tolist(), stream, case.symbols.shape[1])
            assert found == case.symbols[k, :, c].tolist()
    return table, streams


@CASE
def test_cdf(case: CodecCase, place: Place) -> None:
    want = oracle.cdf(case.symbols, case.alphabet)
    symbols, out = place.put(case.symbols), place.put(np.full(want.shape, 0xDDDD, np.uint16))
    codec.write_cdf(symbols.tensor, out.tensor, stream=place.stream).wait()
    np.testing.assert_array_equal(out.fetch(), want)
    if case.symbols.size:
        assert (np.diff(want.astype(int), axis=2) >= 1).all()
        assert (want[..., -1] == 65535).all()


@CASE
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_streams(case: CodecCase, shift: int, place: Place) -> None:
    table, want = coded(case.name)
    layers, _, channels = case.symbols.shape
    room = max(len(s) for row in want for s in row) + shift
    symbols, cdf = place.put(case.symbols), place.put(table)
    out = place.put(np.full((layers, channels, room), 0xEE, np.uint8), shift)
    lengths = place.put(np.full((layers, channels), -9, np.int32))
    codec.encode_into(cdf.tensor, symbols.tensor, out.tensor, lengths.tensor, stream=place.stream).wait()
    sizes, streams = lengths.fetch(), out.fetch()
    for k in range(layers):
        for c in range(channels):
            assert streams[k, c, : sizes[k, c]].tobytes() == want[k][c], (k, c)
            assert (streams[k, c, sizes[k, c] :] == 0xEE).all(), (k, c)
    found = place.put(np.full(case.symbols.shape, 0xCC, np.uint8), shift)
    codec.decode_into(cdf.tensor, out.tensor, lengths.tensor, found.tensor, stream=place.stream).wait()
    np.testing.assert_array_equal(found.fetch(), case.symbols)
    packed = np.frombuffer(b"".join(s for row in want for s in row), np.uint8)
    for dtype in (np.int32, np.int64):
        ends = place.put(np.cumsum(sizes).reshape(sizes.shape).astype(dtype))
        data, found = place.put(packed, shift), place.put(np.full(case.symbols.shape, 0xCC, np.uint8))
        operation = codec.decode_into(
            cdf.tensor, data.tensor, ends.tensor, found.tensor, packed=True, stream=place.stream
        )
        operation.wait()
        assert operation.done()
        np.testing.assert_array_equal(found.fetch(), case.symbols)


@CASE
def test_native_round_trip(case: CodecCase, place: Place) -> None:
    symbols = place.put(case.symbols)
    table = place.put(foreign_cdf(case)) if case.foreign else None
    encoded = codec.encode(
        symbols.tensor, case.alphabet, cdf=None if table is None else table.tensor, stream=place.stream
    )
    table_of_case, want = coded(case.name)
    assert encoded.data.tobytes() == b"".join(s for row in want for s in row)
    np.testing.assert_array_equal(encoded.cdf, table_of_case)
    np.testing.assert_array_equal(encoded.lengths, [[len(s) for s in row] for row in want])
    again = codec.Encoded.from_bytes(encoded.to_bytes())
    np.testing.assert_array_equal(codec.decode(again), case.symbols)
    out = place.put(np.full(case.symbols.shape, 0xCC, np.uint8))
    codec.decode(again, out.tensor, stream=place.stream).wait()
    np.testing.assert_array_equal(out.fetch(), case.symbols)


def test_an_output_that_is_too_small_names_the_channel_and_the_need(place: Place) -> None:
    symbols = np.zeros((2, 50, 40), np.uint8)
    symbols[1, :, 37] = np.arange(50) % 32
    table = oracle.cdf(symbols, 32)
    need = len(oracle.encode_channel(table[1, 37].tolist(), symbols[1, :, 37].tolist()))
    for room in (need - 1, need - 4, 8):
        out, lengths = place.put(np.full((2, 40, room), 0xEE, np.uint8)), place.put(np.zeros((2, 40), np.int32))
        with pytest.raises(
            kvraw.BoundsError, match=rf"out has {room} bytes per channel, layer 1, channel 37 needs {need}"
        ):
            codec.encode_into(
                place.put(table).tensor, place.put(symbols).tensor, out.tensor, lengths.tensor, stream=place.stream
            ).wait()
        assert lengths.fetch()[1, 37] == need
        streams = out.fetch()
        for k, c in ((1, 36), (1, 38)):  # nothing of it lies in its neighbours' slots
            size = lengths.fetch()[k, c]
            assert streams[k, c, :size].tobytes() == oracle.encode_channel(table[k, c].tolist(), [0] * 50)
            assert (streams[k, c, size:] == 0xEE).all()
        assert (
            oracle.decode_channel(table[0, 3].tolist(), streams[0, 3].tobytes()[: lengths.fetch()[0, 3]], 50)
            == [0] * 50
        )


def test_bits_that_wait_without_end(place: Place) -> None:
    """Halves that meet in the middle of the interval keep every bit waiting, past any word of output."""
    table = np.tile(np.array([0, 16384, 49152, 65535], np.uint16), (1, 3, 1))
    symbols = np.ones((1, 150, 3), np.uint8)
    symbols[0, 100] = symbols[0, 149] = (0, 1, 2)
    want = [oracle.encode_channel(table[0, c].tolist(), symbols[0, :, c].tolist()) for c in range(3)]
    put = [place.put(a) for a in (table, symbols, np.zeros((1, 3, 64), np.uint8), np.zeros((1, 3), np.int32))]
    cdf, given, out, lengths = (p.tensor for p in put)
    codec.encode_into(cdf, given, out, lengths, stream=place.stream).wait()
    assert [put[2].fetch()[0, c, : put[3].fetch()[0, c]].tobytes() for c in range(3)] == want
    found = place.put(np.full(symbols.shape, 0xCC, np.uint8))
    codec.decode_into(cdf, out, lengths, found.tensor, stream=place.stream).wait()
    np.testing.assert_array_equal(found.fetch(), symbols)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_a_symbol_outside_the_alphabet_is_reported_or_clamped(dtype: type, place: Place) -> None:
    symbols = np.random.default_rng(0).integers(0, 16, (2, 30, 5)).astype(dtype)
    symbols[1, 7, 4] = 16
    put, out = place.put(symbols), place.put(np.zeros((2, 5, 17), np.int16))
    if dtype is np.int8:
        negative = symbols % 16
        negative[0, 3, 2] = -3
        below = place.put(negative)
        with pytest.raises(kvraw.BoundsError, match=r"symbols holds -3 in layer 0, channel 2, must be in \[0, 16\)"):
            codec.encode(below.tensor, 16, stream=place.stream)
    with pytest.raises(kvraw.BoundsError, match=r"symbols holds 16 in layer 1, channel 4, must be in \[0, 16\)"):
        codec.write_cdf(put.tensor, out.tensor, stream=place.stream).wait()
    table = place.put(oracle.cdf(np.zeros((2, 30, 5), np.uint8), 16))
    with pytest.raises(kvraw.BoundsError, match="symbols holds 16 in layer 1, channel 4"):
        codec.encode_into(
            table.tensor,
            put.tensor,
            place.put(np.zeros((2, 5, 80), np.uint8)).tensor,
            place.put(np.zeros((2, 5), np.int32)).tensor,
            stream=place.stream,
        ).wait()
    symbols[0, 3, 2] = -3 if dtype is np.int8 else 253
    codec.write_cdf(place.put(symbols).tensor, out.tensor, clamp=True, stream=place.stream).wait()
    np.testing.assert_array_equal(out.fetch().view(np.uint16), oracle.cdf(np.clip(symbols, 0, 15), 16))


def test_a_distribution_that_does_not_rise_is_refused(place: Place) -> None:
    symbols = np.zeros((2, 12, 40), np.uint8)
    table = oracle.cdf(symbols, 32)
    table[1, 35, 20] = table[1, 35, 19]
    out, lengths = place.put(np.zeros((2, 40, 64), np.uint8)), place.put(np.ones((2, 40), np.int32))
    cdf = place.put(table)
    said = r"cdf\[1, 35\] does not rise: entry 20 is not above entry 19"
    with pytest.raises(kvraw.LayoutError, match=said):
        codec.encode_into(cdf.tensor, place.put(symbols).tensor, out.tensor, lengths.tensor, stream=place.stream).wait()
    found = place.put(np.full(symbols.shape, 0xCC, np.uint8))
    with pytest.raises(kvraw.LayoutError, match=said):
        codec.decode_into(cdf.tensor, out.tensor, lengths.tensor, found.tensor, stream=place.stream).wait()
    assert (found.fetch()[1, :, 35] == 0).all()


@pytest.mark.parametrize("bad", [-1, 65, 2**31 - 1, -(2**31)])
def test_a_length_outside_the_slot_is_reported(bad: int, place: Place) -> None:
    table = oracle.cdf(np.zeros((1, 9, 3), np.uint8), 8)
    lengths = place.put(np.array([[1, bad, 1]], np.int32))
    data, found = place.put(np.zeros((1, 3, 64), np.uint8)), place.put(np.full((1, 9, 3), 0xCC, np.uint8))
    with pytest.raises(kvraw.BoundsError, match=rf"lengths\[0, 1\] is {bad}, must be in \[0, 64\]"):
        codec.decode_into(
            place.put(table).tensor, data.tensor, lengths.tensor, found.tensor, stream=place.stream
        ).wait()
    assert (found.fetch() < 8).all()


@pytest.mark.parametrize("ends", [[5, 4, 9], [5, 9, 21], [-1, 3, 9], [5, 2**62, 9], [5, -(2**62), 9]])
def test_prefix_sums_outside_the_data_are_reported(ends: list[int], place: Place) -> None:
    table = oracle.cdf(np.zeros((1, 9, 3), np.uint8), 8)
    data, found = place.put(np.zeros(20, np.uint8)), place.put(np.full((1, 9, 3), 0xCC, np.uint8))
    with pytest.raises(kvraw.BoundsError, match=r"ends\[0, \d\] is -?\d+, must rise from 0 to at most 20"):
        codec.decode_into(
            place.put(table).tensor,
            data.tensor,
            place.put(np.array([ends])).tensor,
            found.tensor,
            packed=True,
            stream=place.stream,
        ).wait()
    assert (found.fetch() < 8).all()


@pytest.mark.parametrize("seed", range(6))
def test_damaged_streams_stay_inside_their_buffers(seed: int, place: Place) -> None:
    rng = np.random.default_rng(seed)
    alphabet = int(rng.choice([2, 16, 32, 50, 256]))
    symbols = rng.integers(0, alphabet, (2, int(rng.integers(1, 60)), 33)).astype(np.uint8)
    encoded = codec.encode(symbols, alphabet)
    data = encoded.data.copy()
    for _ in range(200):
        at = rng.integers(0, data.size)
        data[at] ^= 1 << rng.integers(0, 8)
    ends = encoded.ends.copy()
    if seed % 2:
        cut = int(rng.integers(0, data.size))
        data, ends = data[:cut], np.minimum(ends, cut)
    table = encoded.cdf.copy()
    if seed % 3 == 2:
        table[:, ::2, 0] = np.minimum(3, table[:, ::2, 1] - 1)  # a distribution that does not start at zero
    found = place.put(np.full(symbols.shape, 0xCC, np.uint8), seed % 2)
    codec.decode_into(
        place.put(table).tensor,
        place.put(data, seed % 4).tensor,
        place.put(ends).tensor,
        found.tensor,
        packed=True,
        stream=place.stream,
    ).wait()
    decoded = found.fetch()
    assert (decoded < alphabet).all()
    if table[1, 32, 0] == 0:
        row = (table[1, 32].tolist(), data[ends[1, 31] : ends[1, 32]].tobytes())
        assert decoded[1, :, 32].tolist() == oracle.decode_channel(*row, symbols.shape[1])


def test_symbols_of_any_stride(place: Place) -> None:
    rng = np.random.default_rng(1)
    whole = rng.integers(0, 16, (3, 20, 26)).astype(np.uint8)
    held = place.put(whole)

    def view(address: int) -> kvraw.arrays.TensorView:  # every second channel, two of three layers
        return kvraw.arrays.TensorView(address, (2, 20, 13), (20 * 26, 26, 2), 1, place.device, held)

    address = held.address if place.device is not None else int(held.array.ctypes.data)
    encoded = codec.encode(view(address + 20 * 26), 16, stream=place.stream)
    np.testing.assert_array_equal(codec.decode(encoded), whole[1:, :, ::2])
    want = whole.copy()
    want[:2, :, 1::2] = whole[1:, :, ::2]
    codec.decode(encoded, view(address + 1), stream=place.stream).wait()
    np.testing.assert_array_equal(held.fetch(), want)
