"""Fixtures only; helpers live in tests/helpers."""

from __future__ import annotations

import os

import pytest


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
    return 0
