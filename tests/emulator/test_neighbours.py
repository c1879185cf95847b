"""Layers in allocations of their own, at one distance: no copy of the copy engine reaches over a border."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import combinations

import numpy as np
import pytest

import kvraw
from kvraw.layouts.geometry import Geometry
from kvraw.runtime import driver as driver_module
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from tests.emulator.fake_driver import FakeDriver

LAYER, BLOCK = 1 << 16, 4096
G = Geometry(layers=3, blocks=16, block_size=1, heads=1, head_size=2048, element_size=2, planes=1)


@pytest.fixture(params=[13000, 12000])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeDriver]:
    """Drivers with the batch call and without."""
    made = FakeDriver(version=request.param)
    before = driver_module.install(made)  # type: ignore[arg-type]
    yield made
    driver_module.install(before)
    assert not made.violations, made.violations


@pytest.fixture(params=[True, False], ids=["apart", "one allocation"])
def layers(fake: FakeDriver, request: pytest.FixtureRequest) -> Iterator[list[int]]:
    with ExitStack() as stack:
        if not request.param:
            base = stack.enter_context(kvraw.DeviceBuffer(3 * LAYER, 0)).address
            yield [base, base + LAYER, base + 2 * LAYER]
            return
        at = sorted(stack.enter_context(kvraw.DeviceBuffer(LAYER, 0)).address for _ in range(24))
        found = [list(c) for c in combinations(at, 3) if c[1] - c[0] == c[2] - c[1] < 1 << 31]
        assert found
        yield min(found, key=lambda c: c[1] - c[0])


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("ids", [range(16), [5], [0, 15]], ids=str)
def test_stores_and_batches(fake: FakeDriver, layers: list[int], ids: range | list[int], captured: bool) -> None:
    together = layers[1] - layers[0] == LAYER and len({fake.pointer_info(a).base for a in layers}) == 1  # type: ignore[union-attr]
    with kvraw.Stream(0) as stream, kvraw.HostPool(1 << 20, device=0) as pool:
        (filled,) = pool.chunks(1, 3 * LAYER)
        filled.numpy()[:] = np.random.default_rng(0).integers(0, 256, 3 * LAYER, dtype=np.uint8)
        with DeviceScope(0):
            for k, layer in enumerate(layers):
                driver().memcpy_async(layer, filled.address + k * LAYER, LAYER, stream.handle)
        stream.synchronize()
        want = filled.numpy().reshape(3, 16, BLOCK)[:, ids]
        cache = kvraw.PagedCache.from_pointers(layers, 3, G, device=0)
        (chunk,) = pool.chunks(1, cache.chunk_bytes(len(ids)))
        chunk.numpy()[:] = 0
        fake.capture(stream.handle, captured)
        if captured:  # a store in a capture is the kernel's
            source = [layer + BLOCK * block for layer in layers for block in ids]
            target = [chunk.address + BLOCK * k for k in range(len(source))]
            kvraw.memcpy_batch(target, source, [BLOCK] * len(source), stream=stream)
        else:
            kvraw.store(cache, [chunk], ids, stream=stream, engine="copy")
        fake.capture(stream.handle, False)
        stream.synchronize()
        np.testing.assert_array_equal(chunk.numpy().reshape(want.shape), want)
        if list(ids) == [5] and (captured or fake.version() < 12080):
            assert (fake.calls["memcpy_2d_async"] > 0) == together
