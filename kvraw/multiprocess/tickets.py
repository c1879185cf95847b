"""What clients hold, and for how long.

A ticket has the number of the request that made it, and belongs to the client that asked. It is a store (slots being
written), a retrieve or a lookup (objects locked), and has a time limit:

- a retrieve or lookup that is over its limit is unlocked, and its commit says so: what was read must not be used;
- a store that is over its limit is never published, but its memory stays set aside as long as the client lives, for it
  may still be writing there. The client's next word on the ticket, or its death, gives the memory back.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from kvraw.errors import BoundsError
from kvraw.multiprocess.objects import ObjectTable, StoredObject

__all__ = ["Client", "Limits", "RefusedError", "Ticket", "Tickets", "unlock"]

Kind = Literal["store", "retrieve", "lookup"]
_MOST_TICKETS = 4096
_MOST_HELD = 1 << 18  # keys of a client's open tickets


class Limits(NamedTuple):
    """Time limits in seconds.

    Attributes
    ----------
    write, read : float
        From prepare to commit; `read` also of locks that a lookup takes.
    liveness : float
        Silence after which a client counts as dead; it gives a sign of life four times as often.
    drain : float
        That `CacheServer.stop` waits for tickets that are open.
    """

    write: float = 60.0
    read: float = 60.0
    liveness: float = 10.0
    drain: float = 10.0

    def require(self) -> None:
        """Raise `BoundsError` where one is not positive, but `drain`, which may be 0."""
        for name, value in self._asdict().items():
            if not (value > 0 or (value == 0 and name == "drain")) or value == float("inf"):
                raise BoundsError(f"limits: {name} is {value}, must be a positive number of seconds")


class Ticket:
    """What a client may still commit."""

    __slots__ = ("client", "deadline", "expired", "id", "kind", "missing", "objects")

    def __init__(self, client: Client, id: int, kind: Kind, objects: list[StoredObject], deadline: float) -> None:
        self.client, self.id, self.kind, self.objects, self.deadline = client, id, kind, objects, deadline
        self.expired = False
        # Slots that only the server can fill, and that are not filled.
        self.missing = set(range(len(objects))) if kind == "store" and not client.shared else set()


class Client:
    """Who is registered."""

    __slots__ = ("chunk_bytes", "held", "identity", "last", "name", "shared", "tickets")

    def __init__(self, identity: bytes, name: str, chunk_bytes: int, shared: bool, now: float) -> None:
        self.identity, self.name, self.chunk_bytes, self.shared = identity, name, chunk_bytes, shared
        self.last = now
        self.tickets: dict[int, Ticket] = {}
        self.held = 0  # objects of them


class RefusedError(Exception):
    """A request that is not carried out; the code and the text of its reply."""

    def __init__(self, code: str, text: str) -> None:
        self.code, self.text = code, text


def unlock(objects: Sequence[StoredObject]) -> None:
    """Let objects be evicted, as far as nobody else has them locked."""
    for one in objects:
        one.locks -= 1


def is_open(ticket: Ticket) -> bool:
    """Whether a ticket is open."""
    return ticket.client.tickets.get(ticket.id) is ticket


class Tickets:
    """The tickets of all clients. One thread at a time may call it."""

    def __init__(self, objects: ObjectTable, limits: Limits, clock: Callable[[], float], counts: Counter[str]) -> None:
        self._objects, self._limits, self._clock, self._counts = objects, limits, clock, counts
        self._deadlines: list[tuple[float, int, Ticket]] = []  # a heap; the number keeps tickets from being compared
        self._serial = itertools.count()
        self._count = 0  # of those that are open

    @staticmethod
    def require_new(client: Client, id: int, keys: int) -> None:
        """Refuse a ticket of that number, or of so many keys, where the client cannot have it."""
        if not id or id in client.tickets:
            raise RefusedError("ticket", f"request {id} cannot be a ticket: it is 0, or one that is open")
        if len(client.tickets) >= _MOST_TICKETS or client.held + keys > _MOST_HELD:
            raise RefusedError(
                "bounds",
                f"{len(client.tickets)} tickets with {client.held} keys are open, there can be {_MOST_TICKETS} with "
                f"{_MOST_HELD}",
            )

    def open(self, client: Client, id: int, kind: Kind, objects: list[StoredObject], limit: float) -> int:
        """The number of a new ticket; 0 where it would hold nothing."""
        if not objects:
            return 0
        ticket = client.tickets[id] = Ticket(client, id, kind, objects, self._clock() + limit)
        client.held += len(objects)
        if kind != "store":
            for one in objects:
                one.locks += 1
        self._count += 1
        if len(self._deadlines) > 1000 + 2 * self._count:  # nearly all of them were closed long before their limit
            self._deadlines = [one for one in self._deadlines if is_open(one[2])]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (ticket.deadline, next(self._serial), ticket))
        return id

    @staticmethod
    def find(client: Client, id: int, *kinds: Kind) -> Ticket:
        """An open ticket of a client."""
        ticket = client.tickets.get(id)
        if ticket is None or ticket.kind not in kinds:
            raise RefusedError("ticket", f"ticket {id} is no {' or '.join(kinds)} of this client that is open")
        return ticket

    def require_in_time(self, ticket: Ticket) -> None:
        """Refuse a ticket that is over its limit."""
        if ticket.expired or ticket.deadline < self._clock():
            raise RefusedError("expired", f"ticket {ticket.id} is over its time limit")

    def close(self, ticket: Ticket) -> None:
        """End a ticket; what it was to write is dropped."""
        self.remove(ticket)
        if ticket.kind == "store":
            for one in ticket.objects:
                self._objects.drop(one)
        elif not ticket.expired:
            unlock(ticket.objects)

    def _expire(self, ticket: Ticket) -> None:
        ticket.expired = True
        self._counts["expired"] += 1
        if ticket.kind == "store":
            for one in ticket.objects:
                self._objects.withdraw(one)
        else:
            unlock(ticket.objects)

    def remove(self, ticket: Ticket) -> None:
        """It is no longer open."""
        del ticket.client.tickets[ticket.id]
        ticket.client.held -= len(ticket.objects)
        self._count -= 1

    def expire(self, now: float) -> float:
        """End what is over its limit; seconds until the next one may be, at most 1."""
        while self._deadlines:
            deadline, _, ticket = self._deadlines[0]
            current = is_open(ticket)
            if current and deadline > now:
                return min(deadline - now, 1.0)
            heapq.heappop(self._deadlines)
            if current:
                self._expire(ticket)
        return 1.0
