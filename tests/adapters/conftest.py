"""Fixtures of the adapters' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvraw.runtime.context import forget
from tests.conftest import DEVICE
from tests.helpers.torch_like import TorchLike


@pytest.fixture(params=["host", "emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> int | None:
    """The host, and a device of the emulator and of the machine."""
    if request.param == "host":
        return None
    if request.param == "gpu":
        return int(request.getfixturevalue("gpu"))
    request.getfixturevalue("fake")
    return DEVICE


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """What the adapters keep between calls is of one driver: forget it around each test, as where one is reset."""
    forget()
    yield
    forget()


@pytest.fixture(params=["cpu", "emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def w(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchLike]:
    """Maker of tensors on the host, and on a device of the emulator and of the machine."""
    if request.param == "cpu":
        yield TorchLike(None)
        return
    request.getfixturevalue("gpu" if request.param == "gpu" else "fake")
    made = TorchLike(0).install(monkeypatch)
    yield made
    made.synchronize()
