"""Where ranges of memory lie that are named anew at each call: what is kept of them is what the driver says now."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.copying import addresses as tables
from kvraw.copying import given
from kvraw.copying.addresses import AddressTable, resolve
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import PinnedBuffer
from tests.emulator.fake_driver import FakeDriver

SIZE = 512


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def _functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(given.COMPILED, "entry", None)
        monkeypatch.setattr(given.COMPILED, "start", lambda: None)
    else:
        given.COMPILED.compile()


def some(rng: np.random.Generator, owners: list[Any], count: int, mixed: bool) -> tuple[np.ndarray, Any]:
    sizes = rng.integers(0 if mixed else 1, 65, count).astype(np.uint64) if mixed else 64
    base = np.array([owners[k].address for k in rng.integers(0, len(owners), count)], np.uint64)
    return base + rng.integers(0, SIZE - 64, count).astype(np.uint64), sizes


def same_as_asked_anew(addresses: np.ndarray, sizes: Any) -> AddressTable:
    found, asked = resolve(addresses, sizes, ends=True), tables._one_by_one(driver(), addresses, sizes, True)
    some = np.broadcast_to(np.asarray(sizes) > 0, addresses.shape)
    np.testing.assert_array_equal(found.seen[some], asked.seen[some])
    assert found.pageable == asked.pageable
    assert found.over == asked.over
    if some.all():
        assert (found.devices, found.link) == (asked.devices, asked.link)
        assert set(found.edges) <= set(asked.edges)
    return found


@pytest.mark.parametrize("mixed", [False, True])
def test_allocations_that_come_and_go(device: int, mixed: bool) -> None:
    rng = np.random.default_rng(int(mixed))
    with DeviceScope(device):
        owners: list[Any] = [kvraw.DeviceBuffer(SIZE, device) for _ in range(4)]
        owners += [PinnedBuffer(SIZE, device) for _ in range(3)]
        for turn in range(12):
            given_ = some(rng, owners, 40, mixed)
            for _ in range(2):
                found = same_as_asked_anew(*given_)
                assert found.devices == {device}
                assert found.link
                assert not found.pageable
            at = turn % len(owners)
            kind = type(owners[at])
            owners[at].close()
            gc.collect()
            owners[at] = kind(SIZE, device)
        for one in owners:
            one.close()


def test_ends_and_pageable_memory(fake: FakeDriver) -> None:
    with DeviceScope(0):
        one, other = kvraw.DeviceBuffer(SIZE, 0), PinnedBuffer(SIZE, 0)
        plain = np.zeros(SIZE, np.uint8)
        at = np.array([other.address, one.address + SIZE - 32], np.uint64)
        assert same_as_asked_anew(at, 32).over is None
        over = same_as_asked_anew(at, 33).over
        assert over is not None
        assert (over.at, over.stop) == (1, one.address + SIZE)
        at[0] = plain.ctypes.data
        assert same_as_asked_anew(at, 32).pageable
        one.close()
        assert same_as_asked_anew(at[1:], 32).pageable


def test_the_driver_is_asked_for_numbers_alone(fake: FakeDriver) -> None:
    with DeviceScope(0):
        owners: list[Any] = [kvraw.DeviceBuffer(SIZE, 0) for _ in range(5)]
        at = np.array([one.address + 8 * k for k in range(9) for one in owners], np.uint64)
        resolve(at, 16)
        before = dict(fake.calls)
        resolve(at, 16)
        asked = {name: n - before.get(name, 0) for name, n in fake.calls.items() if n != before.get(name, 0)}
    assert asked == {"pointer_number": 5}
