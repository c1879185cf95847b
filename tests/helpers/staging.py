"""Staging slots of a test's own, on a device that other tests use as well."""

from __future__ import annotations

import pytest

from kvraw.copying.device_state import device_state
from kvraw.copying.staging_ring import StagingRings
from kvraw.runtime.context import DeviceScope


def own_slots(monkeypatch: pytest.MonkeyPatch, device: int, nbytes: int | str) -> None:
    """Slots of so many bytes until the test is over."""
    monkeypatch.setenv("KVRAW_STAGING_SLOT", str(nbytes))
    with DeviceScope(device):
        monkeypatch.setattr(device_state(device), "arena", StagingRings(device))
