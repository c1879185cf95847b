"""Fixtures of the adapters' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvraw.adapters.lmcache import _groups, _memo, _pageable, _paged, _place, _utilities
from kvraw.runtime.driver import PointerInfo
from tests.emulator.fake_driver import FakeDriver
from tests.emulator.fake_streams import LEGACY


@pytest.fixture(params=["host", "emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> int | None:
    """The host, and device 0 of the emulator and of the machine."""
    if request.param == "host":
        return None
    if request.param == "gpu":
        return int(request.getfixturevalue("gpu"))
    request.getfixturevalue("fake")
    return 0


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """What the adapters keep between calls is of one driver: forget it around each test."""
    known = (module._known for module in (_memo, _paged, _groups, _utilities))
    kept = (*known, _groups._bits, _place._watched, _pageable._free)
    for one in kept:
        one.clear()
    yield
    for one in kept:
        one.clear()


@pytest.fixture(autouse=True)
def contexts_matter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For LMCache: without a current context the driver knows no pinned memory, and no default stream to ask about."""
    if "lmcache" not in request.module.__name__:
        return
    capturing, info = FakeDriver.stream_capturing, FakeDriver.pointer_info

    def stream_capturing(self: FakeDriver, stream: int) -> bool:
        if stream in LEGACY:
            self._here("stream_capturing")
        return capturing(self, stream)

    def pointer_info(self: FakeDriver, address: int) -> PointerInfo | None:
        found = info(self, address)
        return None if found is not None and found.kind == "host" and not self.context_current() else found

    monkeypatch.setattr(FakeDriver, "stream_capturing", stream_capturing)
    monkeypatch.setattr(FakeDriver, "pointer_info", pointer_info)
