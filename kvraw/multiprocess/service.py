"""What the server answers to each request; sockets and threads are not its concern.

A client is known by its connection's identity, and what it holds by tickets (`kvraw/multiprocess/tickets.py`). One that
was silent for `liveness` seconds counts as dead, and holds nothing any more.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from kvraw.errors import BoundsError
from kvraw.multiprocess import messages as m
from kvraw.multiprocess.disk import DiskTier
from kvraw.multiprocess.objects import ObjectTable, StoredObject
from kvraw.multiprocess.spill import Spill
from kvraw.multiprocess.tickets import Client, Limits, RefusedError, Tickets, unlock
from kvraw.runtime.host.pool import HostPool

__all__ = ["Service"]

_log = logging.getLogger("kvraw")
MARK_BYTES = 16
_MOST_CLIENTS = 4096
_FEW = 200  # characters of an error's text


class Sent(Protocol):
    """Tells whether a message has left."""

    @property
    def done(self) -> bool:
        """True once nobody reads its frames any more."""


_NOTHING = np.empty(0, np.uint8)
Frames = list[Any]  # a header, and what has the buffer protocol


class Service:
    """The cache behind a pool. One thread at a time may call it.

    Attributes
    ----------
    draining : bool
        Nothing new is taken.
    counts : Counter
        Of what happened, by name.
    requests : Counter
        By operation and outcome.
    """

    def __init__(
        self,
        pool: HostPool,
        limits: Limits | None = None,
        disk: DiskTier | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = Limits() if limits is None else limits
        self.limits.require()
        self._pool, self._clock = pool, clock
        (first,) = pool.chunks(1, MARK_BYTES)
        self._mark = np.random.default_rng().bytes(MARK_BYTES)  # by which a client knows the pool again
        first.numpy()[:] = np.frombuffer(self._mark, np.uint8)
        if first.address != pool.address:
            raise BoundsError("the pool was used before, must be new")
        self._first = first
        self.objects = ObjectTable(pool)
        self.counts: Counter[str] = Counter()
        self._clients: dict[bytes, Client] = {}
        self._tickets = Tickets(self.objects, self.limits, clock, self.counts)
        self.lent: list[StoredObject] = []  # whose memory the last reply consists of
        self._held: list[tuple[Sent, list[StoredObject]]] = []
        self._disk = None if disk is None else Spill(disk, pool, self.objects, self.counts)
        self.draining = False
        self.requests: Counter[tuple[str, str]] = Counter()
        self._handlers: dict[type, tuple[str, Callable[[Client, Any, Sequence[Any]], Frames]]] = {
            m.Unregister: ("unregister", self._unregister),
            m.Heartbeat: ("heartbeat", self._heartbeat),
            m.PrepareStore: ("prepare_store", self._prepare_store),
            m.PrepareRetrieve: ("prepare_retrieve", self._prepare_retrieve),
            m.Lookup: ("lookup", self._lookup),
            m.Put: ("put", self._put),
            m.Get: ("get", self._get),
            m.Commit: ("commit", self._commit),
            m.Abort: ("abort", self._abort),
            m.Release: ("release", self._release),
            m.Clear: ("clear", self._clear),
        }

    # one request

    def handle(self, identity: bytes, frames: Sequence[Any]) -> Frames:
        """The reply to a message: always one, whatever the message is.

        Parameters
        ----------
        identity : bytes
            Whose message it is.
        frames : sequence
            The header and the frames behind it, each with the buffer protocol.

        Returns
        -------
        list
            Frames of the reply. Frames behind its header are memory of the pool: whoever sends them calls `hold`.
        """
        name, id, outcome = "malformed", 0, "ok"
        try:
            if not frames:
                raise RefusedError("malformed", "the message has no header")
            request = m.decode_request(memoryview(frames[0]))
            id = request.id
            return self._answer(identity, request, frames[1:])
        except m.MessageError as error:
            outcome, text, id = error.code, str(error), error.id
        except RefusedError as error:
            outcome, text = error.code, error.text
        except Exception as error:
            _log.exception("a request failed")
            outcome, text = "internal", f"{type(error).__name__}: {error}"
        self.requests[name, outcome] += 1
        self.counts["errors"] += 1
        return [m.encode(m.Error(id=id, code=outcome, text=text[:_FEW]))]

    def _answer(self, identity: bytes, request: Any, payload: Sequence[Any]) -> Frames:
        if payload and type(request) is not m.Put:
            raise RefusedError("payload", f"{len(payload)} frames behind the header, must be none")
        if type(request) is m.Register:
            reply, name = self._register(identity, request), "register"
        elif type(request) is m.Stats:
            reply, name = [m.encode(m.StatsReply(id=request.id, values=self.stats()))], "stats"
        else:
            client = self._clients.get(identity)
            if client is None:
                raise RefusedError(
                    "unregistered", "register first: the server does not know this client, or not any more"
                )
            client.last = self._clock()
            name, handler = self._handlers[type(request)]
            reply = handler(client, request, payload)
        self.requests[name, "ok"] += 1
        return reply

    def _register(self, identity: bytes, request: m.Register) -> Frames:
        if self.draining:
            raise RefusedError("draining", "the server ends")
        if request.chunk_bytes > self._pool.nbytes - HostPool.ALIGNMENT:
            raise RefusedError("bounds", f"chunk_bytes is {request.chunk_bytes}, the pool has {self._pool.nbytes}")
        old = self._clients.get(identity)
        if old is not None:  # its copies may be under way
            if (old.chunk_bytes, old.shared) != (request.chunk_bytes, request.shared):
                raise RefusedError("bounds", f"registered with chunk_bytes {old.chunk_bytes}, shared {old.shared}")
            old.last = self._clock()
        elif len(self._clients) >= _MOST_CLIENTS:
            raise RefusedError("bounds", f"{len(self._clients)} clients are registered, the most there can be")
        if old is None:
            self._clients[identity] = Client(identity, request.name, request.chunk_bytes, request.shared, self._clock())
        return [
            m.encode(
                m.Registered(
                    id=request.id,
                    pool=self._pool.name or "",
                    pool_bytes=self._pool.nbytes,
                    mark=self._mark,
                    heartbeat=self.limits.liveness / 4,
                    write_limit=self.limits.write,
                    read_limit=self.limits.read,
                )
            )
        ]

    def _unregister(self, client: Client, request: m.Unregister, payload: Sequence[Any]) -> Frames:
        self._forget(client)
        return _done(request)

    def _heartbeat(self, client: Client, request: m.Heartbeat, payload: Sequence[Any]) -> Frames:
        return _done(request)

    def _prepare_store(self, client: Client, request: m.PrepareStore, payload: Sequence[Any]) -> Frames:
        self._require_new(client, request)
        objects, table = [], self.objects
        # Neither do those that are there go for the sake of the others, nor is what follows a gap of any use.
        held = [one for key in request.keys if (one := table.find(key, client.chunk_bytes)) is not None]
        for one in held:
            one.locks += 1
        table.touch(request.keys)
        indices, present, refused = [], 0, 0
        for at, key in enumerate(request.keys):
            if table.known(key):
                present += 1
            elif refused or (made := table.reserve(key, client.chunk_bytes)) is None:
                refused += 1
            else:
                objects.append(made)
                indices.append(at)
        for one in held:
            one.locks -= 1
        self.counts["refused"] += refused
        ticket = self._tickets.open(client, request.id, "store", objects, self.limits.write)
        offsets = self._offsets(objects) if client.shared else []
        slots = m.Slots(
            id=request.id, ticket=ticket, indices=indices, offsets=offsets, present=present, refused=refused
        )
        return [m.encode(slots)]

    def _prepare_retrieve(self, client: Client, request: m.PrepareRetrieve, payload: Sequence[Any]) -> Frames:
        self._require_new(client, request)
        objects, loading = self._leading(client, request.keys)
        if loading:
            return [m.encode(m.Found(id=request.id, hits=len(objects), loading=loading))]
        self.counts["hits"] += len(objects)
        self.counts["misses"] += len(request.keys) - len(objects)
        if len(objects) < len(request.keys):
            return [m.encode(m.Found(id=request.id, hits=len(objects)))]
        self.objects.touch(request.keys)
        ticket = self._tickets.open(client, request.id, "retrieve", objects, self.limits.read)
        offsets = self._offsets(objects) if client.shared else []
        return [m.encode(m.Slots(id=request.id, ticket=ticket, indices=list(range(len(objects))), offsets=offsets))]

    def _lookup(self, client: Client, request: m.Lookup, payload: Sequence[Any]) -> Frames:
        if request.lock:
            self._require_new(client, request)
        if not request.lock:
            hits = sum(1 for _ in itertools.takewhile(lambda key: self._has(client, key), request.keys))
            return [m.encode(m.Found(id=request.id, hits=hits))]
        objects, loading = self._leading(client, request.keys)
        ticket = 0
        if not loading:
            self.objects.touch([one.key for one in objects])
            ticket = self._tickets.open(client, request.id, "lookup", objects, self.limits.read)
        return [m.encode(m.Found(id=request.id, hits=len(objects), ticket=ticket, loading=loading))]

    def _commit(self, client: Client, request: m.Commit, payload: Sequence[Any]) -> Frames:
        ticket = self._tickets.find(client, request.ticket, "store", "retrieve")
        if ticket.kind == "retrieve":
            self._tickets.close(ticket)
            self._tickets.require_in_time(ticket)
            return _done(request, len(ticket.objects))
        try:
            self._tickets.require_in_time(ticket)
            if ticket.missing:
                raise RefusedError("payload", f"{len(ticket.missing)} of {len(ticket.objects)} chunks were not put")
        except RefusedError:
            self._tickets.close(ticket)
            raise
        self._tickets.remove(ticket)
        self.objects.publish(ticket.objects)
        if self._disk is not None:
            self._disk.keep(ticket.objects)
        self.counts["stored"] += len(ticket.objects)
        self.counts["stored_bytes"] += sum(one.chunk.nbytes for one in ticket.objects)
        return _done(request, len(ticket.objects))

    def _put(self, client: Client, request: m.Put, payload: Sequence[Any]) -> Frames:
        ticket = self._tickets.find(client, request.ticket, "store")
        self._tickets.require_in_time(ticket)
        objects = ticket.objects[request.first : request.first + len(payload)]
        if client.shared or not payload or len(objects) != len(payload):
            raise RefusedError(
                "payload",
                f"{len(payload)} frames for the slots from {request.first} on, of which there are "
                f"{0 if client.shared else len(ticket.objects)}",
            )
        sources = [np.frombuffer(frame, np.uint8) if len(frame) else _NOTHING for frame in payload]
        for at, (one, source) in enumerate(zip(objects, sources, strict=True)):
            if source.nbytes != one.chunk.nbytes:
                raise RefusedError("payload", f"frame {at} has {source.nbytes} bytes, its slot {one.chunk.nbytes}")
        for at, (one, source) in enumerate(zip(objects, sources, strict=True), request.first):
            one.chunk.numpy()[:] = source
            ticket.missing.discard(at)
        return _done(request, len(objects))

    def _get(self, client: Client, request: m.Get, payload: Sequence[Any]) -> Frames:
        ticket = self._tickets.find(client, request.ticket, "retrieve")
        self._tickets.require_in_time(ticket)
        objects = ticket.objects[request.first : request.first + request.count]
        if client.shared or not objects or len(objects) != request.count:
            raise RefusedError(
                "bounds",
                f"{request.count} chunks from {request.first} on, of which there are "
                f"{0 if client.shared else len(ticket.objects)} to send",
            )
        self.lent = objects
        return [*_done(request, len(objects)), *(one.chunk.numpy() for one in objects)]

    def _abort(self, client: Client, request: m.Abort, payload: Sequence[Any]) -> Frames:
        ticket = self._tickets.find(client, request.ticket, "store", "retrieve", "lookup")
        self._tickets.close(ticket)
        return _done(request, len(ticket.objects))

    def _release(self, client: Client, request: m.Release, payload: Sequence[Any]) -> Frames:
        ticket = self._tickets.find(client, request.ticket, "lookup")
        self._tickets.close(ticket)
        self._tickets.require_in_time(ticket)
        return _done(request, len(ticket.objects))

    def _clear(self, client: Client, request: m.Clear, payload: Sequence[Any]) -> Frames:
        return _done(request, self.objects.clear())

    # objects

    def _require_new(self, client: Client, request: m.PrepareStore | m.PrepareRetrieve | m.Lookup) -> None:
        if self.draining:
            raise RefusedError("draining", "the server ends")
        self._tickets.require_new(client, request.id, len(request.keys))

    def _offsets(self, objects: Sequence[StoredObject]) -> list[int]:
        base = self._pool.address
        return [one.chunk.address - base for one in objects]

    def _has(self, client: Client, key: bytes) -> bool:
        nbytes = client.chunk_bytes
        return self.objects.find(key, nbytes) is not None or (self._disk is not None and self._disk.holds(key, nbytes))

    def _leading(self, client: Client, keys: Sequence[bytes]) -> tuple[list[StoredObject], int]:
        """Objects of the leading keys, and how many that follow are coming from the disk."""
        found = []
        for key in keys:
            one = self.objects.find(key, client.chunk_bytes)
            if one is None:
                break
            found.append(one)
        if self._disk is None or len(found) == len(keys):
            return found, 0
        for one in found:
            one.locks += 1  # they are not to go for what follows them
        loading = self._disk.load(keys[len(found) :], client.chunk_bytes, len(found))
        unlock(found)
        return found, loading

    def _forget(self, client: Client) -> None:
        for ticket in list(client.tickets.values()):
            self._tickets.close(ticket)
        del self._clients[client.identity]

    def hold(self, sent: Sent) -> None:
        """Keep what the last reply consists of until it was sent, whatever becomes of its ticket."""
        lent, self.lent = self.lent, []
        for one in lent:
            one.locks += 1
        self._held.append((sent, lent))

    # time

    def tick(self) -> float:
        """End what is over its limit; seconds until something else may be."""
        now = self._clock()
        held, self._held = self._held, []
        for entry in held:
            if entry[0].done:
                unlock(entry[1])
            else:
                self._held.append(entry)
        soonest = self._tickets.expire(now)
        dead = [client for client in self._clients.values() if now - client.last > self.limits.liveness]
        for client in dead:
            _log.warning("client %r was silent for %.1f s: dropped", client.name, now - client.last)
            self._forget(client)
            self.counts["dead"] += 1
        disk = 1.0 if self._disk is None else self._disk.advance()
        return min(disk, max(0.01, min(soonest, self.limits.liveness / 4, 1.0)))

    def finish(self, until: float) -> None:
        """Write what was stored to the disk, up to that moment of the monotonic clock; nothing is asked any more."""
        if self._disk is not None:
            self._disk.finish(until)

    def open_copies(self) -> int:
        """Stores and retrieves that may still be committed."""
        tickets = [ticket for client in self._clients.values() for ticket in client.tickets.values()]
        return sum(1 for ticket in tickets if ticket.kind != "lookup" and not ticket.expired)

    def stats(self) -> dict[str, float]:
        """Counts and gauges by name; another thread may ask."""
        disk = {} if self._disk is None else self._disk.stats()
        names = ("hits", "misses", "stored", "stored_bytes", "refused", "expired", "dead", "errors", "dropped_replies")
        return {
            **{name: float(self.counts[name]) for name in names},
            "evicted": float(self.objects.evicted),
            "objects": float(len(self.objects)),
            "writing": float(self.objects.writing),
            "object_bytes": float(self.objects.nbytes),
            "pool_bytes": float(self._pool.nbytes),
            "locked": float(self.objects.locked()),
            "tickets": float(sum(len(c.tickets) for c in list(self._clients.values()))),
            "clients": float(len(self._clients)),
            **disk,
        }


def _done(request: m.Request, count: int = 0) -> Frames:
    return [m.encode(m.Done(id=request.id, count=count))]
