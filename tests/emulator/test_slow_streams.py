"""One stream that stands still, or one operation that was lost, holds up what it uses, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvraw
from kvraw.runtime import driver as driver_module
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.world import World

FULL = "CUDA_ERROR_OUT_OF_MEMORY"


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    made = FakeDriver()
    before = driver_module.install(made)  # type: ignore[arg-type]
    yield made
    driver_module.install(before)


@pytest.mark.parametrize("what", ["stands still", "lost"])
def test_chunks_of_other_streams_come_back(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    w, pool = World(0), kvraw.HostPool(8 * 4096, device=0)
    nbytes, slow = w.cache.chunk_bytes(4), kvraw.Stream(0)
    (held,) = pool.chunks(1, nbytes)
    plan = kvraw.TransferPlan(w.cache, "store", chunk_tokens=4, engine="kernel")
    if what == "lost":
        fake.fail("event_record", 1, FULL)
        for n in (1, 2):
            fake.fail("stream_synchronize", n, FULL)
        with pytest.raises(kvraw.DriverError):
            plan([held], [1], stream=slow)
    else:
        first = plan([held], [1], stream=slow)
        assert first.completion is not None
        event, real, stuck = first.completion._event, FakeDriver.event_done, [True]
        monkeypatch.setattr(
            FakeDriver, "event_done", lambda self, e: False if stuck[0] and e == event else real(self, e)
        )
        with pytest.raises(kvraw.TransferTimeoutError, match="not after 0"):
            first.wait(timeout=0.01)
    address = held.address
    held.free()
    for k in range(30):  # by far more than the pool has
        (chunk,) = pool.chunks(1, nbytes, timeout=5)
        assert chunk.address != address
        plan([chunk], [k], stream=w.stream).wait(timeout=30)
        chunk.free()
    assert pool.info()["in_flight"] in (1, 2)
    assert pool.info()["waiting"] == 4096
    with pytest.raises(kvraw.TransferTimeoutError):
        pool.close(timeout=0.01)
    if what == "stands still":
        stuck[0] = False
        first.wait(timeout=30)
        pool.close()
    else:
        pool._uses.clear()
        pool.close()


def test_waits_of_all_kinds_take_a_time_out(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    w = World(0)
    host = kvraw.HostKVPool.like(w.cache, tokens=16, layout="page_first")
    slots, real, stuck = host.alloc(16), FakeDriver.event_done, [True]
    monkeypatch.setattr(FakeDriver, "event_done", lambda self, e: not stuck[0] and real(self, e))
    under_way = [
        host.backup(w.cache, range(16), slots, stream=w.stream),
        host.load_layers(w.cache, slots, range(16), stream=w.stream),
        kvraw.memcpy_batch([w.mirror.address], [w.memory.address], [64], stream=w.stream),
    ]
    for one in under_way:
        with pytest.raises(kvraw.TransferTimeoutError):
            one.wait(timeout=0.01)  # type: ignore[attr-defined]
    with pytest.raises(kvraw.TransferTimeoutError):
        host.close(timeout=0.01)
    stuck[0] = False
    for one in under_way:
        one.wait(timeout=30)  # type: ignore[attr-defined]
    host.close()
