"""Programs of driver commands: the compiled runner makes the calls that Python makes, and meets what Python meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvraw.copying import kernel_args as ka
from kvraw.copying.operands import check_distinct, check_host_index
from kvraw.copying.plan import Side
from kvraw.errors import BoundsError, DriverError
from kvraw.runtime.program import IDS, IDS_COUNT, Commands, Program, warm_up
from tests.helpers.driver_calls import Recorder, address_of
from tests.helpers.profile import examples

BOTH = ("compiled", "python")


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    assert warm_up()


def runs(commands: Commands, recorder: Recorder, **options: Any) -> dict[str, Callable[..., bool]]:
    """Both runners of one program each."""
    one, other = (Program(commands, recorder.driver(), **options) for _ in BOTH)
    assert one.compiled
    return {"compiled": one.run, "python": other.run_python}


def outcome(run: Callable[[], bool], recorder: Recorder) -> tuple[Any, ...]:
    """Everything that a run does and how it ends."""
    recorder.calls.clear()
    try:
        end: Any = run()
    except DriverError as error:
        end = (str(error), error.name, error.code, error.call, error.index, error.command)
    except BoundsError as error:
        end = str(error)
    assert recorder.problems == []
    assert recorder.mode == 0
    return (list(recorder.calls), end)


word = st.integers(0, 2**64 - 1)
short = st.integers(0, 2**32 - 1)
small = st.integers(0, 9)
VECTORS = np.random.default_rng(3).integers(0, 2**63, (3, 8)).astype(np.uint64)
DST, SRC, SIZES = (address_of(v) for v in VECTORS)

ROWS = st.one_of(
    st.tuples(st.just("launch"), word, short, short, word, word),
    st.tuples(st.just("copy"), word, word, word, word),
    st.tuples(st.just("copy_batch"), st.just(DST), st.just(SRC), st.just(SIZES), st.integers(0, 8), word),
    st.tuples(st.just("copy_each"), st.just(DST), st.just(SRC), st.just(SIZES), st.integers(0, 8), word),
    st.tuples(st.just("copy_2d"), word, word, word, word, st.integers(0, 99), small, word),
    st.tuples(st.just("memset"), word, st.integers(0, 255), word, word),
    st.tuples(st.just("record"), word, word),
    st.tuples(st.just("wait"), word, word),
    st.tuples(st.just("reached"), small),
    st.tuples(st.just("uncaptured"), small),
    st.tuples(st.just("on_device"), st.just(3)),
    st.tuples(st.just("same_memory"), small, st.integers(1, 2)),
)
CODES = [1, 2, 700, 900]


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_random_programs(data: st.DataObject) -> None:
    """The same calls with the same arguments, and the same end: by an error, by a row that ends it, or by its last."""
    recorder, commands = Recorder(), Commands()
    values = data.draw(st.lists(word, max_size=4))
    first = commands.value(len(values))
    for name, *operands in data.draw(st.lists(ROWS, max_size=12)):
        if (
            values
            and name not in ("copy_batch", "copy_each", "reached", "uncaptured", "copy_2d", "on_device", "same_memory")
            and data.draw(st.booleans())
        ):
            at = data.draw(st.integers(0, len(operands) - 1))
            if not (name in ("launch", "memset") and at in (1, 2)):
                operands[at] = first + data.draw(st.integers(-(2**40), 2**40))
                operands[at] = type(first)(first.index + data.draw(st.integers(0, len(values) - 1)), operands[at].add)
        getattr(commands, name)(*operands)
    recorder.pending, recorder.capturing = data.draw(st.sets(small, max_size=2)), data.draw(st.sets(small, max_size=2))
    recorder.numbers = dict.fromkeys(data.draw(st.sets(small)), 1)
    if data.draw(st.booleans()):
        recorder.fail(data.draw(st.integers(0, 8)), data.draw(st.sampled_from(CODES)), data.draw(st.none() | small))
    programs = [Program(commands, recorder.driver(), release=data.draw(st.booleans())) for _ in BOTH]
    for program in programs:
        for k, value in enumerate(values):
            program.values[first.index + k] = value
    one, other = programs
    assert one.compiled
    found, wanted = outcome(one.run, recorder), outcome(other.run_python, recorder)
    assert found == wanted
    assert one.ended_at == other.ended_at


def everything() -> Commands:
    """A row of every kind that calls the driver."""
    c = Commands()
    c.on_device(3)
    c.uncaptured(7)
    c.reached(5)
    c.memset(0x1000, 0xAB, 64, 7)
    c.wait(7, 6)
    c.launch(0x77, 3, 256, 7, 0x5000)
    c.copy(0x2000, 0x1000, 32, 7)
    c.copy_2d(0x10, 0x100, 0x20, 0x200, 48, 3, 7)
    c.copy_batch(DST, SRC, SIZES, 8, 7)
    c.record(6, 7)
    return c


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("nth", range(10))
def test_the_command_that_fails(nth: int, release: bool) -> None:
    recorder = Recorder()
    recorder.fail(nth, 1, copy=4)
    both = runs(everything(), recorder, release=release)
    found, wanted = (outcome(both[name], recorder) for name in BOTH)
    assert found == wanted
    calls, (text, name, code, call, index, command) = found
    assert len(calls) == nth + 1
    assert (name, code, call, command) == ("CUDA_ERROR_INVALID_VALUE", 1, calls[-1][0], nth)
    assert index == (4 if call == "cuMemcpyBatchAsync" else None)
    assert call in text


def test_what_is_nothing_is_left_out() -> None:
    recorder, c = Recorder(), Commands()
    c.launch(1, 0, 32, 7, 1)
    c.copy(1, 2, 0, 7)
    c.copy_2d(1, 2, 3, 4, 0, 1, 7)
    c.copy_2d(1, 2, 3, 4, 1, 0, 7)
    c.memset(1, 2, 0, 7)
    c.copy_batch(0, 0, 0, 0, 7)
    for run in runs(c, recorder).values():
        assert outcome(run, recorder) == ([], True)
    for run in runs(Commands(), recorder).values():
        assert outcome(run, recorder) == ([], True)


def test_shared_memory_of_a_launch() -> None:
    recorder, c = Recorder(), Commands()
    c.launch(1, 2, 32, 7, 9, shared=1024)
    assert runs(c, recorder)["compiled"]()
    assert recorder.calls == [("cuLaunchKernel", 1, 2, 32, 1024, 7, 9)]


def test_rows_that_end_a_program() -> None:
    for name, where in (("reached", "pending"), ("uncaptured", "capturing")):
        recorder, c = Recorder(), Commands()
        c.record(1, 2)
        getattr(c, name)(5)
        c.record(3, 4)
        one, other = Program(c, recorder.driver()), Program(c, recorder.driver())
        for program, run in ((one, one.run), (other, other.run_python)):
            getattr(recorder, where).clear()
            assert outcome(run, recorder)[1] is True
            getattr(recorder, where).add(5)
            calls, end = outcome(run, recorder)
            assert (len(calls), end, program.ended_at) == (2, False, 1)


def test_values_change_between_runs() -> None:
    recorder, c = Recorder(), Commands()
    stream, chunk = c.value(), c.value(2)
    c.copy(chunk + 4096, 0x1000, 64, stream)
    c.copy(0x1000, type(chunk)(chunk.index + 1, -8), 64, stream)
    c.record(9, stream)
    one, other = Program(c, recorder.driver()), Program(c, recorder.driver())
    for k in (1, 2**63 + 5, 2**64 - 1):
        for program, run in ((one, one.run), (other, other.run_python)):
            program.values[stream.index] = k
            program.values[chunk.index], program.values[chunk.index + 1] = k, 5
            calls, _ = outcome(run, recorder)
            assert calls == [
                ("cuMemcpyAsync", (k + 4096) % 2**64, 0x1000, 64, k),
                ("cuMemcpyAsync", 0x1000, 2**64 - 3, 64, k),
                ("cuEventRecord", 9, k),
            ]


# ids


def checked(limit: int, skip_negative: bool, distinct: bool, first: int = 0) -> dict[str, Callable[..., bool]]:
    c = Commands()
    c.check("block_ids", IDS, IDS_COUNT, limit, skip_negative=skip_negative, distinct=distinct, first=first)
    c.record(1, 2)
    return runs(c, Recorder())


def text_of(run: Callable[..., Any], *args: Any) -> str:
    try:
        run(*args)
    except BoundsError as error:
        return str(error)
    return ""


ID_LISTS = st.lists(st.one_of(st.integers(-3, 12), st.integers(-(2**63), 2**63 - 1)), max_size=40)


@settings(max_examples=examples(200), deadline=None)
@given(ID_LISTS, st.sampled_from([0, 1, 8, 64, 65, 2**20]), st.booleans(), st.booleans(), st.integers(0, 5))
@example([], 0, False, True, 0)
@example([63, 64, 127, 128, 64], 2**20, False, True, 0)
@example([-1, -1, -(2**63), 3], 8, True, True, 0)
@example([5, 5, 9], 8, False, True, 0)  # out of range comes before a duplicate
def test_ids(ids: list[int], limit: int, skip_negative: bool, distinct: bool, skip: int) -> None:
    """Both runners say what the engines' own check says; which of several duplicates may differ."""
    vector = np.array(ids, np.int64)
    skip = min(skip, len(ids))
    both = checked(limit, skip_negative, distinct, first=skip)

    def plain() -> None:
        side = Side(0, limit=limit, skip_negative=skip_negative)
        check_host_index("block_ids", vector, side, skip)
        if distinct:
            check_distinct("block_ids", vector, skip)

    wanted = text_of(plain)
    for _ in range(2):  # marks that the first left behind would show in the second
        found, other = (text_of(both[name], vector[skip:]) for name in BOTH)
        assert found == other
        used = [v for v in ids[skip:] if v >= 0]
        if "more than once" in wanted:
            assert "more than once" in found
            again = next(v for k, v in enumerate(used) if v in used[:k])
            assert f"has {again} more" in found
        else:
            assert found == wanted
    assert text_of(both["compiled"], np.arange(min(limit, 99))) == ""


def test_many_ids_and_the_largest_limits() -> None:
    rng = np.random.default_rng(5)
    ids = rng.permutation(1 << 20)
    both = checked(1 << 33, False, True)
    assert text_of(both["compiled"], ids) == ""
    ids[-1] = ids[1000]
    assert text_of(both["compiled"], ids) == text_of(both["python"], ids) != ""
    assert text_of(checked(2**63 - 1, False, False)["compiled"], np.array([2**63 - 2])) == ""
    assert "[0]" in text_of(checked(2**63 - 1, False, False)["compiled"], np.array([2**63 - 1]))
    with pytest.raises(ValueError, match="limit is"):
        Commands().check("ids", IDS, IDS_COUNT, (1 << 33) + 1, distinct=True)
    with pytest.raises(ValueError, match="limit is"):
        Commands().check("ids", IDS, IDS_COUNT, 2**63)


def test_a_bad_id_stops_before_the_driver() -> None:
    recorder, c = Recorder(), Commands()
    target = np.full(4, 7, np.uint64)
    c.check("slots", IDS, IDS_COUNT, 100)
    c.write(address_of(target), IDS, IDS_COUNT)
    c.record(1, 2)
    for run in runs(c, recorder).values():
        with pytest.raises(BoundsError, match=r"slots\[1\] is 100, must be in \[0, 100\)"):
            run(np.array([3, 100]))
        assert not recorder.calls
        assert target.tolist() == [7] * 4


@pytest.mark.parametrize("width", [4, 8])
def test_ids_of_four_bytes(width: int) -> None:
    """Where ids lie as int32, they are checked there and widened with their signs."""
    ids = np.array([5, -1, 7, -(2**31), 5], np.int32 if width == 4 else np.int64)
    recorder = Recorder()
    for distinct in (False, True):
        c = Commands()
        c.check("ids", address_of(ids), 5, 8, skip_negative=True, distinct=distinct, width=width)
        for run in runs(c, recorder).values():
            assert text_of(run) == ("ids has 5 more than once; each is written once" if distinct else "")
    for name in BOTH:
        target = np.zeros(6, np.uint64)
        c = Commands()
        c.write(address_of(target), address_of(ids), 4, width=width, add=3, first=1)
        assert runs(c, recorder)[name]()
        assert target.view(np.int64).tolist() == [*(v + 3 for v in ids[1:].tolist()), 0, 0]


def test_words_as_the_kernel_engine_packs_them() -> None:
    """Chunk addresses and ids in an argument block: the bytes that `KernelPlan` writes, at other places each time."""
    rng = np.random.default_rng(0)
    for skip, chunks, count in ((0, 3, 40), (5, 1, 17), (0, 448 - 31, 31), (0, 1, 0)):
        ids, addresses = rng.integers(-4, 2**40, count + skip), rng.integers(0, 2**63, chunks).astype(np.uint64)
        wanted = np.zeros(1, ka.ARGS)
        words = wanted.view(np.uint64)
        words[ka.WORDS_AT : ka.WORDS_AT + chunks] = addresses
        words[ka.WORDS_AT + chunks : ka.WORDS_AT + chunks + count] = ids[skip:].view(np.uint64)
        words[ka.TABLE[1]], words[ka.INDEX[0]] = 0, (chunks - skip) % 2**64
        words[ka.SEGMENTS], words[ka.FIRST_ITEM] = count * 7, skip
        for name in BOTH:
            block = np.zeros(1, ka.ARGS)
            at, c = address_of(block), Commands()
            row, segments = c.value(chunks), c.value()
            c.write(at + 8 * ka.WORDS_AT, row.address, chunks)
            c.write(at + 8 * (ka.WORDS_AT + chunks), IDS, IDS_COUNT)
            c.write(at + 8 * ka.INDEX[0], (index := c.value()).address, 1)
            c.write(at + 8 * ka.SEGMENTS, segments.address, 1)
            c.write(at + 8 * ka.FIRST_ITEM, segments.address, 1, add=skip - count * 7)
            program = Program(c, Recorder().driver())
            program.values[row.index : row.index + chunks] = memoryview(addresses.view("u1").data).cast("B").cast("Q")
            program.values[index.index], program.values[segments.index] = (chunks - skip) % 2**64, count * 7
            assert (program.run if name == "compiled" else program.run_python)(ids[skip:])
            assert block.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("device", [0, 2, 3, None])
def test_a_program_of_another_device(device: int | None) -> None:
    recorder, c = Recorder(), Commands()
    recorder.device = device
    c.on_device(3)
    c.record(1, 2)
    for run in runs(c, recorder).values():
        calls, end = outcome(run, recorder)
        assert (len(calls), end) == ((2, True) if device == 3 else (1, False))


def test_the_failing_copy_is_this_run_s() -> None:
    recorder, c = Recorder(), Commands()
    c.copy_batch(DST, SRC, SIZES, 8, 7)
    for run in runs(c, recorder).values():
        for copy in (4, None, 8, 0):
            recorder.fail(0, 1, copy)
            assert outcome(run, recorder)[1][4] == (None if copy == 8 else copy)
