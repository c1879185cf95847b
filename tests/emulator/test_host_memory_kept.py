"""Host memory that the driver will not let go."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

import kvraw
from kvraw.errors import DriverError
from kvraw.runtime.host import populate
from kvraw.runtime.host.mapping import HostOptions
from tests.emulator.fake_driver import FakeDriver

MIB = 1 << 20
SIZE = 64 * MIB
STEP = 2 * MIB
RESULT = "CUDA_ERROR_OUT_OF_MEMORY"


def options(kind: str = "anonymous", **others: object) -> HostOptions:
    return HostOptions(kind=kind, step_bytes=STEP, threads=2, **others)  # type: ignore[arg-type]


def blocks(fake: FakeDriver) -> int:
    return fake.live()["blocks"]


def test_memory_that_the_driver_keeps_stays_mapped(fake: FakeDriver) -> None:
    pool = kvraw.HostPool(SIZE, device=0, options=options())
    address = pool.address
    fake.fail("host_unregister", 3, RESULT)
    with pytest.raises(DriverError, match="host_unregister failed"):
        pool.close()
    pool.close()
    stuck = address + SIZE - 3 * STEP
    assert blocks(fake) == 1
    np.asarray(populate._Bytes(stuck, STEP))[:] = 1  # would be a crash
    with pytest.raises(kvraw.BoundsError, match="which the driver would not undo"):
        kvraw.Registration(stuck, STEP, 0)
    with pytest.raises(kvraw.BoundsError, match="overlaps the registration"):
        kvraw.Registration(stuck - 4096, 8192, 0)


def test_memory_that_the_driver_keeps_after_a_rollback_stays_mapped(fake: FakeDriver) -> None:
    seen: list[int] = []
    real = FakeDriver.host_register

    def register_and_see(self: FakeDriver, address: int, nbytes: int) -> None:
        seen.append(address)
        real(self, address, nbytes)

    fake.fail("host_register", 4, RESULT)
    fake.fail("host_unregister", 1, RESULT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeDriver, "host_register", register_and_see)
        with pytest.raises(DriverError, match="host_register failed"):
            kvraw.HostPool(SIZE, device=0, options=options())
    assert blocks(fake) == 1
    np.asarray(populate._Bytes(seen[2], STEP))[:] = 1


@pytest.mark.parametrize("later", [False, True])
def test_a_shared_pool_that_cannot_be_pinned_keeps_no_name(
    fake: FakeDriver, caplog: pytest.LogCaptureFixture, later: bool
) -> None:
    """Also where the driver will not undo a registration, and the memory has to stay mapped."""
    name = f"kvraw-stuck-{os.getpid()}"
    path = Path("/dev/shm") / name
    chosen = options("shared", name=name)
    fake.fail("host_register", 3, RESULT)
    fake.fail("host_unregister", 1, RESULT)
    if later:
        pool = kvraw.HostPool(SIZE, pin=False, options=chosen)
        with pytest.raises(DriverError, match="host_register failed"):
            pool.pin(0)
        assert path.exists()
        pool.close()
        gc.collect()  # the error, and the frames that it came by
    else:
        with pytest.raises(DriverError, match="host_register failed"):
            kvraw.HostPool(SIZE, device=0, options=chosen)
    assert not path.exists()
    assert "stay mapped" in caplog.text
    assert blocks(fake) == 1
    with kvraw.HostPool(SIZE, pin=False, options=chosen) as pool:
        assert pool.name == name


def test_memory_that_the_driver_will_not_free(fake: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    pool = kvraw.HostPool(SIZE, device=0, options=options("pinned"))
    fake.fail("host_free", 1, RESULT)
    with pytest.raises(DriverError, match="host_free failed"):
        pool.close()
    pool.close()
    assert blocks(fake) == 1
    pool = kvraw.HostPool(SIZE, device=0, options=options("pinned"))
    view = pool.view(pool.address, 1)
    pool.close()  # it is not to be freed yet
    fake.fail("host_free", 1, RESULT)
    caplog.clear()
    del view
    assert f"{SIZE} bytes at {pool.address:#x} stay allocated: host_free failed" in caplog.text
