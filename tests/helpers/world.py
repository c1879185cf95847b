"""A cache on a device with chunks in pinned memory, for tests that poke at one part."""

from __future__ import annotations

import numpy as np

import kvraw
from kvraw.layouts.geometry import Geometry
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver

G = Geometry(layers=3, blocks=40, block_size=4, heads=2, head_size=16, element_size=2)
TOKENS = 16


class World:
    """A cache of random bytes on the device, and chunks of random bytes in pinned memory."""

    def __init__(self, device: int, geometry: Geometry = G, chunks: int = 6) -> None:
        self.device, self.geometry = device, geometry
        self.stream = kvraw.Stream(device)
        self.shape = (geometry.layers, 2, geometry.blocks, geometry.block_size, geometry.heads, geometry.head_size * 2)
        rng = np.random.default_rng(1)
        self.paged = rng.integers(0, 256, self.shape, dtype=np.uint8)
        self.memory = kvraw.DeviceBuffer(self.paged.nbytes, device)
        self.pool = kvraw.HostPool(self.paged.nbytes * 3 + chunks * 4096 + (1 << 20), device=device)
        (self.mirror,) = self.pool.chunks(1, self.paged.nbytes)
        self.mirror.numpy()[:] = self.paged.ravel()
        self.copy(self.memory.address, self.mirror.address, self.paged.nbytes)
        each = self.paged.nbytes // geometry.layers
        self.cache = kvraw.PagedCache.from_pointers(
            [self.memory.address + k * each for k in range(geometry.layers)], 1, geometry, device=device
        )
        self.chunks = self.pool.chunks(chunks, self.cache.chunk_bytes(TOKENS))
        for c in self.chunks:
            c.numpy()[:] = rng.integers(0, 256, c.nbytes, dtype=np.uint8)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        with DeviceScope(self.device):
            driver().memcpy_async(dst, src, nbytes, self.stream.handle)
        self.stream.synchronize()

    def now(self) -> np.ndarray:
        """The cache as it is on the device."""
        self.copy(self.mirror.address, self.memory.address, self.paged.nbytes)
        return self.mirror.numpy().reshape(self.shape).copy()

    def chunk(self, at: int) -> np.ndarray:
        g = self.geometry
        return self.chunks[at].numpy().reshape(2, g.layers, TOKENS // g.block_size, g.block_size, g.heads, -1)

    def close(self) -> None:
        self.stream.synchronize()
        self.pool.close()
        self.memory.close()
        self.stream.close()
