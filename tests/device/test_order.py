"""Order without a wait on the host: a transfer sees what its stream was given before, and what comes after sees it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

import kvraw
from kvraw.layouts.geometry import Geometry
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from tests.helpers.backends import device_ids
from tests.helpers.staging import own_slots
from tests.helpers.world import TOKENS, World

GEOMETRY = Geometry(layers=2, blocks=64, block_size=4, heads=2, head_size=64, element_size=2)
ROUNDS = int(os.environ.get("KVRAW_TEST_ROUNDS", "3"))
ENGINES = ["kernel", "copy", "staged"]


class Race(World):
    """A world with memory to keep the device busy, so that whoever does not wait is too early."""

    def __init__(self, device: int, real: bool) -> None:
        super().__init__(device, GEOMETRY, chunks=8)
        self.ballast = kvraw.DeviceBuffer((256 << 20) if real else 4096, device)
        self.real = real

    def busy(self, stream: kvraw.Stream) -> None:
        with DeviceScope(self.device):
            for _ in range(4):
                driver().memset_async(self.ballast.address, 1, self.ballast.nbytes, stream.handle)

    def fill(self, value: int, stream: kvraw.Stream) -> None:
        with DeviceScope(self.device):
            driver().memset_async(self.memory.address, value, self.paged.nbytes, stream.handle)

    def snapshot(self, stream: kvraw.Stream) -> None:
        """Enqueue a copy of the cache to the mirror."""
        with DeviceScope(self.device):
            driver().memcpy_async(self.mirror.address, self.memory.address, self.paged.nbytes, stream.handle)


@pytest.fixture
def race(device: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Race]:
    own_slots(monkeypatch, device, "8K")
    made = Race(device, real="gpu]" in request.node.name or "gpu-" in request.node.name)
    yield made
    made.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_store_reads_between_two_writes(race: Race, engine: str) -> None:
    ids = np.arange(32)
    for k in range(ROUNDS):
        value = k % 200 + 1
        race.busy(race.stream)
        race.fill(value, race.stream)
        transfer = kvraw.store(race.cache, race.chunks, ids, stream=race.stream, engine=engine)
        race.fill(255, race.stream)
        transfer.wait()
        assert all((c.numpy() == value).all() for c in race.chunks), (k, engine)
        assert transfer.engine == engine


@pytest.mark.parametrize("engine", ENGINES)
def test_a_load_lands_between_a_write_and_a_read(race: Race, engine: str) -> None:
    ids = np.random.default_rng(0).permutation(64)[:32]
    for k in range(ROUNDS):
        for c in race.chunks:
            c.numpy()[:] = k % 200 + 1
        race.busy(race.stream)
        race.fill(255, race.stream)
        kvraw.load(race.cache, race.chunks, ids, stream=race.stream, engine=engine)
        race.snapshot(race.stream)
        race.fill(254, race.stream)
        race.stream.synchronize()
        got = race.mirror.numpy().reshape(race.shape)
        assert (got[:, :, ids] == k % 200 + 1).all(), (k, engine)
        assert (np.delete(got, ids, axis=2) == 255).all(), (k, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_load_sees_the_store_before_it(race: Race, engine: str) -> None:
    ids = np.arange(32)
    for k in range(ROUNDS):
        race.busy(race.stream)
        race.fill(k % 200 + 1, race.stream)
        kvraw.store(race.cache, race.chunks, ids, stream=race.stream, engine=engine)
        race.fill(255, race.stream)
        kvraw.load(race.cache, race.chunks, ids[::-1], stream=race.stream, engine=engine)
        race.snapshot(race.stream)
        race.stream.synchronize()
        got = race.mirror.numpy().reshape(race.shape)
        assert (got[:, :, :32] == k % 200 + 1).all(), (k, engine)
        assert (got[:, :, 32:] == 255).all(), (k, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_side_streams(race: Race, engine: str) -> None:
    ids = np.arange(32)
    store = kvraw.TransferPlan(race.cache, "store", chunk_tokens=16, engine=engine)
    load = kvraw.TransferPlan(race.cache, "load", chunk_tokens=16, engine=engine)
    for k in range(ROUNDS):
        race.busy(race.stream)
        race.fill(k % 200 + 1, race.stream)
        stored = store(race.chunks, ids, stream=race.stream, side=True)
        stored.wait_on(race.stream)
        race.fill(255, race.stream)
        load(race.chunks, ids, stream=race.stream, side=True)
        race.snapshot(race.stream)
        race.stream.synchronize()
        assert (race.mirror.numpy().reshape(race.shape)[:, :, :32] == k % 200 + 1).all(), (k, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_streams_that_share_the_staging_ring(race: Race, engine: str) -> None:
    ids = np.arange(16)
    with kvraw.Stream(race.device) as other:
        for k in range(ROUNDS):
            race.fill(k % 200 + 1, race.stream)
            with DeviceScope(race.device):
                event = driver().event_create()
                driver().event_record(event, race.stream.handle)
                driver().stream_wait_event(other.handle, event)
            transfers = [
                kvraw.store(race.cache, race.chunks[:4], ids, stream=race.stream, engine=engine),
                kvraw.store(race.cache, race.chunks[4:], ids + 16, stream=other, engine=engine),
            ]
            for t in reversed(transfers):
                t.wait()
            assert all((c.numpy() == k % 200 + 1).all() for c in race.chunks), (k, engine)
            driver().event_destroy(event)


@pytest.mark.parametrize("verb", ["store", "load"])
def test_a_bad_id_on_the_device_never_shows_what_the_ring_held(race: Race, verb: str) -> None:
    race.fill(77, race.stream)
    for _ in range(4):  # whatever slots there are, they hold 77
        kvraw.store(race.cache, race.chunks, np.arange(32), stream=race.stream, engine="staged").wait()
    for c in race.chunks:
        c.numpy()[:] = 3
    race.fill(5, race.stream)
    ids = np.arange(32)
    bad = [1, 13, 30]
    ids[bad] = 64, -7, 2**40
    there = device_ids(tuple(ids.tolist()), race.device, race.stream)
    transfer = getattr(kvraw, verb)(race.cache, race.chunks, there, stream=race.stream, engine="staged")
    with pytest.raises(
        kvraw.BoundsError, match=r"block_ids\[(1|13|30)\] is (64|-7|1099511627776), must be in \[0, 64\)"
    ):
        transfer.wait()
    assert transfer.engine == "staged"
    per = TOKENS // race.geometry.block_size
    if verb == "store":
        for at in range(32):
            found = set(np.unique(race.chunk(at // per)[:, :, at % per]).tolist())
            assert found <= ({0, 3} if at in bad else {5}), at
    else:
        now = race.now()
        for block in range(64):
            want = 3 if block in set(ids.tolist()) else 5
            assert (now[:, :, block] == want).all(), block
