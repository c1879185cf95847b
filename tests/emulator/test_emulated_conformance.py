"""The conformance suite on the shipped PTX, launched by the code that launches it on a GPU."""

from __future__ import annotations

import pytest

from tests.conformance.test_conformance import check, how_of, runs
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.backends import on_device
from tests.helpers.cases import Case
from tests.helpers.classes import staging_slot


@pytest.mark.parametrize(("case", "how"), runs("kernel", "kernel, ids on the device", "paced"))
def test_emulated(case: Case, how: str, fake: FakeDriver) -> None:
    engine, ids_on_device = how_of(case, how)
    check(case, lambda laid: on_device(laid, 0, ids_on_device, engine))


@pytest.mark.parametrize(("case", "how"), runs("copy", "staged", "staged, ids on the device"))
def test_emulated_engines(case: Case, how: str, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    # Slots so small that chunks are cut, and a ring so short that slots are used again.
    monkeypatch.setenv("KVRAW_STAGING_SLOT", str(staging_slot(case)))
    monkeypatch.setenv("KVRAW_STAGING_DEPTH", str(1 + case.seed % 3))
    engine, ids_on_device = how_of(case, how)
    check(case, lambda laid: on_device(laid, 0, ids_on_device, engine))
