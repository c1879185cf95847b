"""Repeated calls of LMCache's operations take a launch that was bound before: the same bytes, checks and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw.adapters import tensors
from kvraw.adapters.lmcache import _blocks, _groups, _launch
from kvraw.copying.chooser import Chooser
from kvraw.runtime.context import DeviceScope
from tests.adapters.test_lmcache_blocks import World, call
from tests.adapters.test_lmcache_groups import TOKENS, Plan, S
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.memory import Laid, Tensor, numbers
from tests.helpers.oracle import move


@pytest.fixture(autouse=True)
def current(request: pytest.FixtureRequest) -> Iterator[None]:
    """The device's context is current, as it is where torch is in use."""
    name = "device" if "device" in request.fixturenames else "fake"
    device = request.getfixturevalue(name)
    with DeviceScope(device if name == "device" else 0):
        yield


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call was a repeated one."""
    seen: list[bool] = []
    repeat = _launch.Copies.repeat

    def noted(*args: Any, **more: Any) -> bool:
        seen.append(repeat(*args, **more))
        return seen[-1]

    monkeypatch.setattr(_launch.Copies, "repeat", noted)
    return seen


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize(("number", "planes"), [(1, 2), (2, 2), (3, 1), (7, 2), (8, 2)])
def test_blocks_between_device_memory(device: int, bound: list[bool], direction: str, number: int, planes: int) -> None:
    w = World(number, planes, device, 3, "device")
    rng = np.random.default_rng(4)
    for k in range(8):
        ids = rng.permutation(7)[:6].tolist()
        skip = k % 3
        w.expect(direction, ids, skip)
        call(w, numbers(ids, "device", device), ops.D2H if direction == "store" else ops.H2D, skip=skip)
        w.check()
    assert bound[-3:] == [True] * 3
    w.close()


class Slots:
    """A cache and tokens of one kind of memory, which go through `multi_layer_kv_transfer` and one layer's way."""

    def __init__(self, device: int, kind: str) -> None:
        self.w, self.device = World(1, 2, device, 1), device
        self.rows = Laid(kind, [(2, self.w.shape.nl, 5, 18)] * 2, device, 3)
        self.layers = self.w.paged.tensors(2)

    def expect(self, slots: list[int], which: int, to_host: bool, skip: int) -> None:
        for layer in range(self.w.shape.nl):
            for plane in range(2):
                paged = self.w.paged.arrays[layer][plane].reshape(14, 18)
                mine = self.rows.arrays[which][plane, layer]
                for at in range(skip, 5):
                    if slots[at] >= 0 and to_host:
                        mine[at] = paged[slots[at]]
                    elif slots[at] >= 0:
                        paged[slots[at]] = mine[at]

    def move(self, slots: Any, which: int, to_host: bool, skip: int = 0) -> None:
        ops.multi_layer_kv_transfer(
            self.rows.tensors(2)[which], self.layers, slots, self.device, 14, int(to_host), 1, 0, 0, skip
        )


@pytest.mark.parametrize("kind", ["device", "pinned"])
@pytest.mark.parametrize("to_host", [True, False])
def test_slots(device: int, bound: list[bool], kind: str, to_host: bool) -> None:
    s = Slots(device, kind)
    rng = np.random.default_rng(7)
    for k in range(8):
        slots = rng.permutation(14)[:5].tolist()
        slots[k % 5] = -1
        s.expect(slots, k % 2, to_host, k % 3)
        s.move(numbers(slots, "device", device), k % 2, to_host, k % 3)
        s.w.check()
        s.rows.check()
    assert bound[-3:] == [True] * 3


def test_a_bad_slot_is_raised_once(device: int, bound: list[bool]) -> None:
    s = Slots(device, "device")
    good, bad = numbers([0, 1, 2, 3, 4], "device", device), numbers([0, 1, 77, 3, 4], "device", device)
    for slots in (good, good, good, bad):
        s.move(slots, 0, True)
    assert bound[-1]
    s.rows.memory.read()
    with pytest.raises(kvraw.BoundsError, match=r"slot_mapping\[2\] is 77, must be in \[0, 14\)"):
        s.move(good, 0, True)
    for _ in range(3):
        s.move(good, 0, True)
    assert bound[-3:] == [True] * 3


def test_pinned_memory_that_is_another(fake: FakeDriver, bound: list[bool]) -> None:
    """Memory that was pinned, and is again, at the same addresses: it is looked up anew, and unpinned as well."""
    s = Slots(0, "host")
    slots = numbers([4, 0, 9, 1, 2], "device", 0)
    start, nbytes = s.rows.memory.address, s.rows.memory.nbytes

    def moved() -> None:
        s.expect([4, 0, 9, 1, 2], 0, True, 0)
        s.move(slots, 0, True)
        s.rows.check()

    begin = start // 4096 * 4096
    whole = -(-(start + nbytes - begin) // 4096) * 4096
    for pinned in (True, True, False, True):
        with DeviceScope(0):
            if pinned:
                fake.host_register(begin, whole)
            for _ in range(3):
                moved()
            if pinned:
                s.w.paged.memory.read()
                fake.host_unregister(begin)
    assert bound.count(True) >= 3


def test_a_capture_goes_the_general_way(fake: FakeDriver, bound: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    s = Slots(0, "device")
    slots = numbers([0, 1, 2, 3, 4], "device", 0)
    with kvraw.Stream(0) as stream:
        monkeypatch.setattr(tensors, "_raw_stream", lambda device: stream.handle)
        for _ in range(3):
            s.move(slots, 0, True)
        assert bound[-1]
        fake.capture(stream.handle, True)
        s.move(slots, 0, True)
        fake.capture(stream.handle, False)
        stream.synchronize()
    assert not bound[-1]


LAYERS: dict[str, Callable[[Any, Any, Tensor, Any], None]] = {
    "layer": lambda tokens, layer, slots, way: ops.single_layer_kv_transfer(tokens, layer, slots, way, 1),
    "token-major": lambda tokens, layer, slots, way: ops.single_layer_kv_transfer(tokens, layer, slots, way, 1, True),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("way", [ops.D2H, ops.H2D])
def test_layers(device: int, bound: list[bool], name: str, way: Any) -> None:
    w = World(1, 2, device, 1)
    major = name == "token-major"
    laid = [Laid("device", [(n, 2, 18) if major else (2, n, 18)], device, n) for n in (3, 5)]
    rng = np.random.default_rng(2)
    for k in range(8):
        tokens, slots = laid[k % 2], rng.permutation(14)[: (3, 5)[k % 2]].tolist()
        for plane in range(2):
            paged = w.paged.arrays[0][plane].reshape(14, 18)
            mine = tokens.arrays[0][:, plane] if major else tokens.arrays[0][plane]
            for at, slot in enumerate(slots):
                if way == ops.D2H:
                    mine[at] = paged[slot]
                else:
                    paged[slot] = mine[at]
        LAYERS[name](tokens.tensors(2)[0], w.paged.tensors(2)[0], numbers(slots, "device", device), way)
        w.check()
        tokens.check()
    assert bound[-3:] == [True] * 3


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each plan was carried out by a program."""
    seen: list[bool] = []
    run = _groups._Repeats.run

    def noted(*args: Any) -> bool:
        seen.append(run(*args))
        return seen[-1]

    monkeypatch.setattr(_groups._Repeats, "run", noted)
    return seen


@pytest.mark.parametrize("number", [1, 0, 7, 9])
@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("alignment", [64, 1 << 20])
def test_plans(device: int, programs: list[bool], to_host: bool, number: int, alignment: int) -> None:
    p = Plan(device, to_host, number)
    for k in range(5):
        skip = k % 2
        if to_host:
            temp = [t.reshape(2, S.nl, TOKENS, S.nh * S.d) for t in p.temp.arrays]
            for batch, left_out in enumerate((skip, 0)):
                ids = p.ids[batch * 4 :][:4]
                move(number, S, p.cache.arrays, temp, "2LTD", TOKENS, "store", "block", ids, left_out)
                for at in range(2):
                    p.host.arrays[batch * 2 + at][:] = temp[at]
        else:
            move(number, S, p.cache.arrays, p.host.arrays, "2LTD", TOKENS, "load", "block", p.ids, skip)
            for at in range(2):
                p.temp.arrays[at][:] = p.host.arrays[2 + at].ravel()
        p.run(steps=p.steps((skip, 0)), alignment=alignment)
        for one in (p.cache, p.host, p.temp):
            one.check()
    assert programs == [False, True, True, True, True]
    with pytest.raises(kvraw.KvrawError, match="must lie within the 8 ids"):
        p.run(steps=p.steps(block_ids_offset=5))
    p.close()


def test_bad_ids_of_a_plan_are_raised_once(device: int, programs: list[bool]) -> None:
    p = Plan(device, True)
    p.ids = [8, 0, 3, 77, 5, 99, 7, 4]
    p.device_ids = numbers(p.ids, "device", device)
    for later in (False, True):
        p.run()
        assert programs[-1] is later
        p.host.memory.read()
        with pytest.raises(kvraw.BoundsError, match=r"block_ids\[[31]\] is (77|99), must be in \[0, 9\)"):
            p.run(groups=[], steps=[])
        p.run(groups=[], steps=[])
    p.close()


def test_a_plan_in_a_capture(fake: FakeDriver, programs: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    p = Plan(0, True)
    with kvraw.Stream(0) as stream:
        monkeypatch.setattr(tensors, "_raw_stream", lambda device: stream.handle)
        for _ in range(2):
            p.run()
        fake.capture(stream.handle, True)
        p.run()
        fake.capture(stream.handle, False)
        stream.synchronize()
    assert programs == [False, True, False]
    p.close()


def test_host_memory_of_a_plan_that_is_pinned_no_more(fake: FakeDriver, programs: list[bool]) -> None:
    """It was registered by somebody else: a plan then goes step by step."""
    p = Plan(0, False)
    p.host = Laid("host", [(2, S.nl, TOKENS, S.nh * S.d)] * 4, 0, 2)
    memory = p.host.memory
    start = memory.address // 4096 * 4096
    fake.host_register(start, -(-(memory.address + memory.nbytes - start) // 4096) * 4096)
    for _ in range(2):
        p.run()
    p.temp.memory.read()
    fake.host_unregister(start)
    p.run()
    p.temp.memory.read()
    assert programs == [False, True, False]
    p.close()


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call went as one before, its objects in memory that was asked about."""
    seen: list[bool] = []
    repeat = _blocks.Blocks._repeat

    def noted(*args: Any) -> bool:
        seen.append(repeat(*args))
        return seen[-1]

    monkeypatch.setattr(_blocks.Blocks, "_repeat", noted)
    return seen


@pytest.mark.parametrize("engine", ["auto", "kernel"])
@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("kind", ["host ids", "device ids", "tensors"])
def test_blocks_of_pinned_memory(
    device: int, pinned: list[bool], monkeypatch: pytest.MonkeyPatch, engine: str, direction: str, kind: str
) -> None:
    monkeypatch.setenv("KVRAW_ENGINE", engine)
    w = World(1, 2, device, 3, "pinned")
    rng = np.random.default_rng(4)
    objects = w.objects.tensors(2) if kind == "tensors" else None
    for k in range(6):
        ids = rng.permutation(7)[:6].tolist()
        skip = k % 2
        w.expect(direction, ids, skip)
        given = numbers(ids, "device", device) if kind == "device ids" else ids
        call(w, given, ops.D2H if direction == "store" else ops.H2D, skip=skip, objects=objects)
        w.check()
    assert pinned[-3:] == [True] * 3
    w.close()


def test_objects_that_are_pinned_no_more(fake: FakeDriver, pinned: list[bool]) -> None:
    w = World(1, 2, 0, 2, "host")
    memory = w.objects.memory
    begin = memory.address // 4096 * 4096
    whole = -(-(memory.address + memory.nbytes - begin) // 4096) * 4096
    for there in (True, False, True):
        if there:
            fake.host_register(begin, whole)
        for _ in range(3):
            w.expect("store", [3, 1, 6, 0], 0)
            call(w, [3, 1, 6, 0], ops.D2H)
            w.check()
        assert pinned[-1] is there
        if there:
            fake.host_unregister(begin)
    w.close()


@pytest.mark.parametrize("engine", ["auto", "kernel"])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("to_host", [True, False])
def test_objects_pinned_one_by_one(
    fake: FakeDriver, pinned: list[bool], monkeypatch: pytest.MonkeyPatch, engine: str, on_device: bool, to_host: bool
) -> None:
    """Each in a registration of its own, side by side; one of them is pinned no more, or otherwise than before."""
    monkeypatch.setenv("KVRAW_ENGINE", engine)
    w = World(1, 2, 0, 3, "host")
    places, size = w.objects.addresses, w.objects.arrays[0].nbytes
    for place in places:
        fake.host_register(place, size)
    rng = np.random.default_rng(9)

    def calls(count: int) -> None:
        for _ in range(count):
            ids = rng.permutation(7)[:6].tolist()
            w.expect("store" if to_host else "load", ids, 0)
            call(w, numbers(ids, "device", 0) if on_device else ids, ops.D2H if to_host else ops.H2D)
            w.check()

    calls(5)
    assert pinned[-2:] == [True] * 2
    for gone in (2, 0):
        before = fake.pointer_number(places[gone])
        w.objects.memory.read()
        fake.host_unregister(places[gone])
        calls(2)  # by way of pinned memory
        assert pinned[-2:] == [False] * 2
        fake.host_register(places[gone], size)
        assert fake.pointer_number(places[gone]) != before
        calls(4)
        assert pinned[-1]
    w.objects.memory.read()
    for place in places:
        fake.host_unregister(place)
    w.close()


@pytest.mark.parametrize("on_device", [False, True])
def test_a_bad_id_of_pinned_memory(device: int, pinned: list[bool], on_device: bool) -> None:
    w = World(1, 2, device, 2, "pinned")
    good, bad = [3, 1, 6, 0], [3, 1, 9, 0]
    if on_device:
        good, bad = numbers(good, "device", device), numbers(bad, "device", device)  # type: ignore[assignment]
    for _ in range(3):
        call(w, good, ops.D2H)
    if on_device:
        call(w, bad, ops.D2H)
        w.objects.memory.read()
        bad = good
    with pytest.raises(kvraw.BoundsError, match=r"block_ids\[2\] is 9, must be in \[0, 7\)"):
        call(w, bad, ops.D2H)
    for _ in range(2):
        call(w, good, ops.D2H)
    assert pinned[-1]
    w.close()


@pytest.mark.parametrize("kind", ["host ids", "device ids"])
@pytest.mark.parametrize("place", ["pinned", "device"])
@pytest.mark.parametrize("best", ["kernel", "copy at best"])
def test_repeated_calls_choose_no_engine(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, kind: str, place: str, best: str
) -> None:
    """Also where the choice of a kind of calls depends on the items that follow each other."""
    chosen: list[int] = []
    choose = Chooser.choose
    monkeypatch.setattr(Chooser, "choose", lambda *args: (chosen.append(1), choose(*args))[1])
    if best != "kernel":
        monkeypatch.setattr(Chooser, "_depends", lambda self, engine, c: c.host_ids and (c.src.link or c.dst.link))
    w = World(1, 2, 0, 2, place)
    for k, ids in enumerate(
        ([3, 1, 6, 0], [0, 2, 4, 6], [5, 3, 1, 6], [6, 4, 2, 0], [1, 3, 5, 0], [2, 6, 0, 4], [4, 1, 6, 2])
    ):
        w.expect("store", ids, 0)
        given = numbers(ids, "device", 0) if kind == "device ids" else ids
        if k >= 5:
            chosen.clear()
        call(w, given, ops.D2H)
        assert k < 5 or not chosen
        w.check()
    w.close()
