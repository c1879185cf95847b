"""Store and load: blocks of a paged cache to chunks and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from kvraw.cache import PagedCache
from kvraw.chunks import chunk_bytes
from kvraw.copying.planner import Neighbour
from kvraw.copying.transfer import Transfer
from kvraw.errors import BoundsError, LayoutError
from kvraw.runtime.host.pool import HostChunk
from kvraw.transfer_plan import Direction, TransferPlan

__all__ = ["load", "load_slots", "store", "store_slots"]


def _plan_for(
    cache: PagedCache,
    direction: Direction,
    by: Literal["block", "slot"],
    chunks: Sequence[Any],
    chunk_tokens: int | None,
    chunk_layout: str,
    options: tuple[str | None, bool, int | None, Neighbour | None, float],
) -> TransferPlan:
    """The plan for these arguments, kept with the cache."""
    # 0: there is no chunk to tell; None: an address, which does not, or not asked.
    nbytes = None
    if chunk_tokens is None:
        first = chunks[0] if type(chunks) is list and chunks else None
        nbytes = first.nbytes if type(first) is HostChunk else chunk_bytes(chunks)
    key = (direction, by, chunk_tokens, nbytes, chunk_layout, *options)
    plan: TransferPlan | None = cache.plans.get(key)
    if plan is None:
        geometry = cache.geometry
        if chunk_tokens is None:
            if nbytes is None:
                raise LayoutError("chunks are addresses; pass chunk_tokens=")
            nbytes = nbytes or geometry.block_size * geometry.token_bytes
            if nbytes % geometry.token_bytes:
                raise BoundsError(
                    f"chunks[0] has {nbytes} bytes, must be a multiple of {geometry.token_bytes}, the bytes of a token"
                )
            chunk_tokens = nbytes // geometry.token_bytes
        engine, check, ctas, neighbour, max_rate = options
        plan = TransferPlan(
            cache.without_plans(),
            direction,
            chunk_tokens=chunk_tokens,
            by=by,
            chunk_layout=chunk_layout,
            engine=engine,
            check=check,
            ctas=ctas,
            neighbour=neighbour,
            max_rate=max_rate,
        )
        cache.keep_plan(key, plan)
    return plan


def store(
    cache: PagedCache,
    chunks: Sequence[Any],
    block_ids: Any,
    *,
    skip_blocks: int = 0,
    stream: Any = None,
    chunk_tokens: int | None = None,
    chunk_layout: str = "2LTD",
    engine: str | None = None,
    check: bool = True,
    ctas: int | None = None,
    neighbour: Neighbour | None = None,
    max_rate: float = 0.0,
) -> Transfer:
    """Copy blocks of a cache to chunks.

    The plan for these options is kept with the cache and used again.

    Parameters
    ----------
    cache : PagedCache
        The cache.
    chunks : sequence
        Where to: `HostChunk`, tensors or arrays without gaps, or addresses (with `chunk_tokens`), in order.
    block_ids : sequence of int, array or tensor
        Blocks; entry i belongs to the i-th block of the row of chunks. On the host, or on the cache's device.
    skip_blocks : int
        Leading entries to leave out: their bytes stay as they are.
    stream : object, optional
        Stream of the cache's device (``__cuda_stream__``, ``cuda_stream``, or an integer), which the copy takes its
        place on. Needed for a cache on a GPU; without one the copy is done when the call returns.
    chunk_tokens : int, optional
        Tokens of a chunk; default: what the size of the chunks says.
    chunk_layout : str
        Order of a chunk's axes: "2LTD", "T2D" or "L2TD".
    engine : str, optional
        "auto", "kernel", "copy", "staged", "cpu" or "reference"; default: `KVRAW_ENGINE` at the first such call.
    check : bool
        Check ids against the cache, and that no two chunks begin at one address.
    ctas : int, optional
        Most thread blocks of any kernel; 0: the copy engine alone.
    neighbour : "busy" or "idle", optional
        What the GPU does beside the copy, see `TransferPlan`; default: `KVRAW_NEIGHBOUR`.
    max_rate : float
        Most bytes a second over the link; 0: any.

    Returns
    -------
    Transfer
        To wait for. All that it uses is kept alive until the copy is over.

    Raises
    ------
    BoundsError
        Bad ids, too few chunks, or one of the wrong size; nothing is moved.
    LayoutError
        The size of a chunk does not go with the cache, or nothing says it.
    PlacementError
        Memory lies where the engine does not reach it, or the stream is another device's.
    ClosedError
        A chunk, or its pool, was given back.
    TypeError
        An argument is of the wrong kind; on a GPU, `stream` is missing.

    See Also
    --------
    TransferPlan : the same, made once for many calls.

    Examples
    --------
    >>> layers = [np.arange(8 * 4 * 2 * 4, dtype=np.float32).reshape(1, 8, 4, 2, 4).repeat(2, 0)]
    >>> cache = kvraw.PagedCache.from_tensors(layers, axes="PBTHD")
    >>> pool = kvraw.HostPool(1 << 20, pin=False)
    >>> chunks = pool.chunks(1, cache.chunk_bytes(tokens=8))
    >>> kvraw.store(cache, chunks, [5, 2]).wait()
    >>> bool((chunks[0].numpy(np.float32)[:32].reshape(4, 2, 4) == layers[0][0, 5]).all())
    True
    """
    options = engine, check, ctas, neighbour, max_rate
    plan = _plan_for(cache, "store", "block", chunks, chunk_tokens, chunk_layout, options)
    return plan(chunks, block_ids, skip=skip_blocks, stream=stream)


def load(
    cache: PagedCache,
    chunks: Sequence[Any],
    block_ids: Any,
    *,
    skip_blocks: int = 0,
    stream: Any = None,
    chunk_tokens: int | None = None,
    chunk_layout: str = "2LTD",
    engine: str | None = None,
    check: bool = True,
    ctas: int | None = None,
    neighbour: Neighbour | None = None,
    max_rate: float = 0.0,
) -> Transfer:
    """Copy chunks to blocks of a cache: what `store` copied, or anything of that layout.

    Parameters
    ----------
    cache : PagedCache
        The cache.
    chunks : sequence
        Where from: `HostChunk`, tensors or arrays without gaps, or addresses (with `chunk_tokens`), in order.
    block_ids : sequence of int, array or tensor
        Blocks; entry i belongs to the i-th block of the row of chunks. On the host, or on the cache's device.
    skip_blocks : int
        Leading entries to leave out: their bytes stay as they are.
    stream : object, optional
        Stream of the cache's device (``__cuda_stream__``, ``cuda_stream``, or an integer), which the copy takes its
        place on. Needed for a cache on a GPU; without one the copy is done when the call returns.
    chunk_tokens : int, optional
        Tokens of a chunk; default: what the size of the chunks says.
    chunk_layout : str
        Order of a chunk's axes: "2LTD", "T2D" or "L2TD".
    engine : str, optional
        "auto", "kernel", "copy", "staged", "cpu" or "reference"; default: `KVRAW_ENGINE` at the first such call.
    check : bool
        Check ids against the cache, and on the host that none stands twice.
    ctas : int, optional
        Most thread blocks of any kernel; 0: the copy engine alone.
    neighbour : "busy" or "idle", optional
        What the GPU does beside the copy, see `TransferPlan`; default: `KVRAW_NEIGHBOUR`.
    max_rate : float
        Most bytes a second over the link; 0: any.

    Returns
    -------
    Transfer
        To wait for. All that it uses is kept alive until the copy is over.

    Raises
    ------
    BoundsError
        Bad or repeated ids, too few chunks, or one of the wrong size; nothing is moved.
    LayoutError
        The size of a chunk does not go with the cache, or nothing says it.
    PlacementError
        Memory lies where the engine does not reach it, the cache is read-only, or the stream is another device's.
    ClosedError
        A chunk, or its pool, was given back.
    TypeError
        An argument is of the wrong kind; on a GPU, `stream` is missing.

    Examples
    --------
    >>> layers = [np.arange(8 * 4 * 2 * 4, dtype=np.float32).reshape(1, 8, 4, 2, 4).repeat(2, 0)]
    >>> cache = kvraw.PagedCache.from_tensors(layers, axes="PBTHD")
    >>> pool = kvraw.HostPool(1 << 20, pin=False)
    >>> chunks = pool.chunks(1, cache.chunk_bytes(tokens=8))
    >>> kvraw.store(cache, chunks, [5, 2]).wait()
    >>> before = layers[0][:, 5].copy()
    >>> layers[0][:] = 0
    >>> kvraw.load(cache, chunks, [5, 2]).wait()
    >>> bool((layers[0][:, 5] == before).all()), bool(layers[0][:, 3].any())
    (True, False)
    """
    options = engine, check, ctas, neighbour, max_rate
    plan = _plan_for(cache, "load", "block", chunks, chunk_tokens, chunk_layout, options)
    return plan(chunks, block_ids, skip=skip_blocks, stream=stream)


def store_slots(
    cache: PagedCache,
    chunks: Sequence[Any],
    slots: Any,
    *,
    skip_tokens: int = 0,
    stream: Any = None,
    chunk_tokens: int | None = None,
    chunk_layout: str = "2LTD",
    engine: str | None = None,
    check: bool = True,
    ctas: int | None = None,
    neighbour: Neighbour | None = None,
    max_rate: float = 0.0,
) -> Transfer:
    """Copy single tokens of a cache to chunks, by slot mapping.

    Parameters
    ----------
    cache : PagedCache
        The cache.
    chunks : sequence
        Where to: `HostChunk`, tensors or arrays without gaps, or addresses (with `chunk_tokens`), in order.
    slots : sequence of int, array or tensor
        Slots (block * block_size + offset); entry i belongs to the i-th token of the row of chunks, and a negative one
        leaves its token out. On the host, or on the cache's device.
    skip_tokens : int
        Leading entries to leave out: their bytes stay as they are.
    stream : object, optional
        Stream of the cache's device (``__cuda_stream__``, ``cuda_stream``, or an integer), which the copy takes its
        place on. Needed for a cache on a GPU; without one the copy is done when the call returns.
    chunk_tokens : int, optional
        Tokens of a chunk; default: what the size of the chunks says.
    chunk_layout : str
        Order of a chunk's axes: "2LTD", "T2D" or "L2TD".
    engine : str, optional
        "auto", "kernel", "copy", "staged", "cpu" or "reference"; default: `KVRAW_ENGINE` at the first such call.
    check : bool
        Check slots against the cache, and that no two chunks begin at one address.
    ctas : int, optional
        Most thread blocks of any kernel; 0: the copy engine alone.
    neighbour : "busy" or "idle", optional
        What the GPU does beside the copy, see `TransferPlan`; default: `KVRAW_NEIGHBOUR`.
    max_rate : float
        Most bytes a second over the link; 0: any.

    Returns
    -------
    Transfer
        To wait for. All that it uses is kept alive until the copy is over.

    Raises
    ------
    BoundsError
        Bad slots, too few chunks, or one of the wrong size; nothing is moved.
    LayoutError
        The size of a chunk does not go with the cache, or nothing says it.
    PlacementError
        Memory lies where the engine does not reach it, or the stream is another device's.
    ClosedError
        A chunk, or its pool, was given back.
    TypeError
        An argument is of the wrong kind; on a GPU, `stream` is missing.

    Examples
    --------
    >>> layers = [np.arange(8 * 4 * 2 * 4, dtype=np.float32).reshape(1, 8, 4, 2, 4).repeat(2, 0)]
    >>> cache = kvraw.PagedCache.from_tensors(layers, axes="PBTHD")
    >>> pool = kvraw.HostPool(1 << 20, pin=False)
    >>> chunks = pool.chunks(1, cache.chunk_bytes(tokens=8))
    >>> kvraw.store_slots(cache, chunks, [9, -1, 4]).wait()  # the second token of the chunk stays as it is
    >>> bool((chunks[0].numpy(np.float32)[:8].reshape(2, 4) == layers[0][0, 2, 1]).all())
    True
    """
    options = engine, check, ctas, neighbour, max_rate
    plan = _plan_for(cache, "store", "slot", chunks, chunk_tokens, chunk_layout, options)
    return plan(chunks, slots, skip=skip_tokens, stream=stream)


def load_slots(
    cache: PagedCache,
    chunks: Sequence[Any],
    slots: Any,
    *,
    skip_tokens: int = 0,
    stream: Any = None,
    chunk_tokens: int | None = None,
    chunk_layout: str = "2LTD",
    engine: str | None = None,
    check: bool = True,
    ctas: int | None = None,
    neighbour: Neighbour | None = None,
    max_rate: float = 0.0,
) -> Transfer:
    """Copy chunks to single tokens of a cache, by slot mapping.

    Parameters
    ----------
    cache : PagedCache
        The cache.
    chunks : sequence
        Where from: `HostChunk`, tensors or arrays without gaps, or addresses (with `chunk_tokens`), in order.
    slots : sequence of int, array or tensor
        Slots (block * block_size + offset); entry i belongs to the i-th token of the row of chunks, and a negative one
        leaves its token out. On the host, or on the cache's device.
    skip_tokens : int
        Leading entries to leave out: their bytes stay as they are.
    stream : object, optional
        Stream of the cache's device (``__cuda_stream__``, ``cuda_stream``, or an integer), which the copy takes its
        place on. Needed for a cache on a GPU; without one the copy is done when the call returns.
    chunk_tokens : int, optional
        Tokens of a chunk; default: what the size of the chunks says.
    chunk_layout : str
        Order of a chunk's axes: "2LTD", "T2D" or "L2TD".
    engine : str, optional
        "auto", "kernel", "copy", "staged", "cpu" or "reference"; default: `KVRAW_ENGINE` at the first such call.
    check : bool
        Check slots against the cache, and on the host that none stands twice.
    ctas : int, optional
        Most thread blocks of any kernel; 0: the copy engine alone.
    neighbour : "busy" or "idle", optional
        What the GPU does beside the copy, see `TransferPlan`; default: `KVRAW_NEIGHBOUR`.
    max_rate : float
        Most bytes a second over the link; 0: any.

    Returns
    -------
    Transfer
        To wait for. All that it uses is kept alive until the copy is over.

    Raises
    ------
    BoundsError
        Bad or repeated slots, too few chunks, or one of the wrong size; nothing is moved.
    LayoutError
        The size of a chunk does not go with the cache, or nothing says it.
    PlacementError
        Memory lies where the engine does not reach it, the cache is read-only, or the stream is another device's.
    ClosedError
        A chunk, or its pool, was given back.
    TypeError
        An argument is of the wrong kind; on a GPU, `stream` is missing.

    Examples
    --------
    >>> layers = [np.arange(8 * 4 * 2 * 4, dtype=np.float32).reshape(1, 8, 4, 2, 4).repeat(2, 0)]
    >>> cache = kvraw.PagedCache.from_tensors(layers, axes="PBTHD")
    >>> pool = kvraw.HostPool(1 << 20, pin=False)
    >>> chunks = pool.chunks(1, cache.chunk_bytes(tokens=8))
    >>> kvraw.store_slots(cache, chunks, [9, -1, 4]).wait()
    >>> layers[0][:] = 0
    >>> kvraw.load_slots(cache, chunks, [30, -1, 31]).wait()
    >>> layers[0][0, 7, 2:, 0, 0].tolist()
    [72.0, 32.0]
    """
    options = engine, check, ctas, neighbour, max_rate
    plan = _plan_for(cache, "load", "slot", chunks, chunk_tokens, chunk_layout, options)
    return plan(chunks, slots, skip=skip_tokens, stream=stream)
