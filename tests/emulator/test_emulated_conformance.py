"""The conformance suite on the shipped PTX, launched by the code that launches it on a GPU."""

from __future__ import annotations

import pytest

from tests.conformance.test_conformance import CASES, check, how_of, name
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.backends import on_device
from tests.helpers.cases import Case, lay


@pytest.mark.parametrize("ids_on", ["host", "device"])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_emulated(case: Case, ids_on: str, fake: FakeDriver) -> None:
    check(case, lambda laid: on_device(laid, 0, ids_on == "device", "kernel"))


@pytest.mark.parametrize("how", ["copy", "staged", "staged, ids on the device"])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_emulated_engines(case: Case, how: str, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    # Slots so small that chunks are cut, and a ring so short that slots are used again.
    monkeypatch.setenv("KVRAW_STAGING_SLOT", str(max(2048, lay(case).chunk_bytes * (1 + case.seed % 5) // 3)))
    monkeypatch.setenv("KVRAW_STAGING_DEPTH", str(1 + case.seed % 3))
    engine, ids_on_device = how_of(case, how)
    check(case, lambda laid: on_device(laid, 0, ids_on_device, engine))
