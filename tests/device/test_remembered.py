"""Memory that was asked about before: what is remembered of it holds while the driver's numbers are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.copying.addresses import remembered, resolve
from kvraw.copying.bound_copy import BoundCopy
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import known_memory
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.world import World

PAGE = 4096
EACH = 2  # pages of a chunk's registration


class Apart:
    """Chunks that are plain arrays, neighbours, each registered on its own by somebody else."""

    def __init__(self, device: int, count: int) -> None:
        self.world, self.device = World(device), device
        self.memory = np.zeros((count * EACH + 1) * PAGE, np.uint8)
        begin = -int(self.memory.ctypes.data) % PAGE
        size = self.world.chunks[0].nbytes
        assert PAGE < size <= EACH * PAGE
        # Each ends where its registration does, and begins inside it.
        starts = [begin + (k + 1) * EACH * PAGE - size for k in range(count)]
        self.chunks = [self.memory[at : at + size] for at in starts]
        self.pages = [int(self.memory.ctypes.data) + begin + k * EACH * PAGE for k in range(count)]
        self.pinned: set[int] = set()
        for at in range(count):
            self.pin(at)

    def pin(self, at: int, pages: int = EACH) -> None:
        with DeviceScope(self.device):
            driver().host_register(self.pages[at], pages * PAGE)
        self.pinned.add(at)

    def unpin(self, at: int) -> None:
        self.world.stream.synchronize()
        with DeviceScope(self.device):
            driver().host_unregister(self.pages[at])
        self.pinned.remove(at)

    def store(self, at: list[int], ids: np.ndarray, engine: str) -> None:
        w = self.world
        kvraw.store(w.cache, [self.chunks[k] for k in at], ids, stream=w.stream, engine=engine).wait()

    def check(self, at: list[int], ids: np.ndarray) -> None:
        for k, chunk in enumerate(at):
            want = self.world.paged[:, :, ids[4 * k : 4 * k + 4]].transpose(1, 0, 2, 3, 4, 5)
            np.testing.assert_array_equal(self.chunks[chunk].reshape(want.shape), want)

    def close(self) -> None:
        for at in list(self.pinned):
            self.unpin(at)
        self.world.close()


@pytest.fixture
def apart(device: int) -> Iterator[Apart]:
    made = Apart(device, 4)
    yield made
    made.close()


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that were not by a program that is known for their kind."""
    seen: list[str] = []
    enqueue = BoundCopy.enqueue

    def noted(*args: Any) -> Any:
        seen.append("general")
        return enqueue(*args)

    monkeypatch.setattr(BoundCopy, "enqueue", noted)
    return seen


@pytest.mark.parametrize("engine", ["auto", "kernel", "staged", "copy"])
def test_chunks_pinned_one_by_one(apart: Apart, general: list[str], engine: str) -> None:
    rng = np.random.default_rng(5)
    for k in range(10):
        ids, at = rng.permutation(40)[:16].astype(np.int64), rng.permutation(4).tolist()
        if k > 6 and engine in ("kernel", "staged"):
            at = [0, 1, 2, 3]
        apart.memory[:] = 0xA5
        del general[:]
        apart.store(at, ids, engine)
        apart.check(at, ids)
    assert not general or engine in ("auto", "copy")
    ids = np.arange(16, dtype=np.int64)
    w = apart.world
    kvraw.load(w.cache, apart.chunks, ids, stream=w.stream, engine=engine).wait()
    now = w.now()[:, :, ids].reshape(3, 2, 4, 4, 4, 2, -1)
    for k in range(4):
        np.testing.assert_array_equal(now[:, :, k].transpose(1, 0, 2, 3, 4, 5).ravel(), apart.chunks[k])


@pytest.mark.parametrize("engine", ["auto", "kernel", "staged"])
@pytest.mark.parametrize("gone", [0, 2])
def test_one_of_several_is_unpinned(apart: Apart, engine: str, gone: int) -> None:
    ids, at = np.arange(16, dtype=np.int64)[::-1].copy(), [0, 1, 2, 3]
    for _ in range(4):
        apart.store(at, ids, engine)
    apart.unpin(gone)
    apart.memory[:] = 0xA5
    with pytest.raises(kvraw.PlacementError, match=rf"chunks\[{gone}\] at 0x\w+ is pageable host memory"):
        apart.store(at, ids, engine)
    assert (apart.memory == 0xA5).all()
    apart.pin(gone, 1)  # less of it than before: the chunk goes over the end
    with pytest.raises(kvraw.PlacementError, match=rf"chunks\[{gone}\] at"):
        apart.store(at, ids, engine)
    assert (apart.memory == 0xA5).all()
    apart.unpin(gone)
    apart.pin(gone)
    for _ in range(4):
        apart.memory[:] = 0xA5
        apart.store(at, ids, engine)
        apart.check(at, ids)


@pytest.mark.parametrize("engine", ["auto", "kernel", "staged", "copy"])
def test_a_chunk_over_two_registrations(apart: Apart, engine: str) -> None:
    ids, at = np.arange(3, 19, dtype=np.int64), [0, 1, 2, 3]
    for turn in range(3):
        if turn:
            apart.unpin(1)
        if turn == 1:  # the second chunk in two registrations, side by side
            d = driver()
            with DeviceScope(apart.device):
                for page in range(EACH):
                    d.host_register(apart.pages[1] + page * PAGE, PAGE)
            table = resolve(np.array([c.ctypes.data for c in apart.chunks], np.uint64), apart.chunks[0].nbytes)
            if table.pageable:  # a driver may map the two at different distances
                pytest.skip("neighbours that were registered apart are no neighbours on this device")
            assert apart.pages[1] + PAGE in table.edges
        elif turn == 2:
            apart.pin(1)
        for _ in range(4):
            apart.memory[:] = 0xA5
            apart.store(at, ids, engine)
            apart.check(at, ids)
        if turn == 1:
            apart.world.stream.synchronize()
            with DeviceScope(apart.device):
                for page in range(EACH):
                    driver().host_unregister(apart.pages[1] + page * PAGE)
            apart.pin(1)


def test_two_threads_of_one_plan_cut_at_ends_of_their_own(fake: FakeDriver) -> None:
    """What a plan keeps of a call's ends of registrations, another thread may replace at any time."""
    apart = Apart(0, 3)
    w, ids = apart.world, np.arange(4, dtype=np.int64)
    plan = kvraw.TransferPlan(w.cache, "store", chunk_tokens=16, engine="copy")
    begin = apart.pages[1] - 1000 - int(apart.memory.ctypes.data)  # a registration ends within a run
    chunk = apart.memory[begin : begin + plan.chunk_bytes]

    class Shared(BoundCopy):
        kept: Any

        @property
        def _cuts(self) -> Any:
            return self.kept

        @_cuts.setter
        def _cuts(self, made: Any) -> None:
            self.kept = made[0], (1,), np.array([1], np.uint64)  # here the other thread goes on

    assert plan._gpu is not None
    kept = vars(plan._gpu).pop("_cuts")
    plan._gpu.__class__ = Shared
    plan._gpu.kept = kept  # type: ignore[attr-defined]
    plan([chunk], ids, stream=w.stream).wait()
    want = w.paged[:, :, ids].transpose(1, 0, 2, 3, 4, 5)
    np.testing.assert_array_equal(chunk.reshape(want.shape), want)
    apart.close()


def test_memory_that_is_registered_again_is_asked_about(fake: FakeDriver) -> None:
    apart = Apart(0, 3)
    places, size = [c.ctypes.data for c in apart.chunks], apart.chunks[0].nbytes
    known = known_memory(fake)  # type: ignore[arg-type]
    with DeviceScope(0):
        table = resolve(np.array(places, np.uint64), size)
        assert table.seen.tolist() == places
        for _ in range(3):  # in Python, then by a program
            kept = remembered(known, places, size)
            assert kept is not None
            assert kept.holds(fake)  # type: ignore[arg-type]
        apart.unpin(1)
        assert not kept.holds(fake)  # type: ignore[arg-type]
        assert resolve(np.array(places, np.uint64), size).pageable
        fake.distances[apart.pages[1]] = 1 << 40  # where the device sees it is another address now
        apart.pin(1)
        assert not kept.holds(fake)  # type: ignore[arg-type]
        for _ in range(3):
            found = resolve(np.array(places, np.uint64), size)
            assert found.seen.tolist() == [places[0], places[1] + (1 << 40), places[2]]
            assert not found.pageable
        before = dict(fake.calls)
        resolve(np.array(places, np.uint64), size)
        asked = {name: n - before.get(name, 0) for name, n in fake.calls.items() if n != before.get(name, 0)}
        assert asked == {"pointer_number": 3}
    apart.close()


def test_device_memory_that_takes_the_place_of_other(device: int) -> None:
    with DeviceScope(device):
        one = kvraw.DeviceBuffer(1 << 16, device)
        place, known = one.address, known_memory(driver())
        assert resolve(np.array([place], np.uint64), 1 << 16).devices == {device}
        kept = remembered(known, [place], 1 << 16)
        assert kept is not None
        one.close()
        assert not kept.holds(driver())
        with kvraw.DeviceBuffer(1 << 10, device) as other:  # often at the same address
            found = resolve(np.array([other.address], np.uint64), 1 << 12)
            assert found.over is None or found.over.stop >= other.address + (1 << 10)
            assert resolve(np.array([other.address], np.uint64), 1 << 10).devices == {device}
            assert not kept.holds(driver())


def test_more_allocations_than_are_kept(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking them up ends: one takes another's place all the time."""
    monkeypatch.setattr("kvraw.runtime.memory._MOST_KNOWN", 16)
    with DeviceScope(0):
        apart = [fake.mem_alloc(256) for _ in range(40)]
        places = np.random.default_rng(0).permutation(np.array(apart * 3, np.uint64)) + np.uint64(56)
        for _ in range(2):
            before = fake.calls["pointer_info"]
            assert resolve(places, 200).devices == {0}
            assert fake.calls["pointer_info"] - before < 3 * len(places)
        assert resolve(places, 201).over is not None
        few = places[places < places[0] + np.uint64(1)][:70]  # fewer than are kept
        assert resolve(few, 200).devices == {0}
        for address in apart:
            fake.mem_free(address)


def test_tables_and_checks_are_bounded(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvraw.copying.addresses._MOST_TABLES", 8)
    monkeypatch.setattr("kvraw.runtime.memory._MOST_PROGRAMS", 4)
    apart = Apart(0, 4)
    known = known_memory(fake)  # type: ignore[arg-type]
    rng = np.random.default_rng(2)
    with DeviceScope(0):
        for _ in range(60):
            at = rng.permutation(4)[: rng.integers(1, 5)]
            places = np.array([apart.chunks[k].ctypes.data for k in at], np.uint64)
            assert resolve(places, apart.chunks[0].nbytes).seen.tolist() == places.tolist()
            assert len(known.tables) <= 8
            assert len(known._programs) <= 4
    apart.close()
