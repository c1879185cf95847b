"""Chunks against a model: 100,000 steps of allocation, transfers and frees; and the arena alone."""

from __future__ import annotations

import itertools
import random
import threading
import time

import numpy as np
import pytest

import kvraw
from kvraw.runtime.host.suballoc import Arena, Size

PAGE = 4096
PAGES = 256


class Transfer:
    """What a pool needs of an operation under way: when it is over, it has written to its chunks."""

    def __init__(self, chunks: list[kvraw.HostChunk], stamp: int) -> None:
        self.addresses = {c.address for c in chunks}
        self.views = [c.numpy() for c in chunks]
        self.stamp, self.finished, self.queue, self.uses = stamp, False, None, None

    def finish(self) -> None:
        for view in self.views:
            write(view, self.stamp)
        self.finished = True


def write(view: np.ndarray, stamp: int) -> None:
    view[:8].view(np.int64)[0] = view[-8:].view(np.int64)[0] = stamp


def holds(view: np.ndarray, stamp: int) -> bool:
    return bool(view[:8].view(np.int64)[0] == view[-8:].view(np.int64)[0] == stamp)


class Model:
    """The pool under test and what must be true of it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = kvraw.HostPool(PAGES * PAGE, pin=False)
        self.live: dict[int, tuple[kvraw.HostChunk, int]] = {}  # by address: chunk, and the stamp it will hold
        self.taken: set[int] = set()  # pages that may not be handed out
        self.waiting: list[tuple[kvraw.HostChunk, list[Transfer]]] = []
        self.under_way: list[Transfer] = []
        self.stamp = itertools.count(1)
        self.seen = dict.fromkeys(("given", "refused", "freed under a transfer", "finished", "double"), 0)

    def pages_of(self, chunk: kvraw.HostChunk) -> range:
        first = (chunk.address - self.pool.address) // PAGE
        return range(first, first + -(-chunk.nbytes // PAGE))

    def settle(self) -> None:
        still = []
        for chunk, transfers in self.waiting:
            if all(t.finished for t in transfers):
                self.taken.difference_update(self.pages_of(chunk))
            else:
                still.append((chunk, transfers))
        self.waiting = still

    def allocate(self) -> None:
        count, nbytes = self.rng.randrange(1, 4), self.rng.randrange(16, 6 * PAGE)
        self.settle()
        try:
            chunks = self.pool.chunks(count, nbytes)
        except kvraw.HostMemoryError:
            self.seen["refused"] += 1
            if count == 1:
                runs = "".join("x" if page in self.taken else "." for page in range(PAGES)).split("x")
                assert max(map(len, runs)) * PAGE < nbytes, "refused what would fit"
            return
        self.seen["given"] += 1
        for chunk in chunks:
            pages = self.pages_of(chunk)
            assert chunk.address % PAGE == 0
            assert pages.start >= 0 <= pages.stop <= PAGES
            assert self.taken.isdisjoint(pages), "handed out while in use"
            self.taken.update(pages)
            stamp = next(self.stamp)
            write(chunk.numpy(), stamp)
            self.live[chunk.address] = chunk, stamp

    def free(self) -> None:
        if not self.live:
            return
        address = self.rng.choice(list(self.live))
        chunk, stamp = self.live.pop(address)
        if any(address in t.addresses for t in self.under_way):
            self.seen["freed under a transfer"] += 1
        else:
            assert holds(chunk.numpy(), stamp), "a byte was lost"
        self.waiting.append((chunk, list(self.under_way)))
        chunk.free()
        if self.rng.random() < 0.05:
            self.seen["double"] += 1
            with pytest.raises(ValueError, match="freed twice"):
                chunk.free()

    def transfer(self) -> None:
        if not self.live or len(self.under_way) > 6:
            self.finish()
            return
        stamp = next(self.stamp)
        chosen = self.rng.sample(list(self.live), min(len(self.live), 3))
        one = Transfer([self.live[a][0] for a in chosen], stamp)
        self.pool.mark_used(one)  # type: ignore[arg-type]
        self.under_way.append(one)
        for address in chosen:
            self.live[address] = self.live[address][0], stamp

    def finish(self) -> None:
        if not self.under_way:
            return
        one = self.rng.choice(self.under_way)
        # What touches the same chunk is over in order, as by streams; all else in any order.
        if any(t.stamp < one.stamp and t.addresses & one.addresses for t in self.under_way):
            return
        self.under_way.remove(one)
        one.finish()
        self.seen["finished"] += 1


def test_100000_random_steps_against_a_model() -> None:
    model = Model(11)
    steps = [model.allocate] * 9 + [model.free] * 12 + [model.transfer] * 4 + [model.finish] * 5
    for _ in range(100_000):
        model.rng.choice(steps)()
    for one in sorted(model.under_way, key=lambda t: t.stamp):
        one.finish()
    assert all(holds(chunk.numpy(), stamp) for chunk, stamp in model.live.values())
    model.pool.free(chunk for chunk, _ in model.live.values())
    info = model.pool.info()
    assert (info["free"], info["largest_hole"], info["chunks"], info["waiting"]) == (PAGES * PAGE, PAGES * PAGE, 0, 0)
    assert info["allocations"] == info["frees"]
    assert min(model.seen.values()) > 500, model.seen
    model.pool.close()


def test_the_arena_fits_best_and_joins_what_is_given_back() -> None:
    arena = Arena()

    def take(size: int) -> int | None:
        found = arena.grant(1, Size(size))
        return None if found is None else found[0]

    def give(offset: int) -> None:
        grant = arena.grant_of(offset)
        assert grant is not None
        arena.release(offset, grant)

    arena.extend(0, 100)
    a, b, c, d = (take(n) for n in (10, 30, 10, 50))
    assert (a, b, c, d, arena.free, arena.largest_hole) == (0, 10, 40, 50, 0, 0)
    assert take(1) is None
    give(10)
    give(0)
    give(50)
    assert take(35) == 0  # the smaller of two holes
    give(0)
    assert arena.grant_of(0) is None
    give(40)
    assert (arena.largest_hole, len(arena), arena.used) == (100, 0, 0)
    arena.extend(100, 28)
    assert arena.largest_hole == 128


def test_freed_memory_is_not_reused_before_its_transfer_is_over() -> None:
    with kvraw.HostPool(4 * PAGE, pin=False) as pool:
        (chunk,) = pool.chunks(1, 4 * PAGE)
        one = Transfer([chunk], 1)
        pool.mark_used(one)  # type: ignore[arg-type]
        chunk.free()
        assert pool.info()["waiting"] == 4 * PAGE
        with pytest.raises(MemoryError, match="16384 bytes were freed but 1 transfers may still use them"):
            pool.chunks(1, 1)
        with pytest.raises(MemoryError, match="freed but"):
            pool.chunks(1, 1, timeout=0.01)
        timer = threading.Timer(0.05, one.finish)
        timer.start()
        begin = time.monotonic()
        assert len(pool.chunks(4, PAGE, timeout=30)) == 4
        assert time.monotonic() - begin < 20
        timer.join()


def test_a_chunk_that_was_freed_gives_no_view_and_cannot_free_its_successor() -> None:
    with kvraw.HostPool(PAGE, pin=False) as pool:
        (old,) = pool.chunks(1, PAGE)
        old.free()
        (new,) = pool.chunks(1, PAGE)
        assert new.address == old.address
        with pytest.raises(kvraw.ClosedError, match="was given back"):
            old.numpy()
        with pytest.raises(ValueError, match="freed twice"):
            old.free()
        assert pool.info()["chunks"] == 1


def test_a_limit() -> None:
    with kvraw.HostPool(8 * PAGE, pin=False, limit=3 * PAGE) as pool:
        chunks = pool.chunks(2, PAGE)
        with pytest.raises(MemoryError, match="the limit is 12288 bytes, of which 8192 are handed out"):
            pool.chunks(2, PAGE)
        pool.limit = None
        pool.chunks(6, PAGE)
        pool.limit = 0
        pool.free(chunks)
        with pytest.raises(MemoryError, match="the limit is 0 bytes"):
            pool.chunks(1, 1)
        info = pool.info()
        assert (info["failures"], info["peak"], info["allocations"], info["frees"]) == (2, 8 * PAGE, 8, 2)
    with pytest.raises(kvraw.BoundsError, match="limit is -1"):
        kvraw.HostPool(PAGE, limit=-1)


def test_threads_share_a_pool() -> None:
    pool = kvraw.HostPool(64 * PAGE, pin=False)
    errors: list[BaseException] = []

    def work(mark: int) -> None:
        try:
            for _ in range(400):
                chunks = pool.chunks(3, PAGE, timeout=10)
                for c in chunks:
                    c.numpy()[:] = mark
                assert all((c.numpy() == mark).all() for c in chunks)
                pool.free(chunks)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert pool.info()["largest_hole"] == pool.nbytes
    pool.close()
