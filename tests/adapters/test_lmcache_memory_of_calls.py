"""What calls remember of their arguments, and when they must not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw.adapters import deferred_errors
from kvraw.adapters.lmcache import _memo
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from tests.adapters.test_lmcache_blocks import World, call
from tests.helpers.memory import Laid, Tensor, numbers


class Inference(Tensor):
    """A tensor that was made in torch's inference mode: nothing counts its changes."""

    @property
    def _version(self) -> int:
        raise RuntimeError("Inference tensors do not track version counter.")

    @_version.setter
    def _version(self, value: int) -> None:
        pass


def test_a_table_of_inference_mode_is_read_each_time(fake: object) -> None:
    first, second = World(1, 2, 0, 1), World(1, 2, 0, 1)
    given = numbers(first.paged.addresses, "device", 0)
    table = Inference(given.memory, 0, given.shape, 8)
    other = numbers(second.paged.addresses, "device", 0)
    first.expect("load", [3, 1])
    call(first, [3, 1], ops.H2D, table=table)
    first.check()
    with DeviceScope(0):
        driver().memcpy_async(given.memory.address, other.memory.address, 8 * len(first.paged.addresses), 0)
    second.expect("load", [5, 2])
    call(second, [5, 2], ops.H2D, table=table)
    second.check()
    first.check()
    first.close()
    second.close()


@pytest.mark.parametrize("change", ["shape", "_strides", "_offset"])
@pytest.mark.parametrize("at", [0, 2])
def test_tensors_are_known_by_all_that_they_say(at: int, change: str) -> None:
    group = Laid("host", [(4, 6)] * 3, None, 1).tensors(2)
    calls: list[int] = []

    def make() -> int:
        calls.append(1)
        return len(calls)

    assert [_memo.cached_by_tensors(group, ("test",), make) for _ in range(2)] == [1, 1]
    setattr(group[at], change, {"shape": (2, 3), "_strides": (1, 4), "_offset": 2}[change])
    assert [_memo.cached_by_tensors(group, ("test",), make) for _ in range(2)] == [2, 2]


def quiet(w: World) -> None:
    """Later calls have nothing to raise."""
    for _ in range(4):
        w.objects.memory.read()
        call(w, [0], ops.D2H, objects=w.objects.addresses)


def test_a_bad_id_of_a_call_that_waits_is_raised_once(device: int) -> None:
    """And what the other ids name is moved."""
    w = World(1, 2, device, 2, "host")
    row = w.shape.nh * w.shape.d
    ids = numbers([3, 9, 5], "device", device)
    w.expect("store", [3])
    last = np.zeros_like(w.objects.arrays[1])
    for layer in range(w.shape.nl):
        for plane in range(2):
            last[plane, layer, : w.shape.bs] = w.paged.arrays[layer][plane, 5].reshape(w.shape.bs, row)
    w.objects.arrays[1][:, :, : w.shape.bs] = last[:, :, : w.shape.bs]
    with pytest.raises(kvraw.BoundsError, match=r"block_ids\[1\] is 9, must be in \[0, 7\)"):
        call(w, ids, ops.D2H)
    w.check()
    assert not deferred_errors._found[device]
    quiet(w)
    w.close()


def test_a_bad_slot_of_a_call_that_waits_is_raised_once(device: int) -> None:
    w = World(1, 2, device, 1)
    rows = Laid("host", [(2, w.shape.nl, 3, 18)], device, 3)
    slots = numbers([5, 99, 0], "device", device)
    for at, slot in ((0, 5), (2, 0)):
        for layer in range(w.shape.nl):
            for plane in range(2):
                taken = w.paged.arrays[layer][plane].reshape(14, 18)[slot]
                rows.arrays[0][plane, layer, at] = taken

    def move(where: Any) -> None:
        ops.multi_layer_kv_transfer(rows.tensors(2)[0], w.paged.tensors(2), where, device, 14, ops.D2H, 1)

    with pytest.raises(kvraw.BoundsError, match=r"slot_mapping\[1\] is 99, must be in \[0, 14\)"):
        move(slots)
    rows.check()
    assert not deferred_errors._found[device]
    move(np.array([-1, -1, -1]))
    rows.check()
    w.close()
