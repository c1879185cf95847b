"""The service alone, with a clock of the test's: tickets, limits, eviction, and what dead clients leave."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace

import pytest

import kvraw
from kvraw.errors import BoundsError
from kvraw.multiprocess import messages as m
from kvraw.multiprocess import tickets
from kvraw.multiprocess.service import Service
from kvraw.multiprocess.tickets import Limits
from kvraw.runtime.host.mapping import HostOptions
from tests.helpers.profile import examples
from tests.helpers.serving import Asker

SLOTS = 6
LIMITS = Limits(write=10.0, read=5.0, liveness=100.0, drain=1.0)


def name(at: int) -> bytes:
    return at.to_bytes(32, "big")


def names(*at: int) -> list[bytes]:
    return [name(one) for one in at]


class World:
    """A service on a pool with room for `SLOTS` chunks."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.now = 0.0
        self.pool = kvraw.HostPool((SLOTS + 1) * 4096, pin=False, options=HostOptions(kind="shared"))
        self.service = Service(self.pool, limits, clock=lambda: self.now)
        self.free = self.pool.info()["free"]

    def client(self, name: str, shared: bool = True) -> Asker:
        return Asker(self.service, name.encode(), 4096, shared)

    def at(self, seconds: float) -> None:
        self.now = seconds
        self.service.tick()

    def stored(self, client: Asker, *keys: int) -> list[int]:
        slots = client.ask(m.PrepareStore(keys=names(*keys)))
        for at, offset in zip(slots.indices, slots.offsets, strict=True):
            self.fill(offset, keys[at])
        assert slots.ticket == 0 or client.ask(m.Commit(ticket=slots.ticket)).count == len(slots.indices)
        return list(slots.indices)

    def fill(self, offset: int, value: int) -> None:
        self.pool.view(self.pool.address + offset, 4096)[:] = value & 255

    def holds(self, offset: int, value: int) -> bool:
        return bool((self.pool.view(self.pool.address + offset, 4096) == value & 255).all())


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.pool.close()


def test_store_and_retrieve(world: World) -> None:
    a, b = world.client("a"), world.client("b")
    assert world.stored(a, 1, 2, 3) == [0, 1, 2]
    assert world.stored(b, 1, 2, 3, 4) == [3]
    slots = b.ask(m.PrepareRetrieve(keys=names(1, 2, 3, 4)))
    assert [world.holds(offset, at) for at, offset in enumerate(slots.offsets, 1)] == [True] * 4
    assert b.ask(m.Commit(ticket=slots.ticket)).count == 4
    assert b.ask(m.PrepareRetrieve(keys=names(1, 2, 9, 4))).hits == 2
    assert b.ask(m.Lookup(keys=names(1, 9, 2), lock=False)).hits == 1
    stats = world.service.stats()
    assert (stats["objects"], stats["locked"], stats["tickets"], stats["clients"]) == (4, 0, 0, 2)
    assert b.ask(m.Clear()).count == 4
    assert world.pool.info()["free"] == world.free


def test_nothing_is_there_before_the_commit(world: World) -> None:
    a, b = world.client("a"), world.client("b")
    slots = a.ask(m.PrepareStore(keys=names(1)))
    other = b.ask(m.PrepareStore(keys=names(1)))
    assert (other.ticket, other.indices, other.offsets, other.present) == (0, [], [], 1)
    found = b.ask(m.Lookup(keys=names(1), lock=True))
    assert (found.hits, found.ticket) == (0, 0)
    assert type(b.ask(m.PrepareRetrieve(keys=names(1)))) is m.Found
    assert a.ask(m.Abort(ticket=slots.ticket)).count == 1
    assert world.stored(b, 1) == [0]


def test_eviction_takes_the_oldest_that_nobody_has_locked(world: World) -> None:
    a = world.client("a")
    world.stored(a, 1, 2, 3)
    world.stored(a, 4, 5, 6)
    locked = a.ask(m.PrepareRetrieve(keys=names(1)))
    looked = a.ask(m.Lookup(keys=names(4), lock=True))
    assert world.stored(a, 7, 8) == [0, 1]  # 3 and 2: the end of a prompt goes ahead of its beginning
    there = [a.ask(m.Lookup(keys=names(at), lock=False)).hits for at in range(1, 9)]
    assert there == [1, 0, 0, 1, 1, 1, 1, 1]
    slots = a.ask(m.PrepareStore(keys=names(*range(10, 20))))
    assert (len(slots.indices), slots.refused) == (4, 6)
    assert world.holds(locked.offsets[0], 1)
    assert a.ask(m.PrepareStore(keys=names(30))).refused == 1  # what is being written is not evicted either
    assert a.ask(m.Release(ticket=looked.ticket)).count == 1
    assert world.stored(a, 30) == [0]
    assert world.service.stats()["evicted"] == 7


def test_a_store_does_not_evict_its_own_beginning(world: World) -> None:
    a = world.client("a")
    world.stored(a, 1, 2, 3, 4)
    slots = a.ask(m.PrepareStore(keys=names(1, 2, 3, 4, 5, 6, 7, 8)))
    assert (slots.present, slots.indices, slots.refused) == (4, [4, 5], 2)


@pytest.mark.parametrize("client", ["a", "m"])
def test_an_empty_commit_of_messages_is_an_error_at_once(world: World, client: str) -> None:
    one = world.client(client, shared=client == "a")
    slots = one.ask(m.PrepareStore(keys=names(1, 2)))
    if client == "a":
        assert one.code(m.Put(ticket=slots.ticket, first=0), bytes(4096)) == "payload"
        assert one.code(m.Commit(ticket=slots.ticket)) == ""
        return
    assert slots.offsets == []  # no business of a client that cannot reach the pool
    assert one.ask(m.Put(ticket=slots.ticket, first=1), b"\2" * 4096).count == 1
    assert one.code(m.Commit(ticket=slots.ticket)) == "payload"
    assert one.code(m.Commit(ticket=slots.ticket)) == "ticket"  # it is over, and nothing was published
    assert one.ask(m.Lookup(keys=names(2), lock=False)).hits == 0
    assert world.pool.info()["free"] == world.free


def test_what_messages_carry_is_checked_against_the_slots(world: World) -> None:
    one = world.client("m", shared=False)
    ticket = one.ask(m.PrepareStore(keys=names(1, 2))).ticket
    for first, payload in [
        (0, ()), (0, (bytes(4095),)), (0, (bytes(4097),)), (0, (b"",)), (2, (bytes(4096),)),
        (1, (bytes(4096), bytes(4096))), (1 << 62, (bytes(4096),)), (0, (bytes(4096), bytes(1))),
    ]:  # fmt: skip
        assert one.code(m.Put(ticket=ticket, first=first), *payload) == "payload"
    assert one.ask(m.Put(ticket=ticket, first=0), b"\1" * 4096, b"\2" * 4096).count == 2
    assert one.ask(m.Commit(ticket=ticket)).count == 2
    assert one.code(m.Heartbeat(), b"frame") == "payload"
    ticket = one.ask(m.PrepareRetrieve(keys=names(1, 2))).ticket
    for first, count in [(0, 0), (0, 3), (2, 1), (1 << 62, 1), (0, 1 << 62)]:
        assert one.code(m.Get(ticket=ticket, first=first, count=count)) == "bounds"
    assert one.ask(m.Get(ticket=ticket, first=1, count=1)).count == 1
    assert [bytes(frame) for frame in one.frames] == [b"\2" * 4096]
    assert world.client("a").code(m.Get(ticket=ticket, first=0, count=1)) == "ticket"


def test_what_is_being_sent_stays_as_it_is(world: World) -> None:
    a, one = world.client("a"), world.client("m", shared=False)
    world.stored(a, 1)
    one.ask(m.Get(ticket=one.ask(m.PrepareRetrieve(keys=names(1))).ticket, first=0, count=1))
    sent, frames = SimpleNamespace(done=False), one.frames
    world.service.hold(sent)
    one.ask(m.Unregister())
    world.at(50.0)
    a.ask(m.Heartbeat())
    assert len(a.ask(m.PrepareStore(keys=names(*range(10, 20)))).indices) == SLOTS - 1
    assert bytes(frames[0]) == b"\1" * 4096
    sent.done = True
    world.at(51.0)
    assert world.service.stats()["locked"] == 0


def test_tickets_are_their_clients_own(world: World) -> None:
    a, b = world.client("a"), world.client("b")
    ticket = a.ask(m.PrepareStore(keys=names(1))).ticket
    for message in (m.Commit(ticket=ticket), m.Abort(ticket=ticket), m.Release(ticket=ticket)):
        assert b.code(message) == "ticket"
    assert a.code(m.PrepareStore(id=ticket, keys=names(2))) == "ticket"  # a number that is in use
    assert a.code(m.Release(ticket=ticket)) == "ticket"  # of another kind
    assert a.code(m.Commit(ticket=0)) == "ticket"
    assert a.code(m.Commit(ticket=ticket)) == ""


def test_without_registration_nothing(world: World) -> None:
    frames = world.service.handle(b"nobody", [m.encode(m.PrepareStore(id=3, keys=names(1)))])
    assert (m.decode_reply(frames[0]).code, m.decode_reply(frames[0]).id) == ("unregistered", 3)
    a = world.client("a")
    assert a.code(m.Register(name="a", chunk_bytes=4096, shared=True)) == ""
    assert a.code(m.Register(name="a", chunk_bytes=8192, shared=True)) == "bounds"
    frames = world.service.handle(b"x", [m.encode(m.Register(name="x", chunk_bytes=1 << 40, shared=True))])
    assert m.decode_reply(frames[0]).code == "bounds"
    assert m.decode_reply(world.service.handle(b"x", [])[0]).code == "malformed"


def test_a_retrieve_over_its_limit_says_so(world: World) -> None:
    a, b = world.client("a"), world.client("b")
    world.stored(a, 1, 2)
    read, looked = b.ask(m.PrepareRetrieve(keys=names(1))), b.ask(m.Lookup(keys=names(2), lock=True))
    world.at(4.9)
    assert world.service.stats()["locked"] == 2
    world.at(5.1)
    assert world.service.stats()["locked"] == 0
    assert world.stored(a, *range(10, 16)) == [0, 1, 2, 3, 4, 5]  # its chunk goes
    assert b.code(m.Commit(ticket=read.ticket)) == "expired"
    assert b.code(m.Release(ticket=looked.ticket)) == "expired"
    late = b.ask(m.PrepareRetrieve(keys=names(10)))
    world.now = 11.0  # over, and nobody had a look yet
    assert b.code(m.Commit(ticket=late.ticket)) == "expired"
    assert world.service.stats()["locked"] == world.service.stats()["tickets"] == 0


@pytest.mark.parametrize("word", ["commit", "abort", "unregister", "silence"])
def test_a_store_over_its_limit_is_never_published(world: World, word: str) -> None:
    a, b = world.client("a"), world.client("b")
    slots = a.ask(m.PrepareStore(keys=names(1)))
    world.at(10.1)
    a.ask(m.Heartbeat())
    other = b.ask(m.PrepareStore(keys=names(1, 2, 3, 4, 5, 6)))
    assert len(other.indices) == SLOTS - 1  # the key is free, the memory is not: `a` lives and may be writing there
    assert slots.offsets[0] not in other.offsets
    if word == "commit":
        assert a.code(m.Commit(ticket=slots.ticket)) == "expired"
    elif word == "abort":
        assert a.code(m.Abort(ticket=slots.ticket)) == ""
    elif word == "unregister":
        assert a.code(m.Unregister()) == ""
    else:
        world.now = 111.0
        b.ask(m.Heartbeat())
        world.at(111.0)
        assert a.code(m.Heartbeat()) == "unregistered"
        return
    assert b.ask(m.PrepareStore(keys=names(9))).offsets == slots.offsets


def test_the_dead_leave_nothing(world: World) -> None:
    a, b = world.client("a"), world.client("b")
    world.stored(b, 1)
    a.ask(m.PrepareStore(keys=names(2)))
    a.ask(m.PrepareRetrieve(keys=names(1)))
    a.ask(m.Lookup(keys=names(1), lock=True))
    world.now = 99.0
    b.ask(m.Heartbeat())
    world.at(101.0)
    stats = world.service.stats()
    assert (stats["clients"], stats["locked"], stats["tickets"], stats["writing"], stats["dead"]) == (1, 0, 0, 0, 1)
    assert a.code(m.Heartbeat()) == "unregistered"
    assert b.ask(m.Clear()).count == 1
    assert world.pool.info()["free"] == world.free


def test_while_it_drains_nothing_new_begins(world: World) -> None:
    a = world.client("a")
    world.stored(a, 1)
    store, read = a.ask(m.PrepareStore(keys=names(2))), a.ask(m.PrepareRetrieve(keys=names(1)))
    world.service.draining = True
    for message in (m.PrepareStore(keys=names(3)), m.PrepareRetrieve(keys=names(1)), m.Lookup(keys=[], lock=True)):
        assert a.code(message) == "draining"
    assert world.service.open_copies() == 2
    assert a.code(m.Commit(ticket=store.ticket)) == a.code(m.Commit(ticket=read.ticket)) == ""
    assert world.service.open_copies() == 0


def test_a_failure_of_the_server_is_an_error_reply(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a = world.client("a")
    monkeypatch.setattr(world.service.objects, "reserve", lambda key, nbytes: 1 // 0)
    assert a.code(m.PrepareStore(keys=names(1))) == "internal"


def test_a_client_cannot_hold_ever_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "_MOST_TICKETS", 3)
    monkeypatch.setattr(tickets, "_MOST_HELD", 5)
    a, b = world.client("a"), world.client("b")
    world.stored(a, 1, 2)
    held = [a.ask(m.Lookup(keys=names(1), lock=True)).ticket for _ in range(3)]
    assert a.code(m.Lookup(keys=names(1), lock=True)) == a.code(m.PrepareStore(keys=names(3))) == "bounds"
    assert a.ask(m.Lookup(keys=names(1), lock=False)).hits == 1
    assert b.ask(m.Lookup(keys=names(1), lock=True)).hits == 1
    a.ask(m.Release(ticket=held[0]))
    assert a.code(m.PrepareRetrieve(keys=names(1, 2, 1, 2))) == "bounds"
    assert a.code(m.PrepareRetrieve(keys=names(1, 2))) == ""


def test_limits_are_checked() -> None:
    for limits in (Limits(write=0.0), Limits(read=-1.0), Limits(liveness=float("inf")), Limits(drain=float("nan"))):
        with pytest.raises(BoundsError, match="limits: "):
            limits.require()


@pytest.mark.parametrize("seed", range(examples(6)))
def test_random_clients_never_see_each_others_bytes(seed: int) -> None:
    """Stores, retrieves, deaths and time in any order: a chunk that is read holds its key's bytes to its commit."""
    r, world = Random(seed), World()
    clients = {c: world.client(c) for c in "abc"}
    writing: dict[tuple[str, int], list[tuple[int, int]]] = {}  # (client, ticket): (key, offset)
    reading: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for _ in range(600):
        c = r.choice("abc")
        one, act = clients[c], r.random()
        keys = r.sample(range(1, 16), r.randint(1, 4))
        mine = [t for who, t in (*writing, *reading) if who == c]
        if act < 0.35:
            slots = one.ask(m.PrepareStore(keys=names(*keys)))
            if slots.ticket:
                writing[c, slots.ticket] = [(keys[i], o) for i, o in zip(slots.indices, slots.offsets, strict=True)]
        elif act < 0.6:
            slots = one.ask(m.PrepareRetrieve(keys=names(*keys[:2])))
            if type(slots) is m.Slots:
                reading[c, slots.ticket] = list(zip(keys, slots.offsets, strict=False))
        elif act < 0.9 and mine:
            ticket = r.choice(mine)
            for key, offset in writing.get((c, ticket), ()):
                world.fill(offset, key)
            right = all(world.holds(offset, key) for key, offset in reading.get((c, ticket), ()))
            commit = (c, ticket) in reading or r.random() < 0.8
            code = one.code(m.Commit(ticket=ticket) if commit else m.Abort(ticket=ticket))
            assert code in ("", "expired")
            assert code or right
            writing.pop((c, ticket), None)
            reading.pop((c, ticket), None)
        elif act < 0.96:
            world.now += r.random() * 3
            for other in clients.values():
                other.ask(m.Heartbeat())
            world.service.tick()
        elif act < 0.98:
            one.ask(m.Unregister())
            for table in (writing, reading):
                for entry in [entry for entry in table if entry[0] == c]:
                    del table[entry]
            one.ask(m.Register(name=c, chunk_bytes=4096, shared=True))
        offsets = [offset for slots in writing.values() for _, offset in slots]
        assert len(set(offsets)) == len(offsets)
        assert 0 not in offsets
    for one in clients.values():
        one.ask(m.Unregister())
    world.service.objects.clear()
    assert world.pool.info()["free"] == world.free
    assert world.service.objects.nbytes == 0
    world.pool.close()
