"""What is captured into a graph lives as long as the process, and what its replays met is raised by a later call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw.adapters import deferred_errors, sglang, tensors, vllm
from kvraw.copying.device_state import device_state
from kvraw.runtime.completion import Operation
from kvraw.runtime.context import DeviceScope
from tests.adapters.test_lmcache_blocks import World, call
from tests.adapters.test_lmcache_groups import Plan
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.memory import Laid, numbers
from tests.helpers.retrieval import Retrieval
from tests.helpers.torch_like import TorchLike


@pytest.fixture
def w(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchLike]:
    deferred_errors._found[0].clear()
    made = TorchLike(0).install(monkeypatch)
    assert made.stream is not None
    handle = made.stream.handle
    monkeypatch.setattr(tensors, "_raw_stream", lambda device: handle)
    yield made
    fake.capture(handle, False)
    made.synchronize()


def blocks(w: TorchLike, on_device: bool, kind: str = "pinned") -> Any:
    world = World(1, 2, 0, 2, kind)
    ids = numbers([3, 1], "device", 0) if on_device else [3, 1]
    return world, lambda: call(world, ids, ops.H2D)


def slots(w: TorchLike, kind: str) -> Any:
    world, rows = World(1, 2, 0, 1), Laid(kind, [(2, 2, 3, 18)], 0, 3)
    at = numbers([5, 0, 3], "device", 0)
    return (world, rows), lambda: ops.multi_layer_kv_transfer(
        rows.tensors(2)[0], world.paged.tensors(2), at, 0, 14, ops.H2D, 1
    )


def planned(w: TorchLike) -> Any:
    plan = Plan(0, True)
    return plan, plan.run


def retrieved(w: TorchLike) -> Any:
    retrieval = Retrieval(0)
    return retrieval, retrieval.run


def swapped(w: TorchLike, mapped: bool) -> Any:
    src, dst = w.put("pinned", np.zeros((4, 64), np.uint8)), w.empty("device", (4, 64))
    if mapped:
        pairs = w.put("host", np.array([[0, 1], [2, 3]]))
        return (src, dst), lambda: vllm.swap_blocks(src, dst, 64, pairs)
    given = [w.put("host", np.array(x)) for x in ([src.data_ptr()], [dst.data_ptr()], [64])]
    return (src, dst), lambda: vllm.swap_blocks_batch(*given)


def direct(w: TorchLike) -> Any:
    src, dst = w.put("pinned", np.zeros((4, 64), np.uint8)), w.empty("device", (4, 64))
    index = w.put("host", np.arange(3))
    return (src, dst), lambda: sglang.transfer_kv_direct([src], [dst], index, index, 1)


CASES: dict[str, Callable[[TorchLike], Any]] = {
    "blocks by ids on the host": lambda w: blocks(w, False),
    "blocks by ids on the device": lambda w: blocks(w, True),
    "blocks to the device": lambda w: blocks(w, False, "device"),
    "blocks to the device by ids there": lambda w: blocks(w, True, "device"),
    "slots": lambda w: slots(w, "pinned"),
    "a plan": planned,
    "a retrieval": retrieved,
    "swap_blocks": lambda w: swapped(w, True),
    "swap_blocks_batch": lambda w: swapped(w, False),
    "direct": direct,
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_graph_uses_is_kept(fake: FakeDriver, w: TorchLike, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    memory, run = CASES[name](w)
    ended: list[weakref.ref[Operation]] = []
    begin = Operation.__init__

    def made(self: Operation, *args: Any) -> None:
        begin(self, *args)
        if self.captured:
            ended.append(weakref.ref(self))

    monkeypatch.setattr(Operation, "__init__", made)
    assert w.stream is not None
    run()  # what is looked up once is
    w.synchronize()
    fake.capture(w.stream.handle, True)
    run()
    fake.capture(w.stream.handle, False)
    w.synchronize()
    for _ in range(3):
        run()
        w.synchronize()
    with DeviceScope(0):
        device_state(0).completions.drain()
    gc.collect()
    assert ended
    assert all(ref() is not None for ref in ended)
    del memory


def test_what_replays_met_is_raised_later(fake: FakeDriver, w: TorchLike) -> None:
    world = World(1, 2, 0, 2)
    assert w.stream is not None
    ids = numbers([0, 9], "device", 0)
    fake.capture(w.stream.handle, True)
    for _ in range(12):
        call(world, ids, ops.D2H)
    call(world, [0], ops.D2H)
    fake.capture(w.stream.handle, False)
    w.synchronize()  # the emulator's capture runs at once: a replay
    for _ in range(12):
        with pytest.raises(kvraw.BoundsError, match=r"block_ids\[1\] is 9, must be in \[0, 7\)"):
            call(world, [0], ops.D2H)
    for _ in range(4):
        call(world, [0], ops.D2H)
    w.synchronize()
    world.close()


@pytest.mark.parametrize("make", [lambda w: blocks(w, True, "host"), lambda w: slots(w, "host")])
def test_pageable_memory_in_a_capture(make: Callable[[TorchLike], Any], w: TorchLike, fake: FakeDriver) -> None:
    assert w.stream is not None
    used, work = make(w)
    work()  # fine without
    w.synchronize()
    fake.capture(w.stream.handle, True)
    with pytest.raises(kvraw.PlacementError, match="that a graph captures; pin it"):
        work()
    del used
