"""Messages between workers and the cache server: a header by msgspec, then frames of raw bytes.

Nothing on the wire is executable. A header names its version; every request has exactly one reply, which carries its
number: what was asked for, or an `Error`. Counts and lengths are bounded by the types themselves, so that what does not
fit never becomes an object.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

__all__ = [
    "CODES",
    "HASH_BYTES",
    "MOST_KEYS",
    "VERSION",
    "Abort",
    "Clear",
    "Commit",
    "Done",
    "Error",
    "Found",
    "Get",
    "Heartbeat",
    "Lookup",
    "MessageError",
    "PrepareRetrieve",
    "PrepareStore",
    "Put",
    "Register",
    "Registered",
    "Release",
    "Reply",
    "Request",
    "Slots",
    "Stats",
    "StatsReply",
    "Unregister",
    "decode_reply",
    "decode_request",
    "encode",
]

VERSION = 1
HASH_BYTES = 32
MOST_KEYS = 1 << 16  # of one request
MOST_HEADER = 8 << 20  # bytes of a header: `MOST_KEYS` keys with room to spare

# What may be wrong with a request, for programs.
CODES = (
    "malformed",  # the header is none, or its fields are out of their bounds
    "version",  # another version of the protocol
    "unregistered",  # the server does not know the client: it was restarted, or the client was silent for too long
    "bounds",  # a size, a count or a number of frames does not fit
    "ticket",  # no such ticket of this client: committed before, or never given
    "expired",  # the ticket's time limit was over: the bytes are not published, or must not be used
    "payload",  # frames are missing or too many, or one has another size than its slot
    "draining",  # the server takes nothing new
    "internal",  # the server failed; its log says more
)

Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, le=(1 << 62))]
Key = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Keys = Annotated[list[Key], Meta(max_length=MOST_KEYS)]


class MessageError(ValueError):
    """A header that is no message of this version.

    Attributes
    ----------
    code : str
        "malformed" or "version".
    id : int
        The request's number where it could be read, else 0.
    """

    def __init__(self, code: str, text: str, id: int = 0) -> None:
        self.code, self.id = code, id
        super().__init__(text)


class Request(msgspec.Struct, tag_field="op", kw_only=True, forbid_unknown_fields=True):
    """Base of requests: the version, and a number that the reply repeats."""

    v: int = VERSION
    id: Id = 0


class Register(Request, tag="register"):
    """A worker with chunks of one size. `shared` says that it copies into and out of the pool by itself."""

    name: Annotated[str, Meta(max_length=256)]
    chunk_bytes: Annotated[int, Meta(gt=0, le=(1 << 62))]
    shared: bool


class Unregister(Request, tag="unregister"):
    """The worker ends; what it did not commit is dropped."""


class Heartbeat(Request, tag="heartbeat"):
    """The worker lives."""


class PrepareStore(Request, tag="prepare_store"):
    """Reserve slots for those keys that are not there."""

    keys: Keys


class PrepareRetrieve(Request, tag="prepare_retrieve"):
    """Lock all of these keys for reading, or none."""

    keys: Keys


class Lookup(Request, tag="lookup"):
    """Count the leading keys that are there, and lock them for a later retrieve where that is asked."""

    keys: Keys
    lock: bool


class Put(Request, tag="put"):
    """Of a client by message: chunks for slots of a store from number `first` on, each a frame behind the header."""

    ticket: Id
    first: Count


class Get(Request, tag="get"):
    """Of a client by message: send the chunks of a retrieve from number `first` on, each a frame behind the reply."""

    ticket: Id
    first: Count
    count: Count


class Commit(Request, tag="commit"):
    """End a ticket: of a store, all its chunks are there; of a retrieve, they are no longer needed."""

    ticket: Id


class Abort(Request, tag="abort"):
    """End the ticket of a store without publishing anything."""

    ticket: Id


class Release(Request, tag="release"):
    """End the ticket of a lookup."""

    ticket: Id


class Stats(Request, tag="stats"):
    """Counts of the server."""


class Clear(Request, tag="clear"):
    """Drop every object that nobody has locked."""


class Reply(msgspec.Struct, tag_field="op", kw_only=True):
    """Base of replies."""

    v: int = VERSION
    id: Id = 0


class Error(Reply, tag="error"):
    """The request was not carried out."""

    code: str
    text: str


class Done(Reply, tag="done"):
    """The request was carried out; `count` is how many objects it concerned."""

    count: Count = 0


class Registered(Reply, tag="registered"):
    """The pool, what it begins with (to tell it from another of its name), and limits in seconds."""

    pool: str
    pool_bytes: Count
    mark: bytes
    heartbeat: float
    write_limit: float
    read_limit: float


class Slots(Reply, tag="slots"):
    """Slots of a ticket: `offsets` into the pool (none to a client by message), of the keys at `indices`.

    Ticket 0: there is nothing to copy. `present` counts keys that are there or being written, `refused` those for which
    there was no room.
    """

    ticket: Id
    indices: list[Count]
    offsets: list[Count]
    present: Count = 0
    refused: Count = 0


class Found(Reply, tag="found"):
    """So many leading keys are there; ticket 0: none is locked.

    `loading` more are coming from the disk: ask again.
    """

    hits: Count
    loading: Count = 0
    ticket: Id = 0


class StatsReply(Reply, tag="stats"):
    """Counts by name."""

    values: dict[str, float]


class _Envelope(msgspec.Struct):
    v: int = 0
    id: Id = 0


_REQUESTS = (
    Register
    | Unregister
    | Heartbeat
    | PrepareStore
    | PrepareRetrieve
    | Lookup
    | Put
    | Get
    | Commit
    | Abort
    | Release
    | Stats
    | Clear
)
_REPLIES = Error | Done | Registered | Slots | Found | StatsReply
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_REQUESTS)
_replies: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_REPLIES)
_envelopes = msgspec.msgpack.Decoder(_Envelope)


def encode(message: Request | Reply) -> bytes:
    """Bytes of a header."""
    return _encoder.encode(message)


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview) -> Any:
    if len(data) > MOST_HEADER:
        raise MessageError("malformed", f"the header has {len(data)} bytes, must have at most {MOST_HEADER}")
    try:
        message = decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        try:
            envelope = _envelopes.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise MessageError("malformed", f"no message: {error}") from None
        if envelope.v != VERSION:
            raise _version(envelope.v, envelope.id) from None
        raise MessageError("malformed", str(error), envelope.id) from None
    if message.v != VERSION:
        raise _version(message.v, message.id)
    return message


def _version(v: int, id: int) -> MessageError:
    return MessageError("version", f"version {v} of the protocol, must be {VERSION}", id)


def decode_request(data: bytes | memoryview) -> Any:
    """A request, one of the classes of this module.

    Raises
    ------
    MessageError
        It is none.
    """
    return _decode(_requests, data)


def decode_reply(data: bytes | memoryview) -> Any:
    """A reply, one of the classes of this module.

    Raises
    ------
    MessageError
        It is none.
    """
    return _decode(_replies, data)
