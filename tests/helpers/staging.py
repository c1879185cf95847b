"""Staging slots of a test's own, on a device that other tests use as well."""

from __future__ import annotations

import pytest

from kvraw.engines.arena import StagingArena
from kvraw.engines.device_state import device_state
from kvraw.runtime.context import DeviceScope


def own_slots(monkeypatch: pytest.MonkeyPatch, device: int, nbytes: int | str) -> None:
    """Slots of so many bytes until the test is over."""
    monkeypatch.setenv("KVRAW_STAGING_SLOT", str(nbytes))
    with DeviceScope(device):
        monkeypatch.setattr(device_state(device), "arena", StagingArena(device))
