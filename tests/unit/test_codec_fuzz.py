"""A small run of the fuzzer, and that its fences hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fuzz import codec as fuzz


@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_streams(seed: int) -> None:
    done, refused = fuzz.run(4000, seed)
    assert done >= 4000
    assert refused >= 5


@pytest.mark.parametrize(("at_end", "reach"), [(True, 7), (False, -1)])
def test_a_touch_outside_ends_the_process(at_end: bool, reach: int) -> None:
    code = (
        "import ctypes, numpy as np; from tests.fuzz.codec import Fenced; "
        f"a = Fenced(np.zeros(7, np.uint8), {at_end}); ctypes.string_at(a.array.ctypes.data + {reach}, 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -11
