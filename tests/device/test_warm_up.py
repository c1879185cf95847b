"""`warm_up` of a device: first calls after it load, compile and allocate nothing."""

from __future__ import annotations

import numpy as np
import pytest

import kvraw
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.world import World


@pytest.mark.parametrize("engine", ["kernel", "staged", "copy"])
def test_first_calls_after_it(fake: FakeDriver, engine: str) -> None:
    kvraw.warm_up(0)
    world = World(0)
    before = dict(fake.calls)
    for call in (kvraw.store, kvraw.load):
        call(world.cache, world.chunks[:2], np.arange(8), stream=world.stream, engine=engine)
    for name in ("library_load", "mem_alloc", "host_alloc", "event_create", "stream_create"):
        assert fake.calls[name] == before.get(name, 0), name
    world.close()


def test_of_a_device_that_is_not_there(fake: FakeDriver) -> None:
    with pytest.raises(kvraw.PlacementError, match="device is 7"):
        kvraw.warm_up(7)


def test_on_a_device(device: int) -> None:
    kvraw.warm_up(device)
    kvraw.warm_up(device)
