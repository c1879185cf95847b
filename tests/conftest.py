"""Fixtures, and which tests run; helpers live in tests/helpers."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from kvraw.runtime import driver as driver_module
from tests.emulator.fake_driver import FakeDriver

DEVICE = int(os.environ.get("KVRAW_TEST_DEVICE", "0"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked exhaustive or engines, but where ``-m`` names the marker.

    An exhaustive test runs as well where a test is named with its brackets.
    """
    named = config.option.markexpr or ""
    out = {"engines"} if "engines" not in named else set()
    if "exhaustive" not in named and not any("[" in arg for arg in config.args):
        out.add("exhaustive")
    left = [item for item in items if any(item.get_closest_marker(name) for name in out)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not any(item.get_closest_marker(name) for name in out)]


@pytest.fixture(autouse=True, scope="module")
def collected() -> None:
    """Have the collector pass over what modules before this one left: tests of leaks call it often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def gpu() -> int:
    """A device to test on. Skips only where there is no driver or no device."""
    from kvraw.errors import DriverNotFoundError
    from kvraw.runtime.driver import driver

    try:
        driver()
    except DriverNotFoundError as error:
        if os.environ.get("KVRAW_REQUIRE_GPU") == "1":
            pytest.fail(f"KVRAW_REQUIRE_GPU=1, but: {error}")
        pytest.skip(str(error))
    return DEVICE


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    """A fake driver in the real one's place; at the end it must have seen no misuse."""
    fake = FakeDriver()
    before = driver_module.install(fake)  # type: ignore[arg-type]
    yield fake
    driver_module.install(before)
    assert not fake.violations, fake.violations


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> int:
    """A device of the emulator, and of the machine: 0, or what ``KVRAW_TEST_DEVICE`` says."""
    if request.param == "gpu":
        return int(request.getfixturevalue("gpu"))
    request.getfixturevalue("fake")
    return DEVICE


@pytest.fixture(params=["cpu", "emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def codec_device(request: pytest.FixtureRequest) -> int | None:
    """Host memory (None), and a device of the emulator and of the machine."""
    if request.param == "cpu":
        return None
    if request.param == "gpu":
        return int(request.getfixturevalue("gpu"))
    request.getfixturevalue("fake")
    return DEVICE
