"""Devices of compute capability 8.0 and newer take the kernel with arithmetic in bf16; older ones the one without."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvraw.rope import rerotate_keys
from kvraw.runtime import driver as driver_module
from tests.device import test_rope
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.codec_cases import Place


class Newer(FakeDriver):
    """Of compute capability 9.0; counts the kernels by name."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def device_attribute(self, device: int, name: str) -> int:
        return 9 if name == "COMPUTE_CAPABILITY_MAJOR" else super().device_attribute(device, name)

    def library_kernel(self, library: int, name: str) -> int:
        self.kernels.append(name)
        return super().library_kernel(library, name)


@pytest.fixture
def newer() -> Iterator[Newer]:
    fake = Newer()
    before = driver_module.install(fake)  # type: ignore[arg-type]
    yield fake
    driver_module.install(before)
    assert not fake.violations, fake.violations


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("shape", test_rope.SHAPES, ids=str)
def test_keys(shape: tuple[int, ...], neox: bool, newer: Newer) -> None:
    test_rope.test_keys(shape, neox, "bfloat16", Place(0))
    aligned = shape[2] % 16 == 0 and shape[4] % 8 == 0 and not shape[5]
    wide = "kvraw_rope_bf16_v16" if neox else "kvraw_rope_bf16_v16_neighbours"
    assert newer.kernels == [wide if aligned else "kvraw_rope_bf16_v2"]


@pytest.mark.parametrize("neox", [True, False])
def test_any_bits(neox: bool, newer: Newer) -> None:
    test_rope.test_any_bits(64, neox, "bfloat16", Place(0))
    assert newer.kernels == ["kvraw_rope_bf16_v16" if neox else "kvraw_rope_bf16_v16_neighbours"]


def test_older_devices_take_single_elements(fake: FakeDriver) -> None:
    place = Place(0)
    key, cache = place.put(np.zeros((1, 1, 64), np.uint16)), place.put(np.zeros((1, 64), np.uint16))
    rerotate_keys(key.tensor, [0], [0], cache.tensor, dtype="bfloat16", stream=place.stream).wait()
    assert [name for _, name in fake._kernels.values()] == ["kvraw_rope_bf16_v2"]
