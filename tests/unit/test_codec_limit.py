"""Stored data asks for no more memory than a limit, whatever its header says."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvraw
from kvraw import codec
from kvraw.codec import limit as limits
from kvraw.codec.encoded import seal
from tests.helpers.profile import examples

SIZE = st.one_of(st.integers(0, 5), st.integers(0, 2**31), st.sampled_from([2**29 - 1, 2**31 - 1, 2**63, 2**64 - 1]))


def encoded_bytes(layers: int, tokens: int, channels: int, alphabet: int = 1) -> bytes:
    """Streams without a byte each, which decode to zeros."""
    streams = layers * channels
    cdf = np.tile(np.arange(alphabet + 1), (streams, 1)).astype("<u2")
    shape = struct.pack("<QQQQQ", layers, tokens, channels, alphabet, 0)
    return seal(b"KVRE", shape + cdf.tobytes() + bytes(4 * streams))


def compressed_bytes(dtype: bytes, tokens: int, channels: int) -> bytes:
    head = struct.pack("<10sB5xQQQQ", dtype, 4, 1, 1, tokens, channels)
    scales = np.array([4], "<u2").tobytes() + np.ones(tokens, "<f4").tobytes()
    return seal(b"KVRC", head + scales + encoded_bytes(1, tokens, channels))


@pytest.mark.parametrize("shape", [(1, 2**29 - 1, 1), (1, 2**29 - 1, 4000), (1, 2**28 + 1, 1)])
def test_a_header_that_asks_for_much(shape: tuple[int, int, int]) -> None:
    encoded = codec.Encoded.from_bytes(encoded_bytes(*shape))
    assert encoded.decoded_nbytes == np.prod(shape, dtype=object)
    with pytest.raises(kvraw.BoundsError, match=rf"decodes to {encoded.decoded_nbytes}, limit is {256 << 20}; raise"):
        codec.decode(encoded)


@pytest.mark.parametrize("dtype", [b"float32", b"float16", b"bfloat16"])
def test_a_chunk_that_asks_for_much(dtype: bytes) -> None:
    compressed = codec.Compressed.from_bytes(compressed_bytes(dtype, 30000, 15000))
    assert compressed.decoded_nbytes == 30000 * 15000 * (4 if dtype == b"float32" else 2)
    with pytest.raises(kvraw.BoundsError, match=rf"compressed has .* decodes to {compressed.decoded_nbytes}, limit is"):
        codec.decompress(compressed)


def test_the_limit_is_the_callers() -> None:
    encoded = codec.Encoded.from_bytes(encoded_bytes(1, 1000, 3))
    assert not codec.decode(encoded, limit=encoded.decoded_nbytes).any()
    assert not codec.decode(encoded, limit=np.int64(3000)).any()  # type: ignore[arg-type]
    with pytest.raises(kvraw.BoundsError, match="decodes to 3000, limit is 2999"):
        codec.decode(encoded, limit=2999)
    with pytest.raises(TypeError, match="limit is '1G', must be an integer"):
        codec.decode(encoded, limit="1G")  # type: ignore[arg-type]
    out = np.ones((1, 1000, 3), np.uint8)
    codec.decode(encoded, out, limit=1)  # the caller's own memory needs no limit
    assert not out.any()
    compressed = codec.compress(np.ones((2, 10, 4), np.float32))
    assert codec.decompress(compressed, limit=320).shape == (2, 10, 4)
    with pytest.raises(kvraw.BoundsError, match="decodes to 320, limit is 319"):
        codec.decompress(compressed, limit=319)


def test_what_was_compressed_here_is_below_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of one value, the best that compression can do, in the shapes that caches have."""
    monkeypatch.setattr(limits, "DECODE_LIMIT", 0)
    for value in (0.0, 1.0):
        compressed = codec.compress(np.full((2, 2, 2048, 512), value, np.float16))
        assert (codec.decompress(compressed) == value).all()


def test_more_than_there_is() -> None:
    encoded = codec.Encoded.from_bytes(encoded_bytes(1, 2**29 - 1, 300_000))
    with pytest.raises(kvraw.HostMemoryError, match=r"encoded decodes to shape \(1, 536870911, 300000\) of uint8"):
        codec.decode(encoded, limit=1 << 62)


@settings(max_examples=examples(300), deadline=None)
@given(layers=SIZE, tokens=SIZE, channels=SIZE, alphabet=SIZE, size=SIZE, chunk=st.booleans(), tail=st.binary())
def test_any_header(
    layers: int, tokens: int, channels: int, alphabet: int, size: int, chunk: bool, tail: bytes
) -> None:
    """An error of kvraw's that is no lack of memory, or something within the limit."""
    if max(layers * channels, 1) * (alphabet + 1) < 1000:
        stored = encoded_bytes(layers, tokens, channels, alphabet)
    else:
        stored = seal(b"KVRE", struct.pack("<QQQQQ", layers, tokens, channels, alphabet, size) + tail)
    kind, back = (codec.Compressed, codec.decompress) if chunk else (codec.Encoded, codec.decode)
    if chunk:
        rows = layers * tokens
        scales = np.full(layers, 4, "<u2").tobytes() + bytes(4 * rows) if max(rows, layers) < 1000 else tail
        stored = seal(b"KVRC", struct.pack("<10sB5xQQQQ", b"float32", 4, 1, layers, tokens, channels) + scales + stored)
    try:
        made: Any = back(kind.from_bytes(stored), limit=1 << 20)  # type: ignore[operator,attr-defined]
    except (kvraw.LayoutError, kvraw.BoundsError):
        return
    assert made.nbytes <= 1 << 20


@pytest.mark.parametrize("axis", range(3))
def test_what_lies_on_itself_is_not_written(axis: int) -> None:
    shape = (2, 8, 4)
    encoded = codec.encode(np.zeros(shape, np.uint8), 4)
    compressed = codec.compress(np.zeros(shape, np.float32))
    for array, back in ((np.zeros(shape, np.uint8), codec.decode), (np.zeros(shape, np.float32), codec.decompress)):
        strides = [0 if k == axis else s for k, s in enumerate(array.strides)]
        out = np.lib.stride_tricks.as_strided(array, shape, strides)
        with pytest.raises(kvraw.LayoutError, match=r"out has strides .*(none may be 0|must be dense)"):
            back(encoded if back is codec.decode else compressed, out)  # type: ignore[arg-type]


def test_what_is_empty_lies_on_nothing() -> None:
    for shape in ((0, 8, 4), (2, 0, 4), (2, 8, 0)):
        assert codec.decode(codec.encode(np.zeros(shape, np.uint8), 4), np.zeros(shape, np.uint8)).done()
        assert codec.decompress(codec.compress(np.zeros(shape, np.float32)), np.zeros(shape, np.float32)).done()
