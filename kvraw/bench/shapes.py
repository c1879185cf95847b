"""The caches that are measured: one for each run size, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from kvraw.copying.plan import CopyPlan
from kvraw.layouts.geometry import CacheLayout, Geometry, chunk_side, copy_plan, find_chunk_layout, find_format

__all__ = ["BLOCKS", "DEVICE_SHAPES", "SHAPES", "Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A cache and its chunks, without the number of blocks.

    Attributes
    ----------
    name : str
        What the cache is.
    format : int
        Its format.
    geometry : Geometry
        Its counts; `blocks` does not matter.
    chunk_tokens : int
        Tokens of a chunk.
    chunk_layout : str
        Layout of a chunk.
    """

    name: str
    format: int
    geometry: Geometry
    chunk_tokens: int = 256
    chunk_layout: str = "2LTD"

    def plan(self) -> CopyPlan:
        """The copies of a store of one block."""
        geometry = replace(self.geometry, blocks=3)  # so that planes of one block do not fold
        paged = CacheLayout(find_format(self.format), geometry).side("block")
        flat = chunk_side(find_chunk_layout(self.chunk_layout), geometry, self.chunk_tokens, "block")
        return copy_plan(geometry, paged, flat, "block")

    @property
    def run_bytes(self) -> int:
        """Bytes of a run, after folding."""
        return self.plan().run_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return self.chunk_tokens * self.geometry.token_bytes

    def within(self, nbytes: int) -> Shape | None:
        """The shape with fewer tokens per chunk and layers, so that a chunk fits; None where runs would change."""
        shape, run = self, self.run_bytes
        while shape.chunk_bytes > nbytes:
            g = shape.geometry
            if shape.chunk_tokens > g.block_size:
                shape = replace(shape, chunk_tokens=g.block_size * max(1, shape.chunk_tokens // g.block_size // 2))
            elif g.layers > 1:
                shape = replace(shape, geometry=replace(g, layers=g.layers // 2))
            else:
                return None
        return shape if shape.run_bytes == run else None


def _hnd(layers: int, heads: int, head_size: int) -> Geometry:
    return Geometry(layers, 1, 16, heads, head_size, 2)


# Runs are a head's row where blocks are HND and chunks token-major, a layer's block where both are NHD, and a whole
# block where all layers of one lie together.
SHAPES = MappingProxyType(
    {
        128: Shape("HND, heads of 64", 6, _hnd(32, 8, 64)),
        256: Shape("HND, heads of 128", 6, _hnd(32, 8, 128)),
        512: Shape("HND, heads of 256", 6, _hnd(16, 4, 256)),
        1152: Shape("HND, heads of 576", 6, _hnd(4, 4, 576)),
        2048: Shape("NHD, one head of 64", 1, _hnd(32, 1, 64)),
        4096: Shape("NHD, one head of 128", 1, _hnd(32, 1, 128)),
        32768: Shape("NHD, 8 heads of 128", 1, _hnd(32, 8, 128)),
        262144: Shape("NHD, blocks of 128 tokens", 1, Geometry(4, 1, 128, 8, 128, 2)),
        2097152: Shape("cross-layer blocks", 0, _hnd(32, 8, 128), 16, "L2TD"),
    }
)
# Between device memory: head rows, K and V side by side in a row, and blocks.
DEVICE_SHAPES = (
    SHAPES[128],
    SHAPES[256],
    Shape("fused K and V, HND, heads of 128", 10, _hnd(32, 8, 128)),
    Shape("fused K and V, NHD, heads of 128", 11, _hnd(32, 8, 128)),
    SHAPES[1152],
    SHAPES[32768],
)
BLOCKS = SHAPES[32768]  # for latencies and host times, where no model is named
