"""Recorders: order, times, bounds; nothing is reported before its stream got there."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw.runtime import stream_records
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.memory import Memory


@pytest.fixture(autouse=True)
def empty() -> None:
    ops.drain_recorded_events()
    ops.drain_recorded_completions()


def test_without_a_device() -> None:
    before = time.time()
    ops.record_event_on_stream(0, "start", "s", {"device": "cpu"}, {"count": 1})
    ops.record_event_on_stream(0, "end", "s", {}, {})
    ops.record_completion_on_stream(0, "kind", b"payload")
    ops.record_completion_on_stream(0, "kind", "text")
    (a, b) = ops.drain_recorded_events()
    assert (a[0], a[1], a[3], a[4]) == ("start", "s", {"device": "cpu"}, {"count": 1})
    assert before - 0.1 <= a[2] <= b[2] <= time.time() + 0.1
    assert ops.drain_recorded_completions() == [("kind", b"payload"), ("kind", b"text")]
    assert ops.drain_recorded_events() == ops.drain_recorded_completions() == []


def test_in_the_order_of_each_stream(device: int) -> None:
    with kvraw.Stream(device) as one, kvraw.Stream(device) as two:
        for k in range(20):
            stream = (one, two)[k % 2]
            ops.record_completion_on_stream(stream.handle, "one" if k % 2 == 0 else "two", str(k))
            ops.record_event_on_stream(stream.handle, str(k), "", {}, {})
        ops.record_completion_on_stream(0, "default", b"")
        for stream in (one, two):
            stream.synchronize()
        with DeviceScope(device):
            driver().stream_synchronize(0)
        got = ops.drain_recorded_completions()
        assert [int(p) for kind, p in got if kind == "one"] == list(range(0, 20, 2))
        assert [int(p) for kind, p in got if kind == "two"] == list(range(1, 20, 2))
        assert ("default", b"") in got
        events = ops.drain_recorded_events()
        assert len(events) == 20
        for first in (0, 1):
            mine = [e for e in events if int(e[0]) % 2 == first]
            assert [int(e[0]) for e in mine] == list(range(first, 20, 2))
            assert [e[2] for e in mine] == sorted(e[2] for e in mine)


def test_not_before_the_copy(fake: Any) -> None:
    source, target = Memory("pinned", np.arange(64, dtype=np.uint8), 0), Memory("device", np.zeros(64, np.uint8), 0)
    stream = kvraw.Stream(0)
    seen = 0
    with DeviceScope(0):
        for k in range(30):
            driver().memcpy_async(target.address + k, source.address + k + 1, 1, stream.handle)
            ops.record_completion_on_stream(stream.handle, str(k), b"")
            for kind, _ in ops.drain_recorded_completions():
                assert (
                    np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 64).from_address(target.address))[int(kind)]
                    == int(kind) + 1
                )
                seen += 1
    stream.synchronize()
    seen += len(ops.drain_recorded_completions())
    assert seen == 30
    for one in (source, target):
        one.close()


def test_an_interrupted_reading_of_the_clocks_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    late = iter([*[0.0, 7.0, 7.0], *[0.0] * 100])  # the first pair of readings is torn apart
    ticks = {"monotonic": 0.0}

    def monotonic() -> float:
        ticks["monotonic"] += 1e-6 + next(late)
        return ticks["monotonic"]

    monkeypatch.setattr(stream_records.time, "monotonic", monotonic)
    monkeypatch.setattr(stream_records.time, "time", lambda: ticks["monotonic"] + 1000.0)
    assert stream_records._wall_offset() == pytest.approx(1000.0, abs=1e-5)


def test_bounds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(stream_records, "_MOST", 10)
    for k in range(25):
        ops.record_completion_on_stream(0, str(k), b"")
    assert [kind for kind, _ in ops.drain_recorded_completions()] == [str(k) for k in range(15, 25)]
    assert "nobody drains" in caplog.text


def test_bounds_of_what_waits(fake: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(stream_records, "_MOST", 10)
    stream = kvraw.Stream(0)
    for k in range(300):
        ops.record_event_on_stream(stream.handle, str(k), "", {}, {})
    assert "has not got to" in caplog.text
    assert fake.live()["events"] < 40
    stream.synchronize()
    names = [int(e[0]) for e in ops.drain_recorded_events()]
    assert names == sorted(names)
    assert names[-1] == 299


def test_events_are_used_again(fake: Any) -> None:
    stream = kvraw.Stream(0)
    for _ in range(50):
        ops.record_event_on_stream(stream.handle, "e", "", {}, {})
        stream.synchronize()
        assert len(ops.drain_recorded_events()) == 1
    assert fake.live()["events"] < 8


@pytest.mark.gpu
def test_times_are_those_of_the_stream(gpu: int) -> None:
    size, late, early = 1 << 28, [], []
    with kvraw.DeviceBuffer(size, gpu) as memory, kvraw.HostPool(size, device=gpu) as pool, kvraw.Stream(gpu) as stream:
        for _ in range(8):
            with DeviceScope(gpu):
                begin = time.time()
                ops.record_event_on_stream(stream.handle, "start", "", {}, {})
                driver().memcpy_async(memory.address, pool.address, size, stream.handle)
                ops.record_event_on_stream(stream.handle, "end", "", {}, {})
            stream.synchronize()
            over = time.time()
            start, end = ops.drain_recorded_events()
            early.append(begin - start[2])
            late.append(end[2] - over)
            assert 2e-3 < end[2] - start[2] < 1.0
    # No event before it was recorded, none after the stream was seen to be over: in no round, whoever is interrupted.
    assert max(early) < 2e-4
    assert max(late) < 2e-4
    # The host sees the end at once unless it is interrupted: in some round it was not.
    assert min(abs(x) for x in late) < 2e-4


def test_records_after_a_reset(fake: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    """Those that wait when somebody resets the device are lost; later ones are not."""
    recorder = stream_records.Recorder()
    stream = kvraw.Stream(0)
    recorder.record(stream.handle, ("done",))
    stream.synchronize()
    assert [r.value for r in recorder.drain()] == [("done",)]
    recorder.record(stream.handle, ("lost",))
    fake.reset(0)
    with pytest.raises(kvraw.DriverError, match="the context of device 0 was reset"):
        recorder.drain()
    for k in range(3):
        with kvraw.Stream(0) as other:
            recorder.record(other.handle, ("later", k))
            other.synchronize()
            assert [r.value for r in recorder.drain()] == [("later", k)]
    assert [r.message for r in caplog.records] == ["the context of device 0 was reset: 1 records are lost"]
