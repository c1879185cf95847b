"""The codec on the CPU: round trips of anything, and clear errors for what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kvraw
from kvraw import codec
from kvraw.codec.streams import slot_bytes
from tests.helpers import coder_oracle as oracle
from tests.helpers.profile import examples

ANY = hnp.array_shapes(min_dims=3, max_dims=3, min_side=1, max_side=24)


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), ANY, st.integers(1, 256))
def test_what_was_coded_comes_back(data: st.DataObject, shape: tuple[int, ...], alphabet: int) -> None:
    symbols = data.draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, alphabet - 1), fill=st.just(0)))
    encoded = codec.encode(symbols, alphabet)
    want = oracle.encode(oracle.cdf(symbols, alphabet), symbols)
    assert encoded.data.tobytes() == b"".join(s for row in want for s in row)
    np.testing.assert_array_equal(codec.decode(codec.Encoded.from_bytes(encoded.to_bytes())), symbols)


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.integers(1, 256), st.integers(1, 60))
def test_any_rising_distribution_will_do(data: st.DataObject, alphabet: int, tokens: int) -> None:
    rise = data.draw(st.lists(st.integers(0, 65535), min_size=alphabet, max_size=alphabet, unique=True))
    last = data.draw(st.integers(0, 65535))  # never read
    table = np.array([*sorted(rise), last], np.uint16).reshape(1, 1, -1)
    symbols = data.draw(hnp.arrays(np.uint8, (1, tokens, 1), elements=st.integers(0, alphabet - 1)))
    encoded = codec.encode(symbols, alphabet, cdf=table)
    assert encoded.data.tobytes() == oracle.encode_channel(table[0, 0].tolist(), symbols.ravel().tolist())
    np.testing.assert_array_equal(codec.decode(encoded), symbols)


@settings(max_examples=examples(200), deadline=None)
@given(hnp.arrays(np.uint8, ANY, elements=st.integers(0, 40)), st.integers(41, 256))
def test_distributions(symbols: np.ndarray, alphabet: int) -> None:
    out = np.zeros((symbols.shape[0], symbols.shape[2], alphabet + 1), np.uint16)
    codec.write_cdf(symbols, out)
    np.testing.assert_array_equal(out, oracle.cdf(symbols, alphabet))
    assert (np.diff(out.astype(int), axis=2) >= 1).all()
    assert (out[..., 0] == 0).all()
    assert (out[..., -1] == 65535).all()


@pytest.mark.parametrize("alphabet", [1, 2, 15, 31, 32, 255, 256])
@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 64, 257, 5000])
def test_slots_hold_the_worst_streams(alphabet: int, tokens: int) -> None:
    symbols = (np.arange(tokens) % alphabet).astype(np.uint8).reshape(1, tokens, 1)
    assert codec.encode(symbols, alphabet).data.size <= slot_bytes(tokens, alphabet, True)
    rare = np.array([*range(alphabet), 0]).astype(np.uint16).reshape(1, 1, -1)
    encoded = codec.encode(np.zeros_like(symbols), alphabet, cdf=rare)
    assert encoded.data.size <= slot_bytes(tokens, alphabet, False)


def test_pending_bits_without_end() -> None:
    """Halves that meet in the middle of the interval keep every bit waiting."""
    table = np.array([0, 16384, 49152, 65535], np.uint16).reshape(1, 1, 4)
    for tail in (0, 1, 2):
        symbols = np.array([1] * 5000 + [tail], np.uint8).reshape(1, -1, 1)
        encoded = codec.encode(symbols, 3, cdf=table)
        assert encoded.data.tobytes() == oracle.encode_channel(table[0, 0].tolist(), symbols.ravel().tolist())
        np.testing.assert_array_equal(codec.decode(encoded), symbols)


def test_an_alphabet_that_is_not_given_is_found() -> None:
    symbols = np.random.default_rng(2).integers(0, 11, (2, 40, 9)).astype(np.uint8)
    symbols[1, 3, 4] = 13
    for these, alphabet in ((symbols, 14), (symbols.astype(np.int8), 14), (symbols[:1, ::2], 11), (symbols[:0], 1)):
        encoded = codec.encode(these)
        assert encoded.alphabet == alphabet
        np.testing.assert_array_equal(codec.decode(encoded), these)
    table = oracle.cdf(symbols, 20)
    assert codec.encode(symbols, cdf=table).to_bytes() == codec.encode(symbols, 20).to_bytes()
    with pytest.raises(kvraw.BoundsError, match="symbols holds -3 in layer 0, channel 0"):
        codec.encode(np.array([[[-3]], [[5]]], np.int8))


def test_many_streams_on_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    symbols = np.clip(np.rint(rng.normal(16, 4, (4, 100, 1000))), 0, 31).astype(np.uint8)
    monkeypatch.setenv("KVRAW_CPU_THREADS", "1")
    one = codec.encode(symbols, 32)
    monkeypatch.setenv("KVRAW_CPU_THREADS", "7")
    many = codec.encode(symbols, 32)
    assert one.to_bytes() == many.to_bytes()
    np.testing.assert_array_equal(codec.decode(many), symbols)
    symbols[2, 5, 77] = symbols[3, 6, 78] = 40
    with pytest.raises(kvraw.BoundsError, match="40 in layer 2, channel 77"):
        codec.encode(symbols, 32)


L, T, C = 2, 9, 5
SYMBOLS, TABLE = np.zeros((L, T, C), np.uint8), oracle.cdf(np.zeros((L, T, C), np.uint8), 8)
OUT, LENGTHS = np.zeros((L, C, 64), np.uint8), np.ones((L, C), np.int32)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: codec.encode(SYMBOLS, 0), kvraw.BoundsError, r"alphabet is 0, must be in \[1, 256\]"),
        (lambda: codec.encode(SYMBOLS, 257), kvraw.BoundsError, "alphabet is 257"),
        (lambda: codec.encode(SYMBOLS[0], 8), kvraw.LayoutError, "symbols has 2 axes, must have 3"),
        (lambda: codec.encode(SYMBOLS.astype(np.int16), 8), TypeError, "symbols holds int16, must hold uint8 or int8"),
        (lambda: codec.encode(SYMBOLS[:, ::-1], 8), kvraw.LayoutError, "must not be negative"),
        (lambda: codec.encode(SYMBOLS, 9, cdf=TABLE), kvraw.LayoutError, "cdf must have 10 entries"),
        (lambda: codec.write_cdf(SYMBOLS, TABLE[:1]), kvraw.LayoutError, r"cdf has shape \(1, 5, 9\), must be \(2, 5"),
        (lambda: codec.write_cdf(SYMBOLS, TABLE[..., :1].copy()), kvraw.LayoutError, "alphabet 1 to 256"),
        (lambda: codec.write_cdf(SYMBOLS, TABLE[..., ::2]), kvraw.LayoutError, "must be dense"),
        (lambda: codec.encode_into(TABLE.astype(np.int32), SYMBOLS, OUT, LENGTHS), TypeError, "cdf holds int32"),
        (lambda: codec.encode_into(TABLE, SYMBOLS, OUT[:, :3], LENGTHS), kvraw.LayoutError, "out has strides"),
        (
            lambda: codec.encode_into(TABLE, SYMBOLS, OUT.reshape(L, -1, 32), LENGTHS),
            kvraw.LayoutError,
            "out has shape",
        ),
        (lambda: codec.encode_into(TABLE, SYMBOLS, OUT, LENGTHS[:1]), kvraw.LayoutError, "lengths has shape"),
        (lambda: codec.encode_into(TABLE, SYMBOLS, OUT, LENGTHS.astype("i8")), TypeError, "lengths holds int64"),
        (lambda: codec.decode_into(TABLE, OUT, LENGTHS, SYMBOLS, packed=True), kvraw.LayoutError, "data has 3 axes"),
        (lambda: codec.decode_into(TABLE, OUT[0, 0], LENGTHS, SYMBOLS), kvraw.LayoutError, "data has 1 axes"),
        (lambda: codec.compress(SYMBOLS), TypeError, "chunk holds uint8 of 1 bytes; pass dtype="),
        (lambda: codec.compress(np.ones((2, 3), "f4")), kvraw.LayoutError, "chunk has 2 axes, must have 3 or 4"),
        (
            lambda: codec.compress(np.ones((2, 3, 4), "f4"), 3),
            kvraw.BoundsError,
            r"bins holds 3 to 3, must .* \[4, 256\]",
        ),
        (lambda: codec.compress(np.ones((2, 3, 4), "f4"), [8, 9.5]), kvraw.BoundsError, "must hold integers"),
        (lambda: codec.compress(np.ones((2, 3, 4), "f4"), [8] * 3), kvraw.BoundsError, "bins has 3 numbers"),
        (lambda: codec.compress(np.ones((513, 1, 4), "f4")), kvraw.BoundsError, "chunk has 513 planes and layers"),
        (lambda: codec.compress(np.ones((2, 3, 8), "f4")[:, :, ::2]), kvraw.LayoutError, "channels must be dense"),
        (lambda: codec.compress(np.ones((2, 4, 3, 8), "f4")[:, :3]), kvraw.LayoutError, "planes must follow"),
    ],
)
def test_what_does_not_fit_is_named(call: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()  # type: ignore[operator]


def test_out_must_have_the_shape() -> None:
    encoded = codec.encode(SYMBOLS, 8)
    with pytest.raises(kvraw.LayoutError, match=r"out has shape \(2, 9, 4\), must be \(2, 9, 5\)"):
        codec.decode(encoded, SYMBOLS[..., :4])
    compressed = codec.compress(np.ones((2, 3, 4), np.float32))
    with pytest.raises(kvraw.LayoutError, match=r"out has shape \(2, 3, 5\), must be \(2, 3, 4\)"):
        codec.decompress(compressed, np.ones((2, 3, 5), np.float32))


def test_torch_tensors_are_taken() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    symbols = torch.randint(0, 32, (2, 50, 40), dtype=torch.int8)
    cdf, out = torch.zeros(2, 40, 33, dtype=torch.int16), torch.zeros(2, 40, 64, dtype=torch.uint8)
    lengths, back = torch.zeros(2, 40, dtype=torch.int32), torch.zeros(2, 50, 40, dtype=torch.uint8)
    codec.write_cdf(symbols, cdf)
    codec.encode_into(cdf, symbols, out, lengths)
    codec.decode_into(cdf, out, lengths, back)
    assert torch.equal(back, symbols.to(torch.uint8))
    chunk = torch.randn(2, 3, 20, 64, dtype=torch.bfloat16)
    restored = torch.zeros_like(chunk)
    codec.decompress(codec.compress(chunk), restored).wait()
    assert (restored - chunk).abs().max() < 0.2


def test_read_only_memory_is_not_written() -> None:
    chunk = np.random.default_rng(0).standard_normal((2, 3, 5, 8)).astype(np.float32)
    chunk.flags.writeable = False
    compressed = codec.compress(chunk)
    symbols = codec.decode(compressed.encoded)

    def held(*shape: int, dtype: type = np.uint8) -> np.ndarray:
        out = np.zeros(shape, dtype)
        out.flags.writeable = False
        return out

    cdf, lengths = np.zeros((6, 8, 33), np.uint16), np.zeros((6, 8), np.int32)
    codec.write_cdf(symbols, cdf)
    for name, out, call in (
        ("out", held(2, 3, 5, 8, dtype=np.float32), lambda out: codec.decompress(compressed, out)),
        ("out", held(6, 5, 8), lambda out: codec.decode(compressed.encoded, out)),
        ("cdf", held(6, 8, 33, dtype=np.uint16), lambda out: codec.write_cdf(symbols, out)),
        ("out", held(6, 8, 64), lambda out: codec.encode_into(cdf, symbols, out, lengths)),
        (
            "lengths",
            held(6, 8, dtype=np.int32),
            lambda o: codec.encode_into(cdf, symbols, np.zeros((6, 8, 64), np.uint8), o),
        ),
        ("symbols", held(6, 5, 8), lambda out: codec.decode_into(cdf, np.zeros((6, 8, 64), np.uint8), lengths, out)),
        ("symbols", held(6, 5, 8), lambda o: codec.quantize_into(chunk, 32, o, np.zeros((6, 5), np.float32))),
        ("maxima", held(6, 5, dtype=np.float32), lambda o: codec.quantize_into(chunk, 32, symbols.copy(), o)),
        ("chunk", chunk, lambda out: codec.dequantize_into(symbols, compressed.maxima, 32, out)),
    ):
        before = out.copy()
        with pytest.raises(kvraw.PlacementError, match=f"{name} is read-only memory"):
            call(out)
        np.testing.assert_array_equal(out, before)


def test_what_is_wrong_is_told_as_it_was_given() -> None:
    chunk = np.ones((2, 3, 4), np.float32)
    compressed = codec.compress(chunk)
    with pytest.raises(TypeError, match=r"bins is 32\.0, must be an integer"):
        codec.compress(chunk, bins=32.0)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"dtype is <class 'numpy\.float16'>, must be one of float32, float16, bfloat16"
    ):
        codec.compress(chunk, dtype=np.float16)  # type: ignore[arg-type]
    for out, error, said in (
        (np.zeros((2, 3, 4)), TypeError, "out holds float64 of 8 bytes"),
        (np.zeros((2, 12), np.float32), kvraw.LayoutError, "out has 2 axes"),
    ):
        with pytest.raises(error, match=said):
            codec.decompress(compressed, out)
