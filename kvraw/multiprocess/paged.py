"""Between a paged cache and chunks: what a worker copies, as one store or load of all chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvraw.cache import PagedCache
from kvraw.checks import integer
from kvraw.copying.transfer import Transfer
from kvraw.errors import BoundsError
from kvraw.multiprocess.keys import EngineDrivenContextMetadata, MemoryLayoutDesc
from kvraw.transfer_plan import TransferPlan

__all__ = ["PagedCopies", "compute_kv_layout", "gather_paged_kv_to_cpu", "scatter_cpu_to_paged_kv"]

_PLAIN = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def compute_kv_layout(cache: PagedCache, chunk_tokens: int, dtype: str | None = None) -> EngineDrivenContextMetadata:
    """What chunks of a cache are.

    Parameters
    ----------
    cache : PagedCache
        The cache.
    chunk_tokens : int
        Tokens of a chunk, a multiple of the cache's block size.
    dtype : str, optional
        Type of the elements by torch's name; part of what chunks are called, so workers that share chunks give the
        same. Default: an integer of that size.

    Returns
    -------
    EngineDrivenContextMetadata
        Shape ``[2, layers, tokens, hidden]``, or ``[layers, tokens, hidden]`` where K and V are one row.

    Raises
    ------
    BoundsError, LayoutError
        The tokens are no multiple of a block, or the type has another size than the cache's elements.
    """
    g = cache.geometry
    name = dtype or _PLAIN.get(g.element_size, "uint8")
    scale = 1 if dtype or g.element_size in _PLAIN else g.element_size
    inner = (g.layers, chunk_tokens, g.heads * g.head_size * scale)
    layout = MemoryLayoutDesc((inner if g.planes == 1 else (g.planes, *inner),), (name,))
    metadata = EngineDrivenContextMetadata(layout, g.block_size, g.planes == 1, integer("chunk_tokens", chunk_tokens))
    if layout.nbytes != cache.chunk_bytes(chunk_tokens):
        raise BoundsError(f"dtype is {dtype}, the cache's elements have {g.element_size} bytes")
    return metadata


class PagedCopies:
    """Gather and scatter of a cache's blocks, planned once.

    Parameters
    ----------
    cache : PagedCache
        The cache.
    blocks_per_chunk : int
        Blocks of a chunk.
    options
        Of `TransferPlan`: `engine`, `neighbour`, `max_rate`.

    Raises
    ------
    BoundsError
        `blocks_per_chunk` is not positive.
    """

    def __init__(self, cache: PagedCache, blocks_per_chunk: int, **options: Any) -> None:
        if integer("blocks_per_chunk", blocks_per_chunk) <= 0:
            raise BoundsError(f"blocks_per_chunk is {blocks_per_chunk}, must be positive")
        tokens = blocks_per_chunk * cache.geometry.block_size
        self.cache, self.blocks_per_chunk, self.chunk_bytes = cache, blocks_per_chunk, cache.chunk_bytes(tokens)
        self._gather = TransferPlan(cache, "store", chunk_tokens=tokens, **options)
        self._scatter = None if cache.readonly else TransferPlan(cache, "load", chunk_tokens=tokens, **options)
        self._side = cache.device is not None

    def gather(self, block_ids: Sequence[int], chunks: Sequence[Any], indices: Sequence[int], stream: Any) -> Transfer:
        """Copy blocks to chunks; `indices` says which chunks of the row of `block_ids` those are."""
        per = self.blocks_per_chunk
        ids = np.asarray(block_ids, np.int64)
        whole = len(ids) // per
        if any(not 0 <= at < whole for at in indices):
            raise BoundsError(f"chunk_indices {list(indices)} must be in [0, {whole}), the whole chunks of block_ids")
        wanted = ids[: whole * per].reshape(whole, per)[np.asarray(indices, np.int64)].reshape(-1)
        return self._gather(list(chunks), wanted, stream=stream, side=self._side)

    def scatter(self, block_ids: Sequence[int], chunks: Sequence[Any], skip: int, stream: Any) -> Transfer:
        """Copy chunks to the first blocks of `block_ids`, but for the first `skip` blocks."""
        need = len(chunks) * self.blocks_per_chunk
        if len(block_ids) < need:
            raise BoundsError(
                f"block_ids has {len(block_ids)} entries, must have at least {need}, for {len(chunks)} chunks of "
                f"{self.blocks_per_chunk} blocks"
            )
        self.cache.require_writable()
        assert self._scatter is not None
        ids = np.asarray(block_ids[:need], np.int64)
        return self._scatter(list(chunks), ids, skip=min(skip, need), stream=stream, side=self._side)


def _wait(transfer: Transfer) -> None:
    """Wait for a copy, and for its end also where something interrupts that."""
    try:
        transfer.wait()
    except BaseException:
        transfer.wait()
        raise


def gather_paged_kv_to_cpu(
    cache: PagedCache,
    block_ids: Sequence[int],
    blocks_per_chunk: int,
    out: Sequence[Any] | None = None,
    chunk_indices: Sequence[int] | None = None,
    *,
    stream: Any = None,
) -> list[Any]:
    """Copy blocks of a cache into host memory, a chunk for each `blocks_per_chunk` of them, and wait for it.

    Parameters
    ----------
    cache : PagedCache
        The cache.
    block_ids : sequence of int
        Blocks; what is no whole chunk at their end is left out.
    blocks_per_chunk : int
        Blocks of a chunk.
    out : sequence, optional
        Where to, at least as many as chunks; what is more is left alone. Default: new arrays. For a cache on a GPU it
        has to be pinned, and must be given.
    chunk_indices : sequence of int, optional
        Only these chunks, in this order.
    stream : object, optional
        For a cache on a GPU: the copy sees what this stream was given before.

    Returns
    -------
    list
        The chunks.

    Raises
    ------
    BoundsError
        `out` is too short, or an index or a block is out of bounds.
    """
    copies = PagedCopies(cache, blocks_per_chunk)
    indices = range(len(block_ids) // blocks_per_chunk) if chunk_indices is None else list(chunk_indices)
    if out is not None and len(out) < len(indices):
        raise BoundsError(f"out has {len(out)} entries, must have at least {len(indices)}, the chunks to gather")
    made = [np.empty(copies.chunk_bytes, np.uint8) for _ in indices] if out is None else list(out[: len(indices)])
    _wait(copies.gather(block_ids, made, indices, stream))
    return made


def scatter_cpu_to_paged_kv(
    cache: PagedCache,
    block_ids: Sequence[int],
    chunks: Sequence[Any],
    blocks_per_chunk: int,
    skip_first_n_tokens: int = 0,
    *,
    stream: Any = None,
) -> None:
    """Copy chunks from host memory into blocks of a cache, and wait for it.

    Parameters
    ----------
    cache : PagedCache
        The cache.
    block_ids : sequence of int
        Blocks, at least as many as the chunks have; what is more is left alone.
    chunks : sequence
        The chunks.
    blocks_per_chunk : int
        Blocks of a chunk.
    skip_first_n_tokens : int
        Tokens over all chunks to leave out, rounded down to whole blocks.
    stream : object, optional
        For a cache on a GPU: the copy sees what this stream was given before, and what it is given later sees the copy.

    Raises
    ------
    BoundsError
        There are too few blocks, or one is out of bounds.
    """
    copies = PagedCopies(cache, blocks_per_chunk)
    skip = max(integer("skip_first_n_tokens", skip_first_n_tokens), 0) // cache.geometry.block_size
    _wait(copies.scatter(block_ids, chunks, skip, stream))
