"""Calls by LMCache's names on a device: nothing waits, and what a kernel found is raised by a later call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import kvraw
from kvraw.adapters.lmcache import _codec as ops
from kvraw.copying import device_state, launch
from kvraw.runtime.context import DeviceScope
from tests.emulator.fake_driver import FakeDriver
from tests.helpers import coder_oracle as oracle
from tests.helpers.torch_like import Tensor, TorchLike

LAYERS, TOKENS, CHANNELS, BINS = 2, 20, 35, 16
SYMBOLS = np.random.default_rng(0).integers(0, BINS, (LAYERS, TOKENS, CHANNELS)).astype(np.uint8)
TABLE = oracle.cdf(SYMBOLS, BINS)


@pytest.fixture
def torch_like(device: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchLike]:
    monkeypatch.setattr(ops, "_launches", launch.LaunchCache())
    world = TorchLike(device).install(monkeypatch)
    yield world
    world.synchronize()


@pytest.fixture
def on_emulator(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> TorchLike:
    monkeypatch.setattr(ops, "_launches", launch.LaunchCache())
    return TorchLike(0).install(monkeypatch)


def buffers(world: TorchLike) -> tuple[Tensor, Tensor]:
    return (
        world.put("device", np.zeros((LAYERS, CHANNELS, 64), np.uint8)),
        world.put("device", np.zeros((LAYERS, CHANNELS), np.int32)),
    )


def encode(world: TorchLike, symbols: np.ndarray = SYMBOLS) -> tuple[Tensor, Tensor]:
    out, lengths = buffers(world)
    ops.encode_fast_new(world.put("device", TABLE), world.put("device", symbols), out, lengths)
    return out, lengths


def test_other_addresses_take_the_launch_that_was_made(torch_like: TorchLike) -> None:
    rng = np.random.default_rng(1)
    for k in range(4):
        symbols = rng.permuted(SYMBOLS, axis=1)
        out, lengths = encode(torch_like, symbols)
        cdf, back = torch_like.put("device", TABLE), torch_like.put("device", np.full_like(symbols, 99))
        ops.decode_fast_new(cdf, out, lengths, back)
        sizes = torch_like.take(lengths)
        want = oracle.encode(TABLE, symbols)
        np.testing.assert_array_equal(sizes, [[len(s) for s in row] for row in want])
        np.testing.assert_array_equal(torch_like.take(back), symbols)
        assert len(ops._launches._made) == 2, k


def test_keys_of_another_alignment_take_another_kernel(torch_like: TorchLike) -> None:
    rng = np.random.default_rng(2)
    cache = rng.standard_normal((9, 32)).astype(np.float32)
    positions = [torch_like.put("device", p) for p in rng.integers(0, 9, (2, 5))]
    table = torch_like.put("device", cache)
    for shift in (0, 1, 0, 1, 4):
        values = rng.standard_normal((1, 5 * 64 + 8)).astype(np.float32)
        whole = torch_like.put("device", values)
        key = Tensor(whole.base, 4 * shift, (5, 64), (64, 1), "float32")
        ops.rotary_embedding_k_fused(positions[0], positions[1], key, 32, table, True)
        want = values.copy()
        part = want[0, shift : shift + 320].reshape(5, 2, 32)
        old, new = (torch_like.take(p) for p in positions)
        part[...] = oracle.rerotate(part, old, new, cache, True, "float32")
        np.testing.assert_array_equal(torch_like.take(whole), want)
    assert len(ops._launches._made) == 2


@pytest.mark.parametrize("heads", [1, 3])
def test_other_keys_with_gaps_take_the_launch_that_was_made(torch_like: TorchLike, heads: int) -> None:
    rng = np.random.default_rng(3)
    cache = rng.standard_normal((9, 16)).astype(np.float32)
    positions = rng.integers(0, 9, (2, 5))
    table, (old, new) = torch_like.put("device", cache), (torch_like.put("device", p) for p in positions)
    for _ in range(3):
        values = rng.standard_normal((5, heads, 40)).astype(np.float32)
        whole = torch_like.put("device", values)
        key = Tensor(whole.base, 4 * 24, (5, heads, 16), (heads * 40, 40, 1), "float32")
        ops.rotary_embedding_k_fused_strided(old, new, key, 16, 40, table, True)
        values[..., 24:] = oracle.rerotate(values[..., 24:], *positions, cache, True, "float32")
        np.testing.assert_array_equal(torch_like.take(whole), values)
    assert len(ops._launches._made) == 1


def test_what_a_kernel_found_is_raised_once_by_the_next_call(torch_like: TorchLike) -> None:
    encode(torch_like)
    bad = SYMBOLS.copy()
    bad[1, 3, 7] = 77
    encode(torch_like, bad)
    torch_like.synchronize()
    with pytest.raises(kvraw.BoundsError, match=r"symbols holds 77 in layer 1, channel 7, must be in \[0, 16\)"):
        encode(torch_like)
    for _ in range(3):
        encode(torch_like)
        torch_like.synchronize()


def test_a_fault_is_explained_by_the_call_that_met_it(torch_like: TorchLike) -> None:
    """Many calls are under way; the one with a fault is not the last."""
    bad = SYMBOLS.copy()
    bad[0, 5, 11] = 99

    def calls() -> None:
        for k in range(100):
            encode(torch_like, bad if k == 50 else SYMBOLS)
        torch_like.synchronize()
        encode(torch_like)

    with pytest.raises(kvraw.BoundsError, match="99 in layer 0, channel 11"):
        calls()


def test_tensors_are_kept_until_their_kernel_is_over(on_emulator: TorchLike, fake: FakeDriver) -> None:
    out, lengths = encode(on_emulator)
    watched = [weakref.ref(out), weakref.ref(lengths)]
    del out, lengths
    gc.collect()
    assert all(w() is not None for w in watched)
    device_state.drain()
    gc.collect()
    assert all(w() is None for w in watched)


def test_steady_calls_make_nothing_new(on_emulator: TorchLike, fake: FakeDriver) -> None:
    cdf, symbols, (out, lengths) = (
        on_emulator.put("device", TABLE),
        on_emulator.put("device", SYMBOLS),
        (buffers(on_emulator)),
    )
    for _ in range(30):
        ops.encode_fast_new(cdf, symbols, out, lengths)
        on_emulator.synchronize()
    with DeviceScope(0):
        ops.encode_fast_new(cdf, symbols, out, lengths)
        on_emulator.synchronize()
        before, made = dict(fake.calls), fake.live()
        for _ in range(32):
            ops.encode_fast_new(cdf, symbols, out, lengths)
            on_emulator.synchronize()
    count = {name: fake.calls[name] - before.get(name, 0) for name in fake.calls}
    assert (count["launch"], count["event_record"], count["stream_capturing"]) == (32, 32, 32)
    assert count["context_device"] == 64  # for the question about a capture, and for the launch
    assert count["event_done"] <= 40
    assert fake.live() == made


def test_a_capture_asks_for_no_event_and_reports_what_its_replays_met(on_emulator: TorchLike, fake: FakeDriver) -> None:
    encode(on_emulator)
    on_emulator.synchronize()
    assert on_emulator.stream is not None
    handle = on_emulator.stream.handle
    bad = SYMBOLS.copy()
    bad[1, 0, 3] = 55
    cdf, symbols, (out, lengths) = (
        on_emulator.put("device", TABLE),
        on_emulator.put("device", bad),
        (buffers(on_emulator)),
    )
    fake.capture(handle, True)
    before = dict(fake.calls)
    ops.encode_fast_new(cdf, symbols, out, lengths)
    for name in ("event_record", "event_done", "event_create"):
        assert fake.calls[name] == before.get(name, 0), name
    fake.capture(handle, False)
    on_emulator.synchronize()  # the fake's capture runs at once: a replay
    with pytest.raises(kvraw.BoundsError, match="symbols holds 55 in layer 1, channel 3"):
        encode(on_emulator)
    encode(on_emulator)
    on_emulator.synchronize()
    device_state.drain()


def test_a_launch_that_fails_leaves_nothing_behind(on_emulator: TorchLike, fake: FakeDriver) -> None:
    encode(on_emulator)
    on_emulator.synchronize()
    device_state.drain()
    for name in ("launch", "event_record"):
        fake.fail(name, 1, "CUDA_ERROR_LAUNCH_FAILED")
        with pytest.raises(kvraw.DriverError):
            encode(on_emulator)
        on_emulator.synchronize()
        _, lengths = encode(on_emulator)
        assert on_emulator.take(lengths).min() > 0
    device_state.drain()
    assert fake.live()["pending"] == 0
