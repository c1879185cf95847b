"""Pieces of registered memory that a device sees at unlike distances are no one range; at one distance they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

import kvraw
from kvraw.copying.addresses import resolve
from kvraw.errors import DriverError
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.host.mapping import HostOptions
from kvraw.runtime.memory import locate
from tests.emulator.fake_driver import FakeDriver

PAGE, PIECES = 4096, 4
FAR, FARTHER = -(1 << 40), -(3 << 40)  # nothing lies there: no kernel touches these pages
APART = pytest.mark.parametrize("odd", [1, 2, PIECES - 1])


@pytest.fixture
def start() -> Iterator[int]:
    array = np.zeros((PIECES + 1) * PAGE, np.uint8)
    yield int(array.ctypes.data) + -int(array.ctypes.data) % PAGE
    assert array.size


def place(fake: FakeDriver, start: int, odd: int | None, step: int = PAGE) -> None:
    fake.distances = {start + k * step: FARTHER if k == odd else FAR for k in range(PIECES)}


@APART
def test_a_registration_whose_pieces_lie_apart_is_undone(fake: FakeDriver, start: int, odd: int) -> None:
    place(fake, start, odd)
    with pytest.raises(DriverError, match="pieces lie apart"):
        kvraw.Registration(start, PIECES * PAGE, 0, step=PAGE)
    assert fake.live()["blocks"] == 0
    place(fake, start, None)
    with kvraw.Registration(start, PIECES * PAGE, 0, step=PAGE) as made:
        assert (made.pieces, made.device_address) == (PIECES, start + FAR)


@pytest.mark.parametrize("grow", [False, True])
@APART
def test_a_pool_whose_pieces_lie_apart_is_not_pinned(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, odd: int, grow: bool
) -> None:
    step = 1 << 20
    options = HostOptions(step_bytes=step, threads=1, grow=grow, first_bytes=step)
    real, registered = FakeDriver.host_register, itertools.count()

    def register(self: FakeDriver, address: int, nbytes: int) -> None:
        self.distances[address] = FARTHER if next(registered) == odd else FAR
        real(self, address, nbytes)

    monkeypatch.setattr(FakeDriver, "host_register", register)
    if not grow:
        with pytest.raises(DriverError, match="pieces lie apart"):
            kvraw.HostPool(PIECES * step, device=0, options=options)
    else:
        with kvraw.HostPool(PIECES * step, device=0, options=options) as pool:
            with pytest.raises(DriverError, match="pieces lie apart"):
                pool.wait_ready(60)
            assert (pool.ready_bytes, pool.device_shift) == (odd * step, FAR)
    assert fake.live()["blocks"] == 0


@APART
@pytest.mark.parametrize("many", [False, True])
def test_registrations_of_others_are_one_range_at_one_distance_only(
    fake: FakeDriver, start: int, odd: int, many: bool
) -> None:
    for apart in (None, odd):
        place(fake, start, apart)
        with DeviceScope(0):
            for k in range(PIECES):  # as somebody else does it: not in the registry
                fake.host_register(start + k * PAGE, PAGE)
            firsts = [k for k in range(PIECES - 1) for _ in range(40 if many else 1)]  # two pieces each
            ranges = [start + PAGE * k for k in firsts]
            want = [0 if apart in (k, k + 1) else address + FAR for k, address in zip(firsts, ranges, strict=True)]
            assert [locate(address, 2 * PAGE).device_address for address in ranges] == want
            seen = resolve(np.array(ranges, np.uint64), 2 * PAGE).seen.tolist()
            # Behind the first range that is no one range, others may count as pageable too.
            assert all(found in (right, 0) for found, right in zip(seen, want, strict=True))
            assert apart is not None or seen == want
            for k in range(PIECES):
                fake.host_unregister(start + k * PAGE)
