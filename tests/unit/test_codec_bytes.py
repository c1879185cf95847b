"""Stored streams: what was written is read, and nothing else is."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvraw
from kvraw import codec
from kvraw.codec.encoded import seal, unseal
from tests.helpers.profile import examples

RNG = np.random.default_rng(2)
ENCODED = codec.encode(RNG.integers(0, 16, (2, 12, 7)).astype(np.uint8), 16)
COMPRESSED = codec.compress(RNG.standard_normal((2, 3, 8, 10)).astype(np.float16), [32, 16, 8, 4, 16, 255])
STORED = {codec.Encoded: ENCODED.to_bytes(), codec.Compressed: COMPRESSED.to_bytes()}
KIND = pytest.mark.parametrize("kind", STORED, ids=lambda k: k.__name__)


@KIND
def test_what_was_written_is_read(kind: type) -> None:
    for form in (bytes, bytearray, memoryview):
        again = kind.from_bytes(form(STORED[kind]))  # type: ignore[attr-defined]
        assert again.to_bytes() == STORED[kind]
        assert again.nbytes == len(STORED[kind])


@KIND
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_every_flipped_bit_and_every_cut_is_seen(kind: type, data: st.DataObject) -> None:
    stored = bytearray(STORED[kind])
    at = data.draw(st.integers(0, len(stored) - 1))
    if data.draw(st.booleans()):
        stored[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        stored = stored[:at]
    with pytest.raises(kvraw.LayoutError, match="data "):
        kind.from_bytes(stored)  # type: ignore[attr-defined]


@KIND
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_content_that_contradicts_itself_is_refused(kind: type, data: st.DataObject) -> None:
    """Altered and sealed anew: an error or an object that decodes, never a crash."""
    magic = STORED[kind][:4]
    payload = bytearray(unseal(magic, STORED[kind]))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, min(len(payload) - 1, 80)))] = data.draw(st.integers(0, 255))
    try:
        again = kind.from_bytes(seal(magic, bytes(payload)))  # type: ignore[attr-defined]
        encoded = getattr(again, "encoded", again)
        assert (codec.decode(encoded, limit=1 << 23) < encoded.alphabet).all()
    except (kvraw.LayoutError, kvraw.BoundsError):
        pass


def test_other_formats_and_versions_are_named() -> None:
    stored = STORED[codec.Encoded]
    with pytest.raises(kvraw.LayoutError, match=r"begins with b'KVRE', must begin with b'KVRC'"):
        codec.Compressed.from_bytes(stored)
    with pytest.raises(kvraw.LayoutError, match="format version 9, must have 1"):
        codec.Encoded.from_bytes(stored[:4] + b"\x09\x00" + stored[6:])
    with pytest.raises(kvraw.LayoutError, match="data has 3 bytes, must have at least"):
        codec.Encoded.from_bytes(b"abc")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"ends": ENCODED.ends[:1]}, "ends has shape"),
        ({"ends": ENCODED.ends[::-1]}, "ends must rise"),
        ({"data": ENCODED.data[:-1]}, "ends must rise from 0 to"),
        ({"tokens": -1}, "tokens is -1"),
        ({"cdf": np.zeros((2, 7, 300), np.uint16)}, "cdf has 300 entries"),
    ],
)
def test_parts_that_do_not_fit_together(parts: dict[str, object], said: str) -> None:
    with pytest.raises((kvraw.LayoutError, kvraw.BoundsError), match=said):
        dataclasses.replace(ENCODED, **parts)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"shape": (2, 3, 8, 11)}, "shape is"),
        ({"bins": COMPRESSED.bins[:2]}, "bins has 2 numbers"),
        ({"maxima": COMPRESSED.maxima[:, :2]}, "maxima has shape"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_chunk_parts_that_do_not_fit_together(parts: dict[str, object], said: str) -> None:
    with pytest.raises((kvraw.LayoutError, kvraw.BoundsError), match=said):
        dataclasses.replace(COMPRESSED, **parts)


@pytest.mark.parametrize("sizes", [(0, 0, 2**63, 1), (2**63, 5, 0, 4), (0, 0, 0, 2**63), (0, 2**63, 0, 4)])
def test_sizes_that_no_array_has(sizes: tuple[int, ...]) -> None:
    encoded = seal(b"KVRE", struct.pack("<QQQQQ", *sizes, 0))
    with pytest.raises(kvraw.BoundsError, match=rf"{2**63}.* in its header, each must be below {2**31}"):
        codec.Encoded.from_bytes(encoded)
    payload = (
        struct.pack("<10sB5xQQQQ", b"float16", 4, *sizes) + codec.encode(np.zeros((0, 0, 0), np.uint8), 4).to_bytes()
    )
    with pytest.raises(kvraw.BoundsError, match=rf"{2**63}.* in its header, each must be below {2**31}"):
        codec.Compressed.from_bytes(seal(b"KVRC", payload))
