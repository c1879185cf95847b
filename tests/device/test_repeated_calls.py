"""A plan's later calls ask nothing twice: the same bytes, errors and lifetimes as the first, in few functions."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.copying import chooser
from kvraw.copying.planner import Profile
from kvraw.copying.repeat import RepeatedCalls
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.program import Program
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.world import World

ENGINES = ["kernel", "staged"]


@pytest.fixture(autouse=True)
def _count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which calls were repeated ones."""
    call = RepeatedCalls.__call__

    def counted(self: RepeatedCalls, *args: Any) -> Any:
        done = call(self, *args)
        REPEATED.append(done is not None)
        return done

    REPEATED.clear()
    monkeypatch.setattr(RepeatedCalls, "__call__", counted)


REPEATED: list[bool] = []


def repeated() -> bool:
    """Whether the last call was one."""
    return REPEATED[-1]


@pytest.fixture
def world(device: int) -> Any:
    w = World(device)
    yield w
    w.close()


def settle(world: World, engine: str) -> np.ndarray:
    """Calls until later ones are repeated; returns the ids of so many blocks as fill all chunks."""
    ids = np.arange(8, dtype=np.int64)
    for _ in range(8):
        for call in (kvraw.store, kvraw.load):
            call(world.cache, world.chunks[:2], ids, stream=world.stream, engine=engine).wait()
            if call is kvraw.load and repeated() and REPEATED[-2]:
                return ids
    raise AssertionError("no call was repeated")


@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_of_later_calls(world: World, engine: str) -> None:
    settle(world, engine)
    rng = np.random.default_rng(3)
    pairs = [world.chunks[:2], world.chunks[1::-1], world.chunks[1:3]]
    for k in range(9):
        ids, chunks = rng.permutation(40)[:8].astype(np.int64), list(pairs[k % 3])
        for chunk in world.chunks:
            chunk.numpy()[:] = 0xA5
        kvraw.store(world.cache, chunks, ids, stream=world.stream, engine=engine).wait()
        assert repeated()
        for at, chunk in enumerate(world.chunks):
            found = world.chunk(at)
            if chunk in chunks:
                place = chunks.index(chunk)
                want = world.paged[:, :, ids[4 * place : 4 * place + 4]].transpose(1, 0, 2, 3, 4, 5)
                np.testing.assert_array_equal(found, want)
            else:
                assert (chunk.numpy() == 0xA5).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", ["store", "load"])
def test_bad_ids_of_later_calls(world: World, engine: str, way: str) -> None:
    ids = settle(world, engine)
    call = getattr(kvraw, way)
    before = world.chunks[0].numpy().copy()
    for at, bad in ((0, -1), (7, 40), (3, 2**62)):
        wrong = ids.copy()
        wrong[at] = bad
        with pytest.raises(kvraw.BoundsError, match=rf"block_ids\[{at}\] is {bad}, must be in \[0, 40\)"):
            call(world.cache, world.chunks[:2], wrong, stream=world.stream, engine=engine)
    twice = ids.copy()
    twice[5] = twice[2]
    if way == "load":
        with pytest.raises(kvraw.BoundsError, match="block_ids has 2 more than once"):
            call(world.cache, world.chunks[:2], twice, stream=world.stream, engine=engine)
    else:
        with pytest.raises(kvraw.BoundsError, match=r"chunks\[1\] and chunks\[0\] both begin"):
            call(world.cache, [world.chunks[0]] * 2, ids, stream=world.stream, engine=engine)
    world.stream.synchronize()
    np.testing.assert_array_equal(world.chunks[0].numpy(), before)
    call(world.cache, world.chunks[:2], ids, stream=world.stream, engine=engine).wait()
    assert repeated()


@pytest.mark.parametrize("engine", ENGINES)
def test_chunks_that_are_gone(world: World, engine: str) -> None:
    ids = settle(world, engine)
    world.pool.free([world.chunks[1]])
    with pytest.raises(kvraw.ClosedError):
        kvraw.store(world.cache, world.chunks[:2], ids, stream=world.stream, engine=engine)
    (other,) = world.pool.chunks(1, world.chunks[0].nbytes)
    kvraw.store(world.cache, [world.chunks[0], other], ids, stream=world.stream, engine=engine).wait()
    world.pool.close()
    with pytest.raises(kvraw.ClosedError):
        kvraw.store(world.cache, [world.chunks[0], other], ids, stream=world.stream, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_chunk_in_use_is_not_handed_out(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    world = World(0)
    ids = settle(world, engine)
    kvraw.store(world.cache, world.chunks[:2], ids, stream=world.stream, engine=engine)
    assert repeated()
    monkeypatch.setattr(FakeDriver, "event_done", lambda *_: False)
    address, size = world.chunks[1].address, world.chunks[1].nbytes
    world.pool.free([world.chunks[1]])
    (other,) = world.pool.chunks(1, size)
    assert other.address != address
    monkeypatch.undo()
    world.stream.synchronize()
    world.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_different_goes_the_general_way(world: World, engine: str) -> None:
    ids = settle(world, engine)
    kvraw.store(world.cache, tuple(world.chunks[:2]), ids, stream=world.stream, engine=engine).wait()
    assert not repeated()
    kvraw.store(world.cache, world.chunks[:2], ids.tolist(), stream=world.stream, engine=engine).wait()
    assert not repeated()
    n = len(REPEATED)
    kvraw.store(world.cache, world.chunks[:2], ids, skip_blocks=1, stream=world.stream, engine=engine).wait()
    assert len(REPEATED) == n
    with kvraw.Stream(world.stream.device) as other:
        kvraw.store(world.cache, world.chunks[:2], ids, stream=other, engine=engine).wait()
        assert repeated()
    with pytest.raises(kvraw.ClosedError, match="stream is closed"):
        kvraw.store(world.cache, world.chunks[:2], ids, stream=other, engine=engine)
    with pytest.raises(TypeError, match="stream is None"):
        kvraw.store(world.cache, world.chunks[:2], ids, engine=engine)


@pytest.mark.parametrize("engine", ["kernel"])
def test_a_capture_goes_the_general_way(fake: FakeDriver, engine: str) -> None:
    world = World(0)
    ids = settle(world, engine)
    fake.capture(world.stream.handle, True)
    kvraw.store(world.cache, world.chunks[:2], ids, stream=world.stream, engine=engine)
    assert not repeated()
    fake.capture(world.stream.handle, False)
    kvraw.store(world.cache, world.chunks[:2], ids, stream=world.stream, engine=engine).wait()
    assert repeated()
    world.close()


@pytest.mark.parametrize(("engine", "most"), [("kernel", 16), ("staged", 25)])
def test_functions_of_a_later_call(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, engine: str, most: int) -> None:
    world = World(0)
    ids = settle(world, engine)
    monkeypatch.undo()
    names: list[str] = []
    inside = 0

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal inside
        if event == "call" and not inside:
            names.append(frame.f_code.co_name)
        if frame.f_code is Program.run.__code__:  # the compiled function, on a machine's driver
            inside += {"call": 1, "return": -1}.get(event, 0)

    with DeviceScope(0):  # an engine's thread has its context current
        sys.setprofile(trace)
        try:
            kvraw.store(world.cache, world.chunks[:2], ids, stream=world.stream, engine=engine)
        finally:
            sys.setprofile(None)
    assert "__call__" in names
    assert len(names) <= most, names
    world.stream.synchronize()
    world.close()


def test_auto_asks_how_many_ids_follow_each_other(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the copy engine would be the fastest for ids that do, it is not taken for those that do not."""
    curves = {
        f"{engine} {way}": ((256, a), (1024, b))
        for engine, a, b in (("kernel", 2.0, 2.0), ("copy", 1.0, 50.0), ("staged", 1.5, 1.5))
        for way in ("store", "load")
    }
    profile = Profile("a test", curves, {"kernel": 1.0, "copy": 1.0, "staged": 1.0})
    monkeypatch.setattr(chooser, "profile_for", lambda _: profile)
    monkeypatch.setenv("KVRAW_NEIGHBOUR", "idle")  # by time alone
    world = World(0)
    apart, joined = np.arange(0, 16, 2, dtype=np.int64), np.arange(8, dtype=np.int64)
    engines = []
    for ids in (apart, apart, apart, joined, apart, joined, apart[::-1].copy()):
        done = kvraw.store(world.cache, world.chunks[:2], ids, stream=world.stream)
        done.wait()
        engines.append((done.engine, repeated()))
        want = world.paged[:, :, ids[:4]].transpose(1, 0, 2, 3, 4, 5)
        np.testing.assert_array_equal(world.chunk(0), want)
    names = ["kernel", "kernel", "kernel", "copy", "kernel", "copy", "kernel"]
    assert engines == list(zip(names, [False, False, True, False, True, False, True], strict=True))
    world.close()
