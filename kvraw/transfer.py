"""Store and load: blocks of a paged cache to chunks and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from kvraw.cache import PagedCache
from kvraw.chunks import chunk_bytes
from kvraw.errors import BoundsError, LayoutError
from kvraw.runtime.pool import HostChunk
from kvraw.transfer_plan import Direction, Transfer, TransferPlan

__all__ = ["load", "load_slots", "store", "store_slots"]


def _plan_for(
    cache: PagedCache,
    direction: Direction,
    by: Literal["block", "slot"],
    chunks: Sequence[Any],
    chunk_tokens: int | None,
    chunk_layout: str,
    engine: str | None,
    check: bool,
    ctas: int | None,
) -> TransferPlan:
    """The plan for these arguments, kept with the cache."""
    # 0: there is no chunk to tell; None: an address, which does not, or not asked.
    nbytes = None
    if chunk_tokens is None:
        first = chunks[0] if type(chunks) is list and chunks else None
        nbytes = first.nbytes if type(first) is HostChunk else chunk_bytes(chunks)
    key = (direction, by, chunk_tokens, nbytes, chunk_layout, engine, check, ctas)
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
        plan = TransferPlan(
            cache.without_plans(),
            direction,
            chunk_tokens=chunk_tokens,
            by=by,
            chunk_layout=chunk_layout,
            engine=engine,
            check=check,
            ctas=ctas,
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
) -> Transfer:
    """Copy blocks of a cache to chunks; see `TransferPlan` for the arguments and errors.

    `chunk_tokens` defaults to what the chunks' size says. The plan is kept with the cache and used again, with the
    engine that `KVRAW_ENGINE` named when it was made.
    """
    plan = _plan_for(cache, "store", "block", chunks, chunk_tokens, chunk_layout, engine, check, ctas)
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
) -> Transfer:
    """Copy chunks to blocks of a cache; see `TransferPlan` for the arguments and errors."""
    plan = _plan_for(cache, "load", "block", chunks, chunk_tokens, chunk_layout, engine, check, ctas)
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
) -> Transfer:
    """Copy single tokens of a cache to chunks, by slot mapping; a negative slot leaves its token out."""
    plan = _plan_for(cache, "store", "slot", chunks, chunk_tokens, chunk_layout, engine, check, ctas)
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
) -> Transfer:
    """Copy chunks to single tokens of a cache, by slot mapping; a negative slot leaves its token out."""
    plan = _plan_for(cache, "load", "slot", chunks, chunk_tokens, chunk_layout, engine, check, ctas)
    return plan(chunks, slots, skip=skip_tokens, stream=stream)
