"""A call that fails in the midst: what it enqueued is over when the error comes, and what it took is given back."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.copying.device_state import device_state
from kvraw.copying.staging_ring import StagingRing, StagingRings
from kvraw.errors import DriverError
from kvraw.layouts.geometry import Geometry
from kvraw.runtime import driver as driver_module
from kvraw.runtime.completion import CompletionQueue
from kvraw.runtime.context import DeviceScope
from tests.emulator.fake_driver import FakeDriver
from tests.emulator.fake_streams import _Ticket
from tests.helpers.backends import device_ids
from tests.helpers.world import World

RESULT = "CUDA_ERROR_OUT_OF_MEMORY"
MANY = Geometry(layers=2, blocks=600, block_size=1, heads=1, head_size=8, element_size=2)
# What a call enqueues work by, or needs while it enqueues.
ENQUEUEING = ("launch", "memcpy_async", "memcpy_batch_async", "memcpy_2d_async", "memset_async")
ENQUEUEING += ("event_record", "stream_wait_event", "event_create")


def small(kind: str, verb: str, engine: str) -> tuple[World, Callable[[], Any]]:
    """A world, and a call with ids on the host or the device, beside its stream, or of more ids than a launch holds."""
    world = World(0, MANY, chunks=40) if kind == "many" else World(0)
    ids: Any = np.arange(590 if kind == "many" else 24)[::-1].copy()
    if kind == "device":
        ids = device_ids(tuple(ids.tolist()), 0, world.stream)
    plan = kvraw.TransferPlan(world.cache, verb, engine=engine, chunk_tokens=16)
    return world, lambda: plan(world.chunks, ids, stream=world.stream, side=kind == "side")


def batch(legacy: bool) -> tuple[World, Callable[[], Any]]:
    """A batch in several calls of the driver."""
    world = World(0)
    (target,) = world.pool.chunks(1, 16 * 64)
    dst, src = (
        np.uint64(a) + np.arange(16, dtype=np.uint64) * np.uint64(64) for a in (target.address, world.memory.address)
    )
    stream = 0 if legacy else world.stream
    return world, lambda: (kvraw.memcpy_batch(dst[::-1], src, [64] * 16, stream=stream, device=0), target)[0]


ENGINES, KINDS = ("kernel", "copy", "staged"), ("plain", "side", "many", "device")
NO_IDS_THERE, ONE_TABLE = ("copy", "device"), ("copy", "many")
CALLS: dict[str, Callable[[], tuple[World, Callable[[], Any]]]] = {
    f"{verb} by {engine}, {kind}": functools.partial(small, kind, verb, engine)
    for verb, engine, kind in itertools.product(("store", "load"), ENGINES, KINDS)
    if (engine, kind) not in (NO_IDS_THERE, ONE_TABLE)
}
CALLS |= {"batch": functools.partial(batch, False), "batch of the default stream": functools.partial(batch, True)}


@contextlib.contextmanager
def ready(name: str, patch: pytest.MonkeyPatch) -> Iterator[tuple[FakeDriver, World, Callable[[], Any]]]:
    """A call that went well once."""
    patch.setenv("KVRAW_STAGING_SLOT", "4K")
    if "batch" in name or "by copy" in name:
        patch.setenv("KVRAW_MAX_BATCH", "5")
    fake = FakeDriver()
    before = driver_module.install(fake)  # type: ignore[arg-type]
    try:
        with DeviceScope(0):
            device_state(0).arena = StagingRings(0)
        world, call = CALLS[name]()
        call().wait()
        settle(fake, world)
        yield fake, world, call
        settle(fake, world)
        world.close()
        assert not fake.violations
    finally:
        driver_module.install(before)


def settle(fake: FakeDriver, world: World) -> None:
    """Nothing is under way, and everything that is over was given back."""
    world.stream.synchronize()
    with DeviceScope(0):
        completions = device_state(0).completions
        completions.drain()
        while fake._step():
            pass


@pytest.mark.parametrize("name", CALLS)
def test_what_was_enqueued_is_over_when_the_next_step_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ready(name, monkeypatch) as (fake, world, call):
        before = fake.calls.copy()
        call().wait()
        settle(fake, world)
        used = fake.calls - before
        tried = [(one, nth) for one in ENQUEUEING for nth in {1, 2, used[one] // 2, used[one]} if 0 < nth <= used[one]]
        assert len(tried) > 1
        for one, nth in tried:
            fake.fail(one, nth, RESULT)
            with pytest.raises(DriverError, match=f"{one} failed: {RESULT}"):
                call()
            # Whoever learns of the error may free chunks and tensors, or write to them, at once.
            assert not [op.call for op in fake.pending() if "event" not in op.call], (one, nth)
        call().wait()


@pytest.mark.parametrize("name", ["load by kernel, side", "store by staged, plain", "store by copy, plain"])
def test_failing_calls_keep_no_events(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ready(name, monkeypatch) as (fake, world, call):
        one = "memcpy_batch_async" if "copy" in name else "launch"
        kept = []
        for _ in range(12):
            fake.fail(one, 1, RESULT)
            with pytest.raises(DriverError, match=f"{one} failed"):
                call()
            settle(fake, world)
            kept.append(fake.live())
        assert kept[1:] == kept[:1] * 11


def test_a_stream_that_stands_still_does_not_hold_up_the_books() -> None:
    """Operations behind one that is not over are looked at in their turn: what they borrowed is given back."""
    fake = FakeDriver()
    before = driver_module.install(fake)  # type: ignore[arg-type]
    try:
        with DeviceScope(0), kvraw.Stream(0) as still, kvraw.Stream(0) as other:
            completions, never = CompletionQueue(), _Ticket()
            fake._push(still.handle, "wait", lambda: None, never)
            stuck = [completions.begin(still.handle).commit(None) for _ in range(3)]
            for _ in range(300):
                completions.begin(other.handle).commit(None)
                other.synchronize()
            assert len(completions) < 60
            assert len(fake._events) < 60
            assert not any(one.done() for one in stuck)
            never.done = True
            completions.drain()
            assert all(one.done() for one in stuck)
    finally:
        driver_module.install(before)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_the_slots_of_a_ring_take_turns(fake: FakeDriver, depth: int) -> None:
    with DeviceScope(0):
        ring = StagingRing(0, 4096, depth)
        turns = [slot.address for slot in ring.coming(3 * depth)]
        assert len(set(turns)) == depth
        assert turns == turns[:depth] * 3
