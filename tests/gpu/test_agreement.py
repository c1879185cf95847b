"""The emulator and the GPU agree: the same random cases on both, byte for byte."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.conformance.test_random_cases import emulated
from tests.helpers.backends import on_device
from tests.helpers.cases import draw_case, lay


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(400))
def test_emulator_and_gpu_agree(seed: int, gpu: int) -> None:
    laid = lay(draw_case(random.Random(seed).choice))
    there, here = on_device(laid, gpu, ids_on_device=seed % 2 == 0), emulated(laid)
    for a, b, want in zip(there, here, (laid.paged_after, laid.chunks_after), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, want)
