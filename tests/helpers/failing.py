"""Calls of the system that fail."""

from __future__ import annotations

import os
from collections.abc import Callable

from kvraw.runtime.host import libc


def fails(number: int, nth: int = 1) -> Callable[..., int]:
    """A call that fails with an errno from its n-th use on."""
    left = [nth]

    def call(*args: object, **options: object) -> int:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(number, f"injected: {os.strerror(number)}")
        return 0

    return call


def failing_advice(advice: int, number: int, nth: int = 1) -> Callable[[int, int, int], None]:
    real, fail = libc.advise, fails(number, nth)

    def advise(address: int, nbytes: int, which: int) -> None:
        if which == advice:
            fail()
        real(address, nbytes, which)

    return advise
