"""Messages and keys: what is a message, what a chunk is called, and that nothing else gets past the decoder."""

from __future__ import annotations

import contextlib
import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvraw.errors import BoundsError, LayoutError
from kvraw.multiprocess import CacheKey, EngineDrivenContextMetadata, MemoryLayoutDesc
from kvraw.multiprocess import messages as m
from tests.helpers.profile import examples
from tests.helpers.serving import METADATA, TOKENS, key

KEY = bytes(range(32))
REQUESTS = [
    m.Register(name="a", chunk_bytes=1, shared=True), m.Unregister(), m.Heartbeat(), m.PrepareStore(keys=[KEY]),
    m.PrepareRetrieve(keys=[KEY, KEY]), m.Lookup(keys=[], lock=True), m.Put(ticket=1, first=0),
    m.Get(ticket=1, first=0, count=2), m.Commit(ticket=1), m.Abort(ticket=1), m.Release(ticket=1), m.Stats(), m.Clear(),
]  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_requests_come_back_as_they_were(request_: m.Request) -> None:
    request_.id = 7
    assert m.decode_request(m.encode(request_)) == request_


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"v": 2}, "version"),
        ({"v": 0, "keys": 1}, "version"),
        ({"op": "drop_table"}, "malformed"),
        ({"op": None}, "malformed"),
        ({"keys": [KEY[:31]]}, "malformed"),
        ({"keys": [KEY + b"x"]}, "malformed"),
        ({"keys": "abc"}, "malformed"),
        ({"keys": [KEY] * (m.MOST_KEYS + 1)}, "malformed"),
        ({"more": 1}, "malformed"),
        ({"id": -1}, "malformed"),
        ({"id": 1 << 63}, "malformed"),
    ],
)
def test_what_is_no_message_is_refused_with_its_number(changes: dict[str, object], code: str) -> None:
    fields = {"op": "prepare_store", "v": m.VERSION, "id": 5, "keys": [KEY]} | changes
    with pytest.raises(m.MessageError) as error:
        m.decode_request(msgspec.msgpack.encode(fields))
    assert error.value.code == code
    assert error.value.id == (5 if "id" not in changes else 0)


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200), st.integers(0, 12), st.integers(0, 60), st.integers(0, 255))
def test_any_bytes_are_a_message_or_an_error(data: bytes, which: int, at: int, byte: int) -> None:
    damaged = bytearray(m.encode(REQUESTS[which]))
    damaged[at % len(damaged)] = byte
    for candidate in (data, bytes(damaged), bytes(damaged)[:at]):
        found = None
        with contextlib.suppress(m.MessageError):
            found = m.decode_request(candidate)
        assert found is None or isinstance(found, m.Request)


def test_deep_and_large_headers_are_refused() -> None:
    for data in (b"\x91" * 100_000, b"\x81\xa2op" * 50_000, b"\xc6\xff\xff\xff\xff", bytes(9 << 20)):
        with pytest.raises(m.MessageError):
            m.decode_request(data)


def test_a_chunk_is_called_by_all_that_it_depends_on() -> None:
    whole, longer = key(1, 3).hashes(METADATA), key(1, 5).hashes(METADATA)
    assert longer[:3] == whole
    assert key(1, 5, start=2).hashes(METADATA) == longer[2:]
    assert key(1, 3).hashes(METADATA) is not whole
    assert len(set(longer)) == 5
    tokens = list(key(1, 3).token_ids)
    same = CacheKey("model", 1, 0, np.array(tokens, np.int32), 0, len(tokens) - 1, request_id="other")
    assert same.hashes(METADATA) == whole[:2]  # an incomplete chunk at the end is none
    base = {"model_name": "model", "world_size": 1, "worker_id": 0, "token_ids": tokens, "start": 0, "end": 24}
    others = [
        {"model_name": "other"}, {"world_size": 2}, {"worker_id": None}, {"cache_salt": "x"},
        {"token_ids": [tokens[0] + 1, *tokens[1:]]},
    ]  # fmt: skip
    found = [CacheKey(**(base | one)).hashes(METADATA) for one in others]
    wide = MemoryLayoutDesc(METADATA.layout_desc.shapes, ("float16",))
    found.append(CacheKey(**base).hashes(dataclasses.replace(METADATA, layout_desc=wide)))
    found.append(CacheKey(**base).hashes(dataclasses.replace(METADATA, use_mla=True)))
    assert len({one for hashes in [whole, *found] for one in hashes}) == 3 * (len(found) + 1)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"start": -1}, "start is -1"),
        ({"end": 25}, "within the 24 token_ids"),
        ({"start": 16, "end": 8}, "in order"),
        ({"world_size": 0}, "worker_id is 0"),
        ({"worker_id": 1}, "worker_id is 1"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
        ({"start": 4}, "must be a multiple of chunk_tokens"),
        ({"token_ids": [1.5] * 24}, "token_ids is float64"),
        ({"token_ids": [[1]] * 24}, "2 dimensions"),
    ],
)
def test_bad_keys(fields: dict[str, object], says: str) -> None:
    base = {"model_name": "m", "world_size": 1, "worker_id": 0, "token_ids": list(range(24)), "start": 0, "end": 24}
    with pytest.raises(BoundsError, match=says):
        CacheKey(**(base | fields)).hashes(METADATA)


def test_bad_layouts() -> None:
    for shapes, dtypes in (((), ()), (((1,),), ("float16", "int8")), (((0, 1),), ("int8",)), (((2,),), ("complex7",))):
        with pytest.raises(LayoutError):
            MemoryLayoutDesc(shapes, dtypes)
    assert MemoryLayoutDesc(((2, 3), (5,)), ("torch.bfloat16", "uint8")).nbytes == 17
    with pytest.raises(BoundsError, match="multiple of block_size"):
        EngineDrivenContextMetadata(METADATA.layout_desc, 3, False, TOKENS)
