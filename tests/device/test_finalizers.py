"""What is given back at any moment, also in the midst of a block that holds a lock in the same thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

import kvraw
from kvraw.copying.device_state import device_state
from kvraw.runtime.context import DeviceScope
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.backends import device_ids
from tests.helpers.world import World


def within(seconds: float, work: Callable[[], None]) -> None:
    """Run in a thread that must come to an end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for itself"


def test_a_transfer_is_settled_while_status_words_are_made(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0)
    ids = device_ids(tuple(range(8)), 0, world.stream)
    with DeviceScope(0):
        state = device_state(0)
    transfer = kvraw.store(world.cache, world.chunks, ids, stream=world.stream)
    real, settled = FakeDriver.host_alloc, []

    def host_alloc(self: FakeDriver, nbytes: int) -> int:
        settled.append(None)
        transfer.wait()  # what a pool does that is collected here
        return real(self, nbytes)

    def more() -> None:
        with DeviceScope(0):
            while not settled:
                state.status._more()

    monkeypatch.setattr(FakeDriver, "host_alloc", host_alloc)
    within(20, more)
    assert transfer.done()
    monkeypatch.undo()
    np.testing.assert_array_equal(world.chunk(0)[:, :, 0], world.paged[:, :, 0].transpose(1, 0, 2, 3, 4))
    world.close()


def test_a_stream_is_collected_while_a_context_is_made(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [kvraw.Stream(0)]
    real = FakeDriver.primary_retain

    def primary_retain(self: FakeDriver, device: int) -> int:
        streams.clear()
        return real(self, device)

    monkeypatch.setattr(FakeDriver, "primary_retain", primary_retain)
    within(20, lambda: kvraw.Stream(1).close())
    assert not streams
