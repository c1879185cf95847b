"""The future of what was enqueued, over completions that say what they are told to."""

from __future__ import annotations

import time
from typing import Any

import pytest

import kvraw
from kvraw.copying.transfer import Transfer
from kvraw.errors import BoundsError, TransferTimeoutError


class Completion:
    """Over once it was waited for."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds, self.ends_with, self.error, self.waited = seconds, error, None, False

    def done(self) -> bool:
        return self.waited

    def wait(self, timeout: float | None = None) -> None:
        if timeout is not None and timeout < self.seconds:
            raise TransferTimeoutError("not yet")
        time.sleep(self.seconds)
        self.waited, self.error = True, self.ends_with  # type: ignore[assignment]


def made(*completions: Any) -> Transfer:
    return Transfer(completions, "kernel", 0)


def test_nothing_to_do_is_done() -> None:
    nothing = Transfer()
    assert nothing.done()
    assert nothing.done(3)
    assert (nothing.engine, nothing.completion, nothing.explain()) == ("none", None, "engine none")
    nothing.wait()
    nothing.wait_on(None)


def test_it_is_done_when_all_parts_are_and_a_layer_when_its_own_is() -> None:
    parts = Completion(), Completion(), Completion()
    transfer = made(*parts)
    parts[0].wait()
    assert [transfer.done(k) for k in range(3)] == [True, False, False]
    assert not transfer.done()
    transfer.wait()
    assert transfer.done()
    assert (made(parts[0]) & made(parts[1]))._completions == parts[:2]


def test_all_parts_are_waited_for_before_the_first_error_is_raised() -> None:
    parts = Completion(error=BoundsError("the first")), Completion(error=BoundsError("another"))
    for _ in range(2):
        with pytest.raises(BoundsError, match="the first"):
            made(*parts).wait()
    assert all(one.waited for one in parts)


def test_one_time_out_for_all_parts() -> None:
    parts = Completion(0.05), Completion(0.05)
    with pytest.raises(TransferTimeoutError):
        made(*parts).wait(timeout=0.08)
    assert [one.waited for one in parts] == [True, False]
    made(*parts).wait(timeout=10)


def test_every_call_returns_the_one_kind() -> None:
    assert type(kvraw.memcpy_batch([], [], [])) is kvraw.Transfer
    for name in ("Copy", "BatchCopy", "LayerwiseLoad"):
        assert not hasattr(kvraw, name)
