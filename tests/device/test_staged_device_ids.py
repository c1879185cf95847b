"""Whole chunks through staging slots by ids on the device: later calls run a bound program, with the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.arrays import IndexVector
from kvraw.cache import PagedCache
from kvraw.layouts.formats import FORMATS
from kvraw.layouts.geometry import CacheLayout, Geometry
from tests.helpers.memory import Laid, numbers
from tests.helpers.oracle import PAGED, Shape, move
from tests.helpers.staging import own_slots

S = Shape(nl=2, nb=9, bs=2, nh=2, d=8, planes=2)
TOKENS = 4
BYTES = 2 * S.nl * TOKENS * S.nh * S.d


class Setting:
    """A cache, six chunks in pinned memory, and a plan that goes staged."""

    def __init__(self, device: int, direction: Any) -> None:
        paged = PAGED[(1, 2)]
        self.direction = direction
        self.cache = Laid("device", [paged.shape(S)] * paged.tensors(S), device, 1)
        self.chunks = Laid("pinned", [(2, S.nl, TOKENS, S.nh * S.d)] * 6, device, 2)
        layout = CacheLayout(FORMATS[1], Geometry(S.nl, S.nb, S.bs, S.nh, S.d // 2, 2))
        described = PagedCache(layout, np.array(self.cache.addresses, np.uint64), device)
        self.plan = kvraw.TransferPlan(described, direction, chunk_tokens=TOKENS, engine="staged")

    def expect(self, ids: list[int], chosen: list[int]) -> None:
        arrays = [self.chunks.arrays[k] for k in chosen]
        move(1, S, self.cache.arrays, arrays, "2LTD", TOKENS, self.direction, "block", ids, 0)


@pytest.mark.parametrize("slot", [BYTES * 4, BYTES, BYTES // 2])
@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("width", [8, 4])
def test_later_calls(device: int, monkeypatch: pytest.MonkeyPatch, direction: str, slot: int, width: int) -> None:
    own_slots(monkeypatch, device, slot)
    w = Setting(device, direction)
    rng = np.random.default_rng(5)
    with kvraw.Stream(device) as stream:
        for _ in range(12):
            chosen = rng.permutation(6)[:4].tolist()
            ids = rng.permutation(S.nb)[:8].tolist()
            w.expect(ids, chosen)
            there = numbers(ids, "device", device)
            if width == 4:
                there = numbers(np.array(ids, np.int32).view(np.int64).tolist(), "device", device)
                index = IndexVector(None, there.data_ptr(), 8, 4, device)
            else:
                index = IndexVector(None, there.data_ptr(), 8, 8, device)
            transfer = w.plan([w.chunks.addresses[k] for k in chosen], index, stream=stream)
            transfer.wait()
            assert transfer.engine == "staged"
            w.cache.check()
            w.chunks.check()


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_bad_id_is_named_and_left_out(device: int, monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    own_slots(monkeypatch, device, BYTES)
    w = Setting(device, direction)
    ids = [0, 1, 2, 3, 4, 5, 6, 7]
    errors: list[Exception] = []
    with kvraw.Stream(device) as stream:
        for k in range(8):
            there = numbers([*ids[:5], 99, *ids[6:]] if k == 7 else ids, "device", device)
            index = IndexVector(None, there.data_ptr(), 8, 8, device)
            transfer = w.plan(w.chunks.addresses[:4], index, stream=stream, on_error=errors.append)
            if k < 7:
                transfer.wait()
        with pytest.raises(kvraw.BoundsError, match=r"block_ids\[5\] is 99, must be in \[0, 9\)"):
            transfer.wait()
    assert [str(e).split(";")[0] for e in errors] == ["block_ids[5] is 99, must be in [0, 9)"]
