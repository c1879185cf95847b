"""Copies that keep to a rate: the right bytes, on the emulator and on a GPU, and as long as they must take there."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvraw.arrays import IndexVector
from kvraw.copying import kernel_args as ka
from kvraw.copying.device_state import DeviceState, device_state
from kvraw.copying.indexed import IndexedLaunch
from kvraw.copying.kernel import PACED_THREADS, KernelPlan
from kvraw.copying.operands import Operands
from kvraw.copying.pace import BOTH, LEAST_RATE, MEAN, WAYS, both_ways, paced_rate
from kvraw.copying.plan import CopyPlan, Side
from kvraw.copying.planner import RateLimit
from kvraw.errors import BoundsError
from kvraw.runtime.context import DeviceScope
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.profile import examples
from tests.helpers.torch_like import Tensor, TorchLike

RATES = st.one_of(st.just(0.0), st.floats(1e9, 1e12))


class Rows:
    """Rows of a device tensor that are copied by ids to pinned memory, or back, with gaps on the device's side."""

    def __init__(self, device: int, rows: int, run: int, gap: int, store: bool, ctas: int | None = None) -> None:
        self.w, self.device, self.run, self.store = TorchLike(device), device, run, store
        rng = np.random.default_rng(run)
        shapes = (rows, run + gap), (rows, run)
        self.arrays = [rng.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]
        self.tensors = [self.w.put(k, a) for k, a in zip(("device", "pinned"), self.arrays, strict=True)]
        self.sides = Side(run + gap, limit=rows), Side(run, limit=rows)
        order = 1 if store else -1
        self.kernel = KernelPlan(
            CopyPlan(*self.sides[::order], layers=1, planes=1, tokens=1, heads=1, run=run), ctas=ctas
        )
        with DeviceScope(device):
            self.state: DeviceState = device_state(device)

    def tables(self) -> list[np.ndarray]:
        """Base addresses of source and destination."""
        found = [np.array([t.base.device_address], np.uint64) for t in self.tensors]
        return found if self.store else found[::-1]

    def start(self, ids: Any, rate: float, way: str = "store") -> Any:
        """Enqueue the rows with these ids on the device's side."""
        if isinstance(ids, Tensor):
            count, vector = ids.shape[0], IndexVector(None, ids.data_ptr(), ids.shape[0])
        else:
            count, vector = len(ids), IndexVector(np.array(ids, np.int64), 0, len(ids))
        indices = (vector, None) if self.store else (None, vector)
        ends = [Operands(t, i) for t, i in zip(self.tables(), indices, strict=True)]
        assert self.w.stream is not None
        with DeviceScope(self.device):
            operation = self.state.completions.begin(self.w.stream.handle)
            try:
                self.kernel.enqueue(self.state, operation, *ends, 0, count, link=True, rate=rate, way=way)
                return operation.commit((self, ids))
            except BaseException:
                operation.abort()
                raise

    def expect(self, ids: list[int]) -> None:
        """Compare both memories, rows with ids having been copied."""
        a, b = self.arrays
        if self.store:
            b[: len(ids)] = a[ids, : self.run]
        else:
            a[ids, : self.run] = b[: len(ids)]
        for tensor, array in zip(self.tensors, self.arrays, strict=True):
            np.testing.assert_array_equal(self.w.take(tensor), array)


@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def check_bytes(device: int, data: st.DataObject) -> None:
    rows, run = (
        data.draw(st.integers(1, 70)),
        data.draw(st.integers(1, 300)) * data.draw(st.sampled_from([1, 2, 4, 16])),
    )
    case = Rows(device, rows, run, data.draw(st.sampled_from([0, 1, 2, 4, 8, 16])), data.draw(st.booleans()),
                data.draw(st.sampled_from([None, 1, 5])))  # fmt: skip
    for _ in range(data.draw(st.integers(1, 3))):
        ids = data.draw(st.permutations(range(rows)))[: data.draw(st.integers(1, rows))]
        where = case.w.put("device", np.array(ids, np.int64)) if data.draw(st.booleans()) else ids
        case.start(where, data.draw(RATES), data.draw(st.sampled_from(WAYS))).wait()
        case.expect(ids)


def test_the_bytes_are_right_at_any_rate(device: int) -> None:
    check_bytes(device)


@pytest.mark.parametrize("rate", [-1.0, 1.0, LEAST_RATE - 1, float("inf"), float("nan")])
def test_a_rate_that_no_kernel_keeps_to(fake: FakeDriver, rate: float) -> None:
    case = Rows(0, 4, 32, 0, True)
    with pytest.raises(BoundsError, match=r"rate is .*, must be 0 or in \[16000000, inf\)"):
        case.start([1], rate)
    case.start([1], LEAST_RATE).wait()
    case.expect([1])


def test_a_bound_launch_keeps_to_a_rate(device: int) -> None:
    case = Rows(device, 16, 48, 16, True)
    ids, none = case.w.put("device", np.arange(16)[::-1].copy()), case.w.empty("device", (1,), "int64")
    with DeviceScope(device):
        tables = case.tables()
        launch = IndexedLaunch(case.state, case.kernel, (tables[0], tables[1]), (8, 0), rate=5e9, way="store")
        assert case.w.stream is not None
        done = launch.enqueue(case.w.stream.handle, ids.data_ptr(), none.data_ptr(), 16)
    assert done is not None
    done.wait()
    case.expect(list(range(16))[::-1])


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rate", [5e9, 45e9])
def test_the_words_of_a_pace(fake: FakeDriver, busy: bool, way: str, rate: float) -> None:
    """A bound launch has those of one that is enqueued; the other direction counts where there is other work."""
    case = Rows(0, 16, 48, 16, True)
    case.kernel = KernelPlan(case.kernel.plan, limit=RateLimit(busy))
    case.start([1], rate, way).wait()
    with DeviceScope(0):
        launch = case.kernel.bind(case.state, (case.tables()[0], 1), (), 0, 16, 0, link=True, rate=rate, way=way)
        places = [case.state.paces.address(w) for w in (way, {"store": "load", "load": "store"}.get(way, way))]
    assert launch is not None
    assert launch.threads <= PACED_THREADS[way]
    both = min(rate, BOTH * 55e9) if busy and way != "copy" else rate
    mean = min(rate, MEAN[way] * 55e9) if busy and way != "copy" else rate
    costs = [round(256 * 16 * 16e9 / r) for r in (rate, mean, both)]
    want = [*places, 4000 * 16, costs[0], costs[1] * (mean < rate), costs[2]]
    for words in (launch.block.words, case.kernel._block.words):
        found = [
            int(words[k]) for k in (ka.PACE, ka.PACE_OTHER, ka.PACE_SLACK, ka.PACE_COST, ka.PACE_MEAN, ka.PACE_EXTRA)
        ]
        found[-1] += found[-3]
        assert found == want


def test_the_default_is_a_share_of_the_link() -> None:
    for way in ("store", "load"):
        assert both_ways(way, paced_rate(way, 25e9)) == pytest.approx(0.55 * 25e9)
        assert 0.55 * 25e9 < paced_rate(way, 25e9) < 25e9
        assert paced_rate(way) > paced_rate(way, 25e9)


@pytest.mark.gpu
@pytest.mark.parametrize("launches", [1, 2])
def test_it_takes_as_long_as_it_must(gpu: int, launches: int) -> None:
    """Together, beside each other: they share the rate."""
    rate, nbytes = 2e9, 8 << 20
    cases = [Rows(gpu, 128, nbytes // 128, 0, True) for _ in range(launches)]
    for case in cases:  # kernels are loaded
        case.start(list(range(128)), 0.0).wait()
        case.start([0], rate).wait()
    begin = time.perf_counter()
    for pending in [case.start(list(range(128)), rate) for case in cases]:
        pending.wait()
    seconds, least = time.perf_counter() - begin, launches * nbytes / rate
    assert 0.99 * least < seconds < 1.5 * least + 2e-3
    for case in cases:
        case.expect(list(range(128)))
