"""Layers that are allocations of their own and neighbours in address: the driver refuses a copy over their border."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.layouts.geometry import Geometry
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver

pytestmark = pytest.mark.gpu

LAYER, BLOCKS = 2 << 20, 512
G = Geometry(layers=3, blocks=BLOCKS, block_size=1, heads=1, head_size=2048, element_size=2, planes=1)


@pytest.fixture
def layers(gpu: int) -> Iterator[list[int]]:
    """Three buffers, each of which begins where the one before ends."""
    with ExitStack() as stack:
        made = [stack.enter_context(kvraw.DeviceBuffer(LAYER, gpu)) for _ in range(32)]
        at = sorted(buffer.address for buffer in made)
        runs = [at[k : k + 3] for k in range(30) if at[k + 2] - at[k] == 2 * LAYER]
        if not runs:
            pytest.fail("no three of 32 allocations are neighbours")
        yield runs[0]


def read(layers: list[int], gpu: int, stream: kvraw.Stream) -> np.ndarray:
    with kvraw.HostPool(3 * LAYER, device=gpu) as pool, DeviceScope(gpu):
        (chunk,) = pool.chunks(1, 3 * LAYER)
        for k, layer in enumerate(layers):
            driver().memcpy_async(chunk.address + k * LAYER, layer, LAYER, stream.handle)
        stream.synchronize()
        return chunk.numpy().reshape(3, BLOCKS, -1).copy()


def by_stream(stream: kvraw.Stream, work: Callable[[Any], object]) -> None:
    work(stream)
    stream.synchronize()


def by_legacy_stream(stream: kvraw.Stream, work: Callable[[Any], object]) -> None:
    work(0)
    with DeviceScope(stream.device):
        driver().stream_synchronize(0)


@pytest.mark.parametrize("call", [by_stream, by_legacy_stream])
@pytest.mark.parametrize("ids", [range(BLOCKS), [7], [0, BLOCKS - 1], range(BLOCKS - 1, -1, -1)], ids=str)
def test_layers(layers: list[int], gpu: int, call: Callable[..., None], ids: Any) -> None:
    ids = np.array(ids)
    with kvraw.Stream(gpu) as stream, kvraw.HostPool(2 * 3 * LAYER + 8192, device=gpu) as pool:
        cache = kvraw.PagedCache.from_pointers(layers, 3, G, device=gpu)
        chunks = pool.chunks(2, cache.chunk_bytes(len(ids)))
        rng = np.random.default_rng(0)
        for chunk in chunks:
            chunk.numpy()[:] = rng.integers(0, 256, chunk.nbytes, dtype=np.uint8)
        call(stream, lambda s: kvraw.load(cache, chunks[:1], ids, stream=s, engine="copy"))
        found = read(layers, gpu, stream)
        np.testing.assert_array_equal(found[:, ids].ravel(), chunks[0].numpy())
        call(stream, lambda s: kvraw.store(cache, chunks[1:], ids, stream=s, engine="copy"))
        np.testing.assert_array_equal(chunks[1].numpy(), chunks[0].numpy())


@pytest.mark.parametrize("call", [by_stream, by_legacy_stream])
def test_blocks_of_addresses(layers: list[int], gpu: int, call: Callable[..., None]) -> None:
    """A batch of a block of each layer, at one distance; and of the last of a layer and the first of the next."""
    with kvraw.Stream(gpu) as stream, kvraw.HostPool(1 << 20, device=gpu) as pool:
        (chunk,) = pool.chunks(1, 4 * 4096)
        chunk.numpy()[:] = np.random.default_rng(1).integers(0, 256, chunk.nbytes, dtype=np.uint8)
        for at in (
            [layer + 5 * 4096 for layer in layers],
            [layers[1] - 4096, layers[1], layers[2] - 4096, layers[2]],
        ):
            host = [chunk.address + 4096 * k for k in range(len(at))]
            sizes = [4096] * len(at)
            call(
                stream,
                lambda s, at=at, host=host, sizes=sizes: kvraw.memcpy_batch(at, host, sizes, stream=s, device=gpu),
            )
            found = read(layers, gpu, stream).ravel()
            for k, address in enumerate(at):
                begin = address - layers[0]
                np.testing.assert_array_equal(found[begin : begin + 4096], chunk.numpy()[4096 * k : 4096 * (k + 1)])


def test_torch_layers_in_a_capture(gpu: int) -> None:
    torch = pytest.importorskip("torch")
    from kvraw.adapters import vllm

    pool = [torch.empty(32 << 20, dtype=torch.uint8, device=f"cuda:{gpu}") for _ in range(6)]
    pool.sort(key=lambda t: t.data_ptr())
    host = torch.arange(6 * 4096, dtype=torch.int64).to(torch.uint8).pin_memory()
    source = torch.tensor([host.data_ptr() + 4096 * k for k in range(6)])
    target = torch.tensor([t.data_ptr() + 8192 for t in pool])
    sizes = torch.full((6,), 4096)
    with torch.cuda.device(gpu):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            vllm.swap_blocks_batch(source, target, sizes)
        graph.replay()
        torch.cuda.synchronize()
    for k, t in enumerate(pool):
        assert torch.equal(t[8192 : 8192 + 4096].cpu(), host[4096 * k : 4096 * (k + 1)])
