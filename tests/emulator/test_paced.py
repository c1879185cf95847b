"""Copies that keep to a rate, on the emulator's clock: never ahead of their schedule, and faults of the pace caught."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvraw.copying import kernel as kernel_module
from kvraw.copying import kernel_args as ka
from kvraw.copying.pace import SLACK, PaceWords
from kvraw.ptx import loader
from kvraw.runtime import driver as driver_module
from kvraw.runtime.context import DeviceScope
from tests.device.test_paced import Rows
from tests.emulator.fake_driver import FakeDriver
from tests.emulator.ptx_memory import Addresses, Memory
from tests.emulator.test_ptx_artifacts import SKIP_NEGATIVE, Copy, module
from tests.helpers.profile import examples

UNIT = 4096  # bytes of a turn at most
SHAPES = [
    (2, 64, 40, 33),
    (2, 1024, 12, 300),
    (1, 32, 1, 1),
    (1, 32, 0, 1),
]  # thread blocks, threads, items, vectors of a run


def run(copy: Copy, vector: int, grid: int, block: int, **pace: int) -> None:
    """Run the paced kernel and compare all bytes."""
    want = copy.expected()
    params = copy.params(**pace)
    module(vector, "copy_paced").run(f"kvraw_copy_paced_v{vector}", grid, block, params, copy.memory, seed=3)
    np.testing.assert_array_equal(copy.dst, want)


@pytest.mark.parametrize("vector", [16, 8, 4, 2, 1])
@pytest.mark.parametrize("cost", [0, 1, 1600])
@pytest.mark.parametrize(("grid", "block", "items", "vectors"), SHAPES)
def test_the_bytes_are_right(vector: int, cost: int, grid: int, block: int, items: int, vectors: int) -> None:
    copy, word = Copy(vector, items, vectors), np.zeros(1, np.uint64)
    copy.memory.add_array(word, "pace")
    run(copy, vector, grid, block, pace=word.ctypes.data, cost=cost)
    assert bool(word[0]) == (cost > 0 and items > 0)


@pytest.mark.parametrize("kept", [0, 1, 3, 33])
def test_what_is_left_out_takes_no_turns(kept: int) -> None:
    """Items with an index below zero, behind the others."""
    copy, word = Copy(16, 64, 4), np.zeros(1, np.uint64)
    copy.memory.add_array(word, "pace")
    copy.words[2 + kept : 2 + 64] = [2**64 - 1] * (64 - kept)
    copy.src_index, copy.dst_index = copy.src_index[:kept], copy.dst_index[:kept]
    copy.sides[0].flags |= SKIP_NEGATIVE
    word[0] = begin = np.uint64((copy.memory.nanoseconds * ka.TICKS + 1_000_000) % 2**64)
    run(copy, 16, 1, 128, pace=word.ctypes.data, cost=256)  # a group of segments a warp
    assert int(word[0] - begin) == kept * 2 * 4  # a vector each, of two runs


@pytest.mark.parametrize(
    ("other", "used"),
    [(None, False), (0, True), (1000, True), (-10_000, True), (-30_000, False), (10**8, False), (-(10**9), False)],
)
def test_the_link_s_other_direction(other: int | None, used: bool) -> None:
    """Turns take longer while its time, in ns from now or never, is not far from now."""
    copy, words = Copy(16, 16, 4), np.zeros(2, np.uint64)
    copy.memory.add_array(words, "pace")
    turn = copy.memory.nanoseconds + 10_000
    words[0] = begin = np.uint64(turn * ka.TICKS % 2**64)
    if other is not None:
        words[1] = np.uint64((turn + other) * ka.TICKS % 2**64)
    at, kept = words.ctypes.data, words[1]
    run(copy, 16, 1, 32, pace=at, cost=256, other=at + 8, extra=512)
    assert int(words[0] - begin) == 16 * 2 * 4 * (3 if used else 1)
    assert words[1] == kept


@pytest.mark.parametrize("credit", [0, 100_000, 10**8])
def test_the_long_run(credit: int) -> None:
    """Turns by a rate, and by a lower one for which more idle time is made up for."""
    copy, words = Copy(16, 60, 1000), np.zeros(2, np.uint64)
    copy.memory.add_array(words, "pace")
    begin, vectors = copy.memory.nanoseconds, 60 * 2 * 1000
    run(copy, 16, 2, 512, pace=words.ctypes.data, cost=256 * 16, mean=256 * 64, credit=credit * ka.TICKS)
    took = copy.memory.nanoseconds - begin
    assert took >= max(vectors, 4 * vectors - credit) - 8 * 1000
    # All warps go in step here, so none waits while others copy: what they copy is idle time of the long run.
    assert took < 4 * vectors - min(credit, 3 * vectors) + vectors + 50_000


def test_without_a_word_there_is_no_pace() -> None:
    run(Copy(16, 5, 7), 16, 1, 64, cost=7)


@pytest.mark.parametrize("ahead", [1 << 37, 1 << 62])
def test_a_time_that_is_far_ahead_holds_nothing_up(ahead: int) -> None:
    """As where the clock was set back."""
    copy, word = Copy(16, 40, 33), np.zeros(1, np.uint64)
    copy.memory.add_array(word, "pace")
    before = copy.memory.nanoseconds
    word[0] = (before * ka.TICKS + ahead) % 2**64
    run(copy, 16, 1, 64, pace=word.ctypes.data, cost=1600)
    assert copy.memory.nanoseconds - before < 1e6
    assert (int(word[0]) - before * ka.TICKS) % 2**64 < 1e6 * ka.TICKS


def test_a_coarse_clock_changes_nothing_in_the_mean() -> None:
    """A clock that ticks once a microsecond, as some devices' does."""
    times = []
    for tick in (1, 1024):
        copy, word = Copy(16, 40, 500), np.zeros(1, np.uint64)
        copy.memory.add_array(word, "pace")
        real, begin = copy.memory.read_clock, copy.memory.nanoseconds
        copy.memory.read_clock = lambda real=real, tick=tick: real() // tick * tick  # type: ignore[method-assign]
        run(copy, 16, 2, 256, pace=word.ctypes.data, cost=100_000)
        times.append(copy.memory.nanoseconds - begin)
    assert times[1] == pytest.approx(times[0], rel=0.02)


class Watched:
    """The emulated device, on which stores to some memory are timed."""

    def __init__(self, fake: FakeDriver) -> None:
        self.memory, self.stores = fake.memory, list[tuple[int, int]]()  # time, and bytes stored so far
        self.places, self.stored = list[range](), 0
        real = Memory.check

        def check(addresses: Addresses, nbytes: int, write: bool) -> None:
            real(self.memory, addresses, nbytes, write)
            if write and len(addresses) and any(int(addresses[0]) in place for place in self.places):
                self.stored += nbytes * len(addresses)
                self.stores.append((self.memory.nanoseconds, self.stored))

        self.memory.check = check  # type: ignore[method-assign]

    def watch(self, cases: list[Rows]) -> None:
        """Count from now on what is stored to the pinned memory of cases."""
        ends = [case.tensors[1].base for case in cases]
        self.places = [range(end.device_address, end.device_address + end.nbytes) for end in ends]
        self.stored = 0
        self.stores.clear()


def ahead(watched: Watched, cases: list[Rows], rate: float, idle: int = 0, launches: int = 1) -> tuple[float, float]:
    """By how many bytes stores went ahead of the rate, and how far behind it they ended, in ns.

    Each of `launches` copies all rows of all cases, with nothing enqueued for `idle` ns between them.
    """
    worst, late = 0.0, 0.0
    for case in cases:
        case.start([0], rate).wait()
    for _ in range(launches):
        watched.memory.nanoseconds += idle
        watched.watch(cases)
        begin = watched.memory.nanoseconds
        for pending in [case.start(list(range(case.kernel.plan.src_flat.limit)), rate) for case in cases]:
            pending.wait()
        allowed = SLACK * rate / 1e9 + UNIT
        # A cost is rounded to sixteenths of a nanosecond.
        worst = max(worst, *(0.999 * n - (at - begin) * rate / 1e9 - allowed for at, n in watched.stores))
        assert watched.stored == sum(case.arrays[1].nbytes for case in cases)
        late = max(late, watched.memory.nanoseconds - begin - watched.stored * 1e9 / rate)
    return worst, late


@pytest.fixture
def watched(fake: FakeDriver) -> Iterator[Watched]:
    kernel_module.copy_kernel.cache_clear()
    yield Watched(fake)
    kernel_module.copy_kernel.cache_clear()


@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_never_ahead_of_the_schedule(watched: Watched, data: st.DataObject) -> None:
    run = data.draw(st.sampled_from([16, 48, 256, 1000, 2048, 6002, 32768]))
    rows = data.draw(st.integers(1, max(1, 600_000 // run // 4)))
    rate = data.draw(st.floats(5e7, 2e10))
    cases = [Rows(0, rows, run, 0, True, data.draw(st.sampled_from([None, 1, 4])))
             for _ in range(data.draw(st.integers(1, 2)))]  # fmt: skip
    worst, late = ahead(watched, cases, rate, data.draw(st.sampled_from([0, 10_000_000])), 2)
    assert worst <= 0
    assert late < 0.2 * rows * run * len(cases) * 1e9 / rate + 20_000


# Each fault makes stores run ahead of a rate that two launches share, or lag behind it.
def ptx(pattern: str, replacement: str) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        real = loader.read_ptx

        def changed(name: str) -> bytes:
            text, count = re.subn(pattern, replacement, real(name).decode())
            assert count or "paced" not in name, pattern
            return text.encode()

        patch.setattr(kernel_module, "read_ptx", changed)

    return mutate


def shifted(name: str, by: int) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(ka, name, getattr(ka, name) + by)


def own_words(patch: pytest.MonkeyPatch) -> None:
    """Each launch has a word of its own: nothing is shared."""
    count = iter(range(1, 1 << 20))
    real = PaceWords.address
    patch.setattr(PaceWords, "address", lambda self, way: real(self, ("store", "load", "copy")[next(count) % 3]))


def scaled(by: float) -> Callable[[pytest.MonkeyPatch], None]:
    real = ka.pace_cost
    return lambda patch: patch.setattr(ka, "pace_cost", lambda args, width, rate: int(real(args, width, rate) * by))


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the kernel without a pace": lambda patch: patch.setattr(
        kernel_module, "copy_kernel", lambda width, paced=False, real=kernel_module.copy_kernel: real(width)
    ),
    "the word of the cost one late": shifted("PACE_COST", 1),
    "the address of the word one late": shifted("PACE", 1),
    "a cost of half": scaled(0.5),
    "a cost of twice": scaled(2),
    "words of their own": own_words,
    "PTX: turns cost nothing": ptx(r"(atom\.global\.add\.u64 %rd\d+, \[%rd\d+\], )%rd\d+", r"\g<1>0"),
    "PTX: nobody waits": ptx(r"setp\.lt\.s64(\s+%p\d+, %rd\d+, )1;", r"setp.ne.s64\g<1>-1;"),
    "PTX: idle time is made up for": ptx(r"red\.global\.max\.u64", "red.global.min.u64"),
    "PTX: a clock in other units": ptx(r"(shl\.b64\s+%rd\d+, %rd\d+, )4;", r"\g<1>6;"),
    "PTX: turns of all vectors alike": ptx(r"min\.u32(\s+%r\d+, %r\d+, )256;", r"max.u32\g<1>1024;"),
}


def failures() -> int:
    count = 0
    for run, rows in ((16, 4000), (2048, 120)):
        fake = FakeDriver()
        before = driver_module.install(fake)  # type: ignore[arg-type]
        try:
            with DeviceScope(0):
                cases = [Rows(0, rows, run, 0, True) for _ in range(2)]
                worst, late = ahead(Watched(fake), cases, 2e9, 1_000_000, 2)
            count += worst > 0 or late > 0.2 * 2 * rows * run / 2 + 10_000
        except Exception:
            count += 1
        finally:
            driver_module.install(before)
    return count


@pytest.mark.parametrize("name", [None, *MUTATIONS])
def test_faults_are_caught(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_module.copy_kernel.cache_clear()
    clear = kernel_module.copy_kernel.cache_clear
    if name:
        MUTATIONS[name](monkeypatch)
    try:
        assert (failures() > 0) == (name is not None)
    finally:
        monkeypatch.undo()
        clear()
