"""The conformance suite on the shipped PTX, launched by the code that launches it on a GPU."""

from __future__ import annotations

import pytest

from tests.conformance.test_conformance import CASES, check, name
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.backends import on_device
from tests.helpers.cases import Case


@pytest.mark.parametrize("ids_on", ["host", "device"])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_emulated(case: Case, ids_on: str, fake: FakeDriver) -> None:
    check(case, lambda laid: on_device(laid, 0, ids_on == "device"))
