"""A driver that compiles no PTX: the copy engine carries out what it can, and what cannot be done says why."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import kvraw
from kvraw.ptx.loader import read_ptx
from kvraw.runtime.driver import driver
from kvraw.runtime.module import Kernel
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.backends import DeviceIds
from tests.helpers.world import World

RESULTS = {
    "CUDA_ERROR_JIT_COMPILER_NOT_FOUND": "install libnvidia-ptxjitcompiler.so.1",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "too old",
    "CUDA_ERROR_JIT_COMPILATION_DISABLED": "unset CUDA_DISABLE_PTX_JIT",
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("result", RESULTS)
def test_the_copy_engine_takes_over(
    fake: FakeDriver, result: str, lazy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fake.no_ptx, fake.lazy = result, lazy
    w, ids = World(0), np.arange(20)
    with caplog.at_level(logging.WARNING, "kvraw"):
        done = kvraw.store(w.cache, w.chunks, ids, stream=w.stream)
        done.wait()
        assert done.engine == "copy"
        assert result in done.explain()
        for at in range(5):
            np.testing.assert_array_equal(
                w.chunk(at), w.paged[:, :, 4 * at : 4 * at + 4].swapaxes(0, 1).reshape(w.chunk(at).shape)
            )
        kvraw.load(w.cache, w.chunks, ids[::-1].copy(), stream=w.stream).wait()
        np.testing.assert_array_equal(w.now()[:, :, ids[::-1]], w.paged[:, :, ids])
    assert sum(result in r.message for r in caplog.records) == 1
    assert not fake.calls["launch"]

    fake.capture(w.stream.handle, True)
    assert kvraw.store(w.cache, w.chunks, ids, stream=w.stream).engine == "copy"
    fake.capture(w.stream.handle, False)
    w.stream.synchronize()

    plan = kvraw.TransferPlan(w.cache, "store", chunk_tokens=16).plan
    prepared = kvraw.PreparedCopy(plan, device=0)
    other = kvraw.DeviceBuffer(w.cache.chunk_bytes(16), 0)
    for base in (w.chunks[0].address, other.address):  # also within the device
        copy = prepared(w.cache.bases, [base], 4, src_index=ids, stream=w.stream)
        copy.wait()
        assert copy.engine == "copy"

    there = DeviceIds((1, 2), 0, w.stream)
    for use in (
        lambda: kvraw.store(w.cache, w.chunks, there, stream=w.stream),
        lambda: prepared(w.cache.bases, [w.chunks[0].address], 2, src_index=there, stream=w.stream),
    ):
        with pytest.raises(kvraw.PlacementError, match=f"{result}.*{RESULTS[result]}"):
            use()
    for engine in ("kernel", "staged"):
        with pytest.raises(kvraw.UnsupportedDriverError, match=f"compiles no kernels here: {result}"):
            kvraw.store(w.cache, w.chunks, ids, stream=w.stream, engine=engine)
    w.stream.synchronize()
    assert driver() is fake
    w.close()


def test_other_errors_are_told_as_they_are(fake: FakeDriver) -> None:
    w = World(0)

    fake.fail("library_load", 1, "CUDA_ERROR_INVALID_PTX")
    with pytest.raises(kvraw.DriverError, match="CUDA_ERROR_INVALID_PTX"):
        Kernel(read_ptx("copy_v16.ptx"), "kvraw_copy_v16").handle()
    w.close()
