"""Where many ranges lie, asked at once."""

from __future__ import annotations

import numpy as np
import pytest

from kvraw.copying.addresses import resolve
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import DeviceBuffer, PinnedBuffer, locate

PAGE = 4096


def test_as_one_by_one_in_any_order(device: int) -> None:
    with DeviceScope(device), DeviceBuffer(1 << 16, device) as there, PinnedBuffer(1 << 16, device) as here:
        starts = [a + at for at in (8192, 0, 4096) for a in (here.address, there.address)]
        found = resolve(np.array(starts, np.uint64), 4096)
        alone = [locate(a, 4096) for a in starts]
        assert found.seen.tolist() == [w.device_address for w in alone]
        assert found.devices == {device}
        assert (found.link, found.pageable) == (True, False)
        assert set(found.edges) == {e for w in alone for e in w.edges}
        assert all(min(here.address, there.address) + (1 << 16) <= e for e in found.edges)
        assert not resolve(np.array(starts[1::2], np.uint64)).link


def test_the_driver_is_asked_once_per_allocation(fake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with DeviceScope(0), DeviceBuffer(1 << 16, 0) as there, PinnedBuffer(1 << 16, 0) as here:
        asked = []
        info = fake.pointer_info  # type: ignore[attr-defined]
        monkeypatch.setattr(fake, "pointer_info", lambda address: (asked.append(address), info(address))[1])
        starts = [a + at for at in range(0, 1 << 16, 256) for a in (here.address, there.address)]
        assert not resolve(np.array(starts, np.uint64), 256).pageable
        assert len(asked) == 2


def test_over_the_end_of_a_registration(device: int) -> None:
    array = np.zeros(8 * PAGE, np.uint8)
    base = int(array.ctypes.data) + -int(array.ctypes.data) % PAGE
    d = driver()
    with DeviceScope(device):
        for at in (0, 2):  # as somebody else does it: not in the registry
            d.host_register(base + at * PAGE, 2 * PAGE)
        try:
            starts = np.array([base + k * PAGE for k in (1, 0, 2)], np.uint64)
            found = resolve(starts, 2 * PAGE)
            alone = [locate(int(a), 2 * PAGE) for a in starts]
            assert found.seen.tolist() == [w.device_address for w in alone]
            assert set(found.edges) == {e for w in alone for e in w.edges}
            if not found.pageable:  # a driver may map the two at different distances
                assert set(found.edges) == {base + 2 * PAGE, base + 4 * PAGE}
            beyond = resolve(np.array([base, base + 3 * PAGE], np.uint64), 2 * PAGE)
            assert beyond.seen.astype(bool).tolist() == [True, False]
        finally:
            for at in (0, 2):
                d.host_unregister(base + at * PAGE)


def test_pageable_memory(device: int) -> None:
    array = np.zeros(PAGE, np.uint8)
    with DeviceScope(device), PinnedBuffer(1 << 16, device) as here:
        found = resolve(np.array([here.address, array.ctypes.data, here.address + 1], np.uint64))
        assert found.pageable
        assert found.link
        assert found.seen.astype(bool).tolist()[:2] == [True, False]
    assert not resolve(np.zeros(0, np.uint64)).pageable
