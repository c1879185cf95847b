"""What a driver says of host memory that is registered, given up and registered anew."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from kvraw.copying.addresses import resolve
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import locate

pytestmark = pytest.mark.gpu


def test_a_registration_that_is_gone_is_not_remembered(gpu: int) -> None:
    room = mmap.mmap(-1, 1 << 20)
    address = int(np.frombuffer(room, np.uint8).ctypes.data)
    d = driver()
    numbers = set()
    with DeviceScope(gpu):
        for round_, size in enumerate((1 << 20, 1 << 16, 1 << 18, 4096, 1 << 20) * 4):
            assert resolve(np.array([address], np.uint64), 1).pageable
            d.host_register(address, size)
            numbers.add(d.pointer_number(address))
            for reach in (1, size):
                assert locate(address, reach).device_address
            found = resolve(np.array([address, address + size - 1], np.uint64), 1)
            assert found.seen.tolist() == [address, address + size - 1]
            if size < 1 << 20:
                assert not locate(address, size + 1).device_address
                assert resolve(np.array([address], np.uint64), size + 1).pageable
            d.host_unregister(address)
            assert len(numbers) == round_ + 1
    assert not locate(address, 1).device_address
