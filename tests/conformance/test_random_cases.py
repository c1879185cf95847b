"""Random geometries, odd sizes, misaligned bases, empty and extreme indices, on every engine that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvraw.runtime import driver as driver_module
from tests.conformance.test_conformance import check
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.backends import Result, on_device, on_host
from tests.helpers.cases import Laid, draw_case
from tests.helpers.profile import examples


def emulated(laid: Laid) -> Result:
    before = driver_module.install(FakeDriver(seed=laid.case.seed))  # type: ignore[arg-type]
    try:
        return on_device(laid, 0, ids_on_device=laid.case.seed % 2 == 0)
    finally:
        driver_module.install(before)


@pytest.mark.parametrize(
    "backend", [on_host("reference"), on_host("cpu"), emulated], ids=["reference", "cpu", "emulator"]
)
@given(data=st.data())
@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
def test_random_cases(backend: Callable[[Laid], Result], data: st.DataObject) -> None:
    check(draw_case(lambda options: data.draw(st.sampled_from(options))), backend)
