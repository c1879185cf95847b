"""What the planner chooses beside other work, and rates that callers name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvraw.copying.planner import BUILT_IN, DIRECTIONS, RateLimit
from kvraw.errors import BoundsError, LayoutError, PlacementError
from tests.emulator.fake_driver import FakeDriver
from tests.unit.test_planner import KIB, Call, built_in

__all__ = ["built_in"]

BUSY = RateLimit(True)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_choices_beside_other_work(fake: FakeDriver, direction: str) -> None:
    """Once through device memory, not three times; and no kernel over the link without a pace, whatever the size."""
    for blocks in (1, 16, 512, 8192):
        choice = Call(256, 512, blocks, direction, limit=BUSY).choose()
        assert (choice.engine, choice.rate) == ("kernel", BUILT_IN.paced[direction] * 1e9)
        assert f"at {choice.rate / 1e9:.0f} GB/s" in choice.reason
    choice = Call(256 * KIB, 64, 32, direction, limit=BUSY).choose()
    assert (choice.engine, choice.rate) == ("copy", 0)
    # The copy engine is the faster one, but would take the caller's thread for as long as the copy takes.
    assert Call(32 * KIB, 64, 32, direction, limit=BUSY).choose().engine == "kernel"
    assert Call(256, 512, 512, direction, limit=BUSY).choose(on_device=True).engine == "kernel"
    asked = Call(256, 512, 512, direction, limit=BUSY, engine="staged").choose()
    assert (asked.engine, asked.reason) == ("staged", "asked for")


def test_traffic_decides_by_the_devices_memory(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where device memory is fast beside the link, what staging moves through it costs nobody anything."""
    fast = replace(BUILT_IN, memory=1e6)
    for room in ("chooser", "planner"):
        monkeypatch.setattr(f"kvraw.copying.{room}.profile_for", lambda device: fast)
    assert Call(256, 512, 512, limit=BUSY).choose().engine == "staged"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_rate_that_the_caller_names(fake: FakeDriver, direction: str) -> None:
    for limit, rate in ((RateLimit(False, 5e9), 5e9), (RateLimit(True, 5e9), 5e9), (RateLimit(True, 90e9), None)):
        choice = Call(256 * KIB, 64, 32, direction, limit=limit).choose()
        assert (choice.engine, choice.rate) == ("kernel", rate or BUILT_IN.paced[direction] * 1e9)
        assert "max_rate is kept by kernels alone" in choice.reason
        with pytest.raises(PlacementError, match="max_rate is kept by kernels alone"):
            Call(256 * KIB, 64, 32, direction, limit=limit, engine="staged").choose()
    assert Call(256, 512, 512, direction, limit=RateLimit(False, 5e9)).choose(link=False).rate == 0
    for how in ({"engine": "copy"}, {"ctas": 0}):
        with pytest.raises(PlacementError, match="max_rate is kept by kernels alone"):
            Call(256 * KIB, 64, 32, direction, limit=RateLimit(False, 5e9), **how).choose()


@pytest.mark.parametrize("rate", [-1.0, 1.0, math.inf, math.nan])
def test_what_no_limit_is(rate: float) -> None:
    with pytest.raises(BoundsError, match=f"max_rate is {rate}, must be 0 or in"):
        RateLimit.of("busy", rate)
    with pytest.raises(LayoutError, match="neighbour is 'noisy', must be one of busy, idle"):
        RateLimit.of("noisy")


@pytest.mark.parametrize("rate", ["1e9", None, [1e9]])
def test_what_no_rate_is(rate: Any) -> None:
    with pytest.raises(TypeError, match=r"max_rate is .*, must be a number of bytes a second"):
        RateLimit.of("busy", rate)
    assert RateLimit.of("idle", np.float32(1e9)) == RateLimit.of("idle", 10**9) == RateLimit(False, 1e9)


def test_the_neighbour_that_nobody_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RateLimit.of(None) == RateLimit(True)
    monkeypatch.setenv("KVRAW_NEIGHBOUR", "idle")
    assert RateLimit.of(None) == RateLimit(False)
    assert RateLimit.of("busy") == RateLimit(True)
    monkeypatch.setenv("KVRAW_NEIGHBOUR", "noisy")
    with pytest.raises(ValueError, match="KVRAW_NEIGHBOUR='noisy': must be one of busy, idle"):
        RateLimit.of(None)
