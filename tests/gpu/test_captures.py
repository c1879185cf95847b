"""Transfers beside a capture in the default mode, which forbids other threads much, and what a capture needs itself."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

import kvraw
from kvraw.layouts.geometry import Geometry
from tests.helpers.backends import device_ids
from tests.helpers.world import World

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

MANY = Geometry(layers=2, blocks=1300, block_size=1, heads=1, head_size=8, element_size=2)


def captured(gpu: int, beside: Callable[[], None]) -> None:
    """Capture and replay something of torch's, with `beside` in the midst of the capture."""
    with torch.cuda.device(gpu):
        value, graph = torch.zeros(64, device="cuda"), torch.cuda.CUDAGraph()
        # A stream of ours: the one that torch keeps for captures is the device's that was current when it was made.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            value += 1
            beside()
            value += 1
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert (value == 4).all()


@pytest.mark.parametrize("another_thread", [False, True])
def test_transfers_beside_a_capture(gpu: int, another_thread: bool) -> None:
    w = World(gpu)
    errors = []

    def work() -> None:
        try:
            for k in range(40):
                done = kvraw.store(w.cache, w.chunks, [k % 40], stream=w.stream)
                done.done()
            done.wait()
            with kvraw.HostPool(1 << 20, device=gpu) as pool, kvraw.DeviceBuffer(4096, gpu):
                pool.free(pool.chunks(1, 4096))
                chunks = pool.chunks(1, w.chunks[0].nbytes)
                kvraw.store(w.cache, chunks, [7], stream=w.stream).wait()
                w.chunks[0].numpy()[:] = chunks[0].numpy()
            with kvraw.HostPool(1 << 20, device=gpu, options=kvraw.HostOptions(grow=True)) as pool:
                pool.wait_ready(30)
        except BaseException as error:
            errors.append(error)

    def beside() -> None:
        if not another_thread:
            work()
            return
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    captured(gpu, beside)
    assert not errors, errors
    np.testing.assert_array_equal(w.chunk(0)[0, 1, 0], w.paged[1, 0, 7])
    w.close()


def test_what_is_let_go_of_in_a_capture(gpu: int) -> None:
    w = World(gpu)
    kvraw.store(w.cache, w.chunks, device_ids((1, 2), gpu, w.stream), stream=w.stream).wait()
    worlds, kept = [w], []
    del w

    def beside() -> None:
        kept.append(weakref.ref(worlds[0].memory))
        worlds.clear()
        gc.collect()

    captured(gpu, beside)
    assert kept
    assert kept[0]() is None


def test_what_a_captured_transfer_needs_is_made_in_the_capture(gpu: int) -> None:
    w = World(gpu, MANY, chunks=80)
    stream = torch.cuda.Stream(gpu)
    ids = np.random.default_rng(0).permutation(1300)[:1280]
    before = w.now()
    with torch.cuda.device(gpu):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kvraw.load(w.cache, w.chunks, ids, stream=stream)  # an upload of a size that was not there
        graph.replay()  # on the current stream
        torch.cuda.synchronize()
    after = w.now()
    rows = np.concatenate([w.chunk(k)[:, :, :] for k in range(80)], axis=2)
    np.testing.assert_array_equal(after[:, :, ids], rows.swapaxes(0, 1))
    rest = np.setdiff1d(np.arange(1300), ids)
    np.testing.assert_array_equal(after[:, :, rest], before[:, :, rest])
    w.close()


def test_more_launches_than_status_words_at_hand(gpu: int) -> None:
    w = World(gpu)
    stream = torch.cuda.Stream(gpu)
    ids = device_ids((5, 9), gpu, w.stream)
    with torch.cuda.device(gpu):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(1100):
                done = kvraw.store(w.cache, w.chunks, ids, stream=stream)
        graph.replay()  # on the current stream
        torch.cuda.synchronize()
    done.wait()
    np.testing.assert_array_equal(w.chunk(0)[0, 2, 1], w.paged[2, 0, 9])
    w.close()
