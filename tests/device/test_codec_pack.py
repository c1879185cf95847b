"""The kernel that puts streams back to back, by itself: it trusts neither the sums nor the size of its grid."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

import kvraw
from kvraw.codec import gpu
from kvraw.codec.operands import Job
from kvraw.codec.streams import dense
from kvraw.runtime.context import DeviceScope
from tests.helpers.codec_cases import Place

STREAMS, ROW, SIZE = 11, 16, 75  # a thread block moves eight streams
LENGTHS = [3, 0, 16, 1, 9, 16, 5, 2, 7, 0, 13]
ENDS = np.cumsum(LENGTHS)
# Sums by stream, of which the first is the bad one, and the stream at which a kernel meets it.
BAD = (
    ({0: -5, 1: 3}, 0),  # the first stream would begin at 0 and have a negative length; the second begin before it
    ({4: 19}, 4),  # below the one before it
    ({8: 66, 9: 78}, 9),  # behind the output
    ({2: 20, 3: 20}, 2),  # 17 bytes of a slot of 16
)


@pytest.fixture
def place(device: int) -> Iterator[Place]:
    where = Place(device)
    yield where
    where.close()


def pack(
    place: Place, ends: np.ndarray, slots: np.ndarray, streams: int = STREAMS
) -> tuple[np.ndarray, kvraw.BoundsError | None]:
    """What the kernel makes of an output of 0xEE, and what it reports."""
    device = place.device
    data, sums, out = place.put(slots), place.put(ends.astype(np.int64)), place.put(np.full(SIZE, 0xEE, np.uint8))
    held = place.put(np.zeros(streams * 4, np.uint8))  # stands for what packing does not use
    symbols = dense(held.address, (1, 1, streams), 1, device, held)
    cdf = dense(held.address, (1, streams, 2), 2, device, held)
    lengths = dense(held.address, (1, streams), 4, device, held)
    job = Job(symbols, cdf, dense(data.address, (1, streams, ROW), 1, device, data), lengths, 0, device)
    assert place.stream is not None
    assert device is not None
    with DeviceScope(device):
        operation = gpu.run_pack(job, sums.address, out.address, SIZE, place.stream.handle, (data, sums, out))
    error = None
    try:
        operation.wait()
    except kvraw.BoundsError as met:
        error = met
    return out.fetch(), error


def slots_of(streams: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 200, (streams, ROW)).astype(np.uint8)


def test_streams_back_to_back(place: Place) -> None:
    slots = slots_of(STREAMS)
    found, error = pack(place, ENDS, slots)
    assert error is None
    want = np.concatenate([slots[k, :n] for k, n in enumerate(LENGTHS)])
    np.testing.assert_array_equal(found[: len(want)], want)
    assert (found[len(want) :] == 0xEE).all()


def test_warps_behind_the_last_stream(place: Place) -> None:
    """Sums and slots that follow those of the call are not its own."""
    slots = slots_of(STREAMS)
    found, error = pack(place, ENDS, slots, streams=5)
    assert error is None
    want = np.concatenate([slots[k, :n] for k, n in enumerate(LENGTHS[:5])])
    np.testing.assert_array_equal(found[: len(want)], want)
    assert (found[len(want) :] == 0xEE).all()


@pytest.mark.parametrize(("change", "at"), BAD)
def test_sums_that_do_not_fit(change: dict[int, int], at: int, place: Place) -> None:
    ends = ENDS.copy()
    for stream, end in change.items():
        ends[stream] = end
    slots = slots_of(STREAMS)
    found, error = pack(place, ends, slots)
    assert re.fullmatch(r"lengths\[0, \d+\] is -?\d+, must be in \[0, 16\]", str(error))
    begins = np.append(0, ends[:-1])
    lengths = ends - begins
    good = (begins >= 0) & (lengths >= 0) & (ends <= SIZE) & (lengths <= ROW)
    assert not good[at]
    covered = np.zeros(SIZE, bool)
    for k in np.flatnonzero(good):
        covered[begins[k] : ends[k]] = True
    assert (found[~covered] == 0xEE).all()
