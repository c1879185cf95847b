"""Copies by the copy engine in batch calls, small ones first: all are made, and the one that is refused is named."""

from __future__ import annotations

import numpy as np
import pytest

import kvraw
from kvraw.copying import submission
from kvraw.copying.copy_engine import Descriptors
from kvraw.copying.device_state import device_state
from kvraw.errors import DriverError
from kvraw.runtime.context import DeviceScope
from tests.emulator.fake_driver import FakeDriver

SIZE = 16


def test_calls_grow_no_faster_than_the_engine_copies() -> None:
    for most in (7, 64, 8192):
        sizes = np.diff((0, *submission._ends(most)))
        assert sizes[0] <= 64
        assert sizes.max() <= most
        assert (sizes[1:] <= 1.5 * sizes[:-1]).all()


@pytest.mark.parametrize("count", [1, 64, 65, 700, 5000])
def test_every_copy_is_made(device: int, count: int) -> None:
    order = np.random.default_rng(count).permutation(count).astype(np.uint64)
    with kvraw.HostPool(1 << 20, device=device) as pool, kvraw.DeviceBuffer(count * SIZE, device) as memory:
        here, there = pool.chunks(2, count * SIZE)
        here.numpy()[:] = np.random.default_rng(1).integers(0, 256, count * SIZE, np.uint8)
        offsets, sizes = np.arange(count, dtype=np.uint64) * np.uint64(SIZE), np.full(count, SIZE, np.uint64)
        with kvraw.Stream(device) as stream, DeviceScope(device):
            state = device_state(device)
            in_order = np.uint64(memory.address) + offsets
            chosen = np.uint64(here.address) + order * np.uint64(SIZE)
            submission.submit(state, stream.handle, Descriptors(in_order, chosen, sizes), refs=pool)
            back = Descriptors(np.uint64(there.address) + offsets, in_order, sizes)
            submission.submit(state, stream.handle, back, refs=pool).wait()
        rows = here.numpy().reshape(count, SIZE)[order.astype(np.int64)]
        np.testing.assert_array_equal(there.numpy().reshape(count, SIZE), rows)


@pytest.mark.parametrize("most", [None, 5])
@pytest.mark.parametrize("at", [0, 63, 64, 200, 299])
def test_the_copy_that_is_refused(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, at: int, most: int | None) -> None:
    with kvraw.HostPool(1 << 20, device=0) as pool, kvraw.DeviceBuffer(300 * SIZE, 0) as memory:
        (chunk,) = pool.chunks(1, 300 * SIZE)
        offsets = np.arange(300, dtype=np.uint64)[::-1] * np.uint64(SIZE)
        d = Descriptors(
            offsets + np.uint64(chunk.address), offsets + np.uint64(memory.address), np.full(300, SIZE, "u8")
        )
        real, bad, sizes = fake.memcpy_batch_async, int(d.dst[at]), []

        def refusing(dst: np.ndarray, src: np.ndarray, n: np.ndarray, stream: int) -> None:
            sizes.append(len(n))
            if bad in dst:
                raise DriverError("CUDA_ERROR_INVALID_VALUE", 1, "cuMemcpyBatchAsync", index=dst.tolist().index(bad))
            real(dst, src, n, stream)

        monkeypatch.setattr(fake, "memcpy_batch_async", refusing)
        with kvraw.Stream(0) as stream, DeviceScope(0):
            with pytest.raises(DriverError, match=f"descriptor {at}") as met:
                submission.submit(device_state(0), stream.handle, d, most=most, refs=pool)
            assert met.value.index == at
        assert max(sizes) <= (most or 300)
        assert len(sizes) == 1 + (at // 5 if most else int(np.searchsorted(submission._ends(8192), at, "right")))


def test_a_part_behind_a_bound_one_is_waited_for(device: int) -> None:
    """The event of an operation of several copies is behind all of them, whichever of them is a program."""
    rows = kvraw.Side(outer=64, limit=64)
    with kvraw.HostPool(1 << 20, device=device) as pool, kvraw.DeviceBuffer(64 * 64, device) as memory:
        chunks = pool.chunks(2, 64 * 64)
        for value, chunk in enumerate(chunks):
            chunk.numpy()[:] = value + 1
        copies = [
            kvraw.PreparedCopy(kvraw.CopyPlan(rows, rows, 1, 1, 1, 1, run=64), device=device, engine="kernel")
            for _ in range(2)
        ]
        with kvraw.Stream(device) as stream, DeviceScope(device):
            state = device_state(device)

            def enqueue(*parts: tuple[kvraw.PreparedCopy, int, int]) -> None:
                operation = state.completions.begin(stream.handle)
                for copy, source, target in parts:
                    ready = copy.ready([source], [target], 8, src_index=range(8), dst_index=range(8))
                    ready.enqueue(state, operation, False)
                operation.commit(pool).wait()

            there, (one, two) = memory.address, (chunk.address for chunk in chunks)
            for _ in range(3):
                enqueue((copies[0], one, there))
            enqueue((copies[0], one, there), (copies[1], there, two))
        assert (chunks[1].numpy()[: 8 * 64] == 1).all()
