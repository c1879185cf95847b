"""Expected contents of the demo's memory, by plain indexing of shaped arrays, without kvraw's layouts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvraw.layouts.geometry import Geometry

__all__ = ["CHUNK_TOKENS", "GUARD_BYTES", "UNUSED", "Truth"]

Bytes = npt.NDArray[np.uint8]

CHUNK_TOKENS = 256
GUARD_BYTES = 4096  # before, between and behind the layers' tensors
UNUSED = 0x5A  # what chunks hold before the store


class Truth:
    """The cache as it was filled, and where memory differs from what it must be.

    Parameters
    ----------
    filled : numpy.ndarray of uint8
        A copy of the cache: `GUARD_BYTES`, then each layer's tensor and `GUARD_BYTES` behind it.
    geometry : Geometry
        Its counts; a tensor is [planes, blocks, tokens, bytes of all heads].
    ids : numpy.ndarray of int64
        The blocks that are stored, in their order.
    """

    def __init__(self, filled: Bytes, geometry: Geometry, ids: npt.NDArray[np.int64]) -> None:
        g = geometry
        self.filled, self.ids = filled, ids
        self.row = g.heads * g.head_size * g.element_size
        self.shape = (g.planes, g.blocks, g.block_size, self.row)  # of one layer's tensor
        self.size = g.planes * g.blocks * g.block_size * self.row
        self.layers = self.tensors(filled)

    def tensors(self, image: Bytes) -> list[Bytes]:
        """The layers' tensors of an image of the cache, each behind guard bytes."""
        starts = range(GUARD_BYTES, len(image) - GUARD_BYTES, self.size + GUARD_BYTES)
        return [image[at : at + self.size].reshape(self.shape) for at in starts]

    def cache_difference(self, image: Bytes) -> str | None:
        """First byte of the cache that is not as it was filled, guard blocks and guard bytes included."""
        step = self.size + GUARD_BYTES
        for layer in range(len(self.layers) + 1):  # guard bytes and the tensor behind them; at last guard bytes alone
            part = slice(layer * step, (layer + 1) * step)
            found, right = image[part], self.filled[part]
            if np.array_equal(found, right):
                continue
            at = int(np.argmax(found != right))
            where = f"guard bytes before layer {layer}, byte {at}"
            if at >= GUARD_BYTES:
                plane, block, token, byte = np.unravel_index(at - GUARD_BYTES, self.shape)
                guard = "" if block in self.ids else " (a guard block)"
                where = f"cache layer {layer}, plane {plane}, block {block}{guard}, token {token}, byte {byte}"
            return f"{where}: is {found[at]:#04x}, must be {right[at]:#04x}"
        return None

    def chunk_difference(self, chunks: list[Bytes]) -> str | None:
        """First byte of the chunks that is not what the blocks held; behind the last block they stay untouched."""
        planes, _, block_size, _ = self.shape
        per_chunk = CHUNK_TOKENS // block_size
        for number, chunk in enumerate(chunks):
            ids = self.ids[number * per_chunk : (number + 1) * per_chunk]
            found = chunk.reshape(planes, len(self.layers), CHUNK_TOKENS, self.row)
            for layer, tensor in enumerate(self.layers):
                right = np.full((planes, CHUNK_TOKENS, self.row), UNUSED, np.uint8)
                right[:, : len(ids) * block_size] = tensor[:, ids].reshape(planes, -1, self.row)
                if not np.array_equal(found[:, layer], right):
                    at = np.unravel_index(int(np.argmax(found[:, layer] != right)), right.shape)
                    return (
                        f"chunk {number}, plane {at[0]}, layer {layer}, token {at[1]}, byte {at[2]}: "
                        f"is {found[:, layer][at]:#04x}, must be {right[at]:#04x}"
                    )
        return None
