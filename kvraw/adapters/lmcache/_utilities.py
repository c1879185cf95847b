"""Gathering paged KV into host tensors and back, for engines that hand over their tensors by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvraw.adapters.lmcache._blocks import blocks_of
from kvraw.adapters.lmcache._ids import ids_of
from kvraw.adapters.lmcache._paged import Paged, from_tensors, interned
from kvraw.adapters.lmcache._place import tensor_device
from kvraw.adapters.lmcache._types import EngineKVFormat, format_of, is_mla
from kvraw.adapters.tensors import flatten
from kvraw.arrays import pointer_vector
from kvraw.cache import views_of
from kvraw.layouts.discovery import discover
from kvraw.layouts.engine_shapes import every_shape
from kvraw.layouts.formats import FORMATS, VLLM_LAYOUTS
from kvraw.layouts.parts import parts_of
from kvraw.plain import require_memory

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["compute_kv_layout", "gather_paged_kv_to_cpu", "scatter_cpu_to_paged_kv"]

_log = logging.getLogger("kvraw")
# The order of heads and tokens by vLLM's names, which say that K and V are one row: versions that know them say so.
_POOLS = {name: "HND" if form.hnd else "NHD" for name, form in VLLM_LAYOUTS.items() if form.axes[-3:] in ("HTD", "THD")}
_NUMBERS = {
    shape.dims: shape.format.number
    for shape in every_shape()
    if "vllm" in shape.words and shape.given in ("", "L") and shape.dims == shape.format.axes
}


def _find(kv_caches: Mapping[str, Any], hints: Mapping[str, Any] | None, engine_kv_format: Any) -> Paged:
    tensors: Any = list(kv_caches.values())
    if not tensors:
        raise ValueError("kv_caches is empty. Cannot compute KV layout.")
    flat, hints = flatten(tensors), hints or {}
    number = None if engine_kv_format is None else format_of(engine_kv_format)
    for t in flat:
        require_memory("kv_caches", t)
    places = tuple((t.data_ptr(), tensor_device(t), tuple(t.shape), t.stride(), t.element_size()) for t in flat)
    lists = tuple(len(t) if isinstance(t, (list, tuple)) else 0 for t in tensors)
    key = ("engine", places, lists, tuple(sorted((k, str(v)) for k, v in hints.items())), number)
    return interned(key, lambda: _read(tensors, flat[0], hints, number))


def _axes(first: Any, number: int | None, kv_layout: str, nested: bool, cross_layer: bool) -> tuple[str, int] | None:
    """The axes of a tensor and the format by the rule that LMCache keeps to; None where it has none for such tensors.

    Strides decide, where two are equal a size of 1 is inside. Of five axes a 2 in front, or next to it, is K and V.
    """
    order = sorted(range(len(first.shape)), key=lambda i: (-first.stride()[i], first.shape[i] == 1))
    sizes = [int(first.shape[i]) for i in order]
    inner, lists = "HTD" if kv_layout == "HND" else "THD", "L/"
    if number is not None:
        form = FORMATS[number]
        spelled, lists = "" if form.flat else form.axes, f"{form.pointers}/" if form.pointers else ""
    elif nested or kv_layout not in ("NHD", "HND"):
        spelled = ""
    elif cross_layer:
        spelled, lists = "BLP" + inner, ""
    elif len(sizes) == 5:
        spelled = "PB" + inner if sizes[0] == 2 else "BP" + inner if sizes[1] == 2 else ""
    else:
        spelled = {3: "BTD", 4: "B" + inner}.get(len(sizes), "")
    if len(spelled) != len(sizes):
        return None
    letters = dict(zip(order, spelled, strict=True))
    return lists + "".join(letters[i] for i in range(len(sizes))), _NUMBERS[spelled] if number is None else number


def _read(tensors: Any, first: Any, hints: Mapping[str, Any], number: int | None) -> Paged:
    device, block_size = tensor_device(first), hints.get("tokens_per_block")
    if number is None and len(first.shape) == 3 and first.element_size() == 1:
        number = next((form.number for form in FORMATS.values() if form.token_bytes == first.shape[-1] > 0), None)
    form = None if number is None else FORMATS[number]
    if number is not None and form is not None and form.several:
        return from_tensors(number, tensors, block_size or 0, 1, device)
    cross_layer = len(tensors) == 1 and len(first.shape) == 6 if form is None else not form.pointers
    if cross_layer:
        tensors = first
    given = hints.get("kv_layout") or ""
    # The reference version reads layers of an engine on the CPU as heads-first where nothing else is said.
    kv_layout = _POOLS.get(given, given) or ("HND" if device is None and not cross_layer else "NHD")
    views = views_of(tensors, "kv_caches")
    nested = isinstance(tensors, list) and isinstance(tensors[0], (list, tuple))
    lists = hints.get("kv_list_layout") or None
    axes, name = (None if lists else _axes(first, number, kv_layout, nested, cross_layer)) or (None, -1)
    found = discover(
        views,
        axes=axes,
        format=number if axes is None else None,
        kv_layout=kv_layout if number is None else None,
        block_size=block_size,
        num_heads=hints.get("num_kv_heads"),
        head_size=hints.get("head_dim") if axes is None or "P" in axes else None,
        kv_list_layout=lists,
    )
    name = found.layout.format.number if axes is None else name
    older = FORMATS[name].older if name in FORMATS else -1
    if older >= 0 and number is None and given not in _POOLS and found.layout.geometry.head_size % 2 == 0:
        name = older  # the layouts that later versions name by the whole row
    parts = parts_of(found.layout.format, [found.layout])
    return Paged(pointer_vector("kv_caches", found.addresses), parts, device, name)


def compute_kv_layout(
    kv_caches: dict[str, Tensor], layout_hints: Mapping[str, Any] | None = None
) -> tuple[int, int, int, str, Any]:
    """Read an engine's tensors: block size, layers, elements of a token's row, name of the type, and format.

    Raises
    ------
    ValueError
        There are no tensors, or they fit no format.
    """
    paged = _find(kv_caches, layout_hints, None)
    g, first = paged.geometry, flatten(list(kv_caches.values()))[0]
    dtype = str(first.dtype).replace("torch.", "")
    return g.block_size, g.layers, paged.hidden, dtype, EngineKVFormat(paged.number)


def planes_of(kv_caches: Mapping[str, Any], layout_hints: Mapping[str, Any] | None = None) -> int:
    """Planes of a chunk of an engine's tensors: 1 where K and V are one row, else 2."""
    return _find(kv_caches, layout_hints, None).geometry.planes


def _shape(paged: Paged, tokens: int) -> tuple[int, ...]:
    g = paged.geometry
    inner = (g.layers, tokens, paged.hidden)
    return inner if g.planes == 1 or is_mla(paged.number) else (g.planes, *inner)


def gather_paged_kv_to_cpu(
    kv_caches: dict[str, Tensor],
    block_ids: list[int],
    blocks_per_chunk: int,
    layout_hints: Mapping[str, Any] | None = None,
    engine_kv_format: Any | None = None,
    out: list[Tensor] | None = None,
    chunk_indices: list[int] | None = None,
) -> list[Tensor]:
    """Gather blocks into one host tensor per chunk of `blocks_per_chunk` blocks.

    Parameters
    ----------
    out
        Where to gather, pinned or not; default: new tensors, pinned where the cache is on a GPU. Those beyond the
        chunks are left alone.
    chunk_indices
        Chunks to gather; default: all whole chunks of `block_ids`.

    Returns
    -------
    list of tensors
        `out` itself where its length is right. On a GPU the copies are enqueued on the current stream, which the
        caller synchronises before reading; those into pageable memory are over when the call returns.
    """
    if blocks_per_chunk <= 0:
        raise ValueError(f"blocks_per_chunk is {blocks_per_chunk}, must be positive")
    paged = _find(kv_caches, layout_hints, engine_kv_format)
    whole = len(block_ids) // blocks_per_chunk
    wanted = list(range(whole)) if chunk_indices is None else list(chunk_indices)
    if out is not None and len(out) < len(wanted):
        raise ValueError(f"out length ({len(out)}) must be at least the number of gathered chunks ({len(wanted)})")
    if any(not 0 <= at < whole for at in wanted):
        raise ValueError(f"chunk_indices {wanted} must be in [0, {whole})")
    tokens = blocks_per_chunk * paged.geometry.block_size
    if out is None:
        chunks = _new(kv_caches, _shape(paged, tokens), len(wanted), paged.device)
    else:
        chunks = out if len(out) == len(wanted) else out[: len(wanted)]
    ids = [block_ids[at * blocks_per_chunk + k] for at in wanted for k in range(blocks_per_chunk)]
    index = ids_of("block_ids", ids, paged.device, keep=chunks)
    blocks_of(paged, True, tokens).move(chunks, index, 0)
    return chunks


def _new(kv_caches: Mapping[str, Any], shape: tuple[int, ...], count: int, device: int | None) -> list[Any]:
    import torch

    dtype = flatten(list(kv_caches.values()))[0].dtype
    return [torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device is not None) for _ in range(count)]


def scatter_cpu_to_paged_kv(
    kv_caches: dict[str, Tensor],
    block_ids: list[int],
    chunks: Sequence[Tensor],
    blocks_per_chunk: int,
    skip_first_n_tokens: int = 0,
    layout_hints: Mapping[str, Any] | None = None,
    engine_kv_format: Any | None = None,
) -> None:
    """Scatter host tensors of `blocks_per_chunk` blocks each back into the paged tensors, on the current stream.

    The first `skip_first_n_tokens` are left out, over all chunks; a part of a block counts as none, and is logged.
    Pageable chunks are copied before the call returns. Block ids beyond the chunks are ignored.
    """
    if not chunks:
        return
    need = len(chunks) * blocks_per_chunk
    if blocks_per_chunk <= 0 or len(block_ids) < need:
        raise ValueError(
            f"block_ids length ({len(block_ids)}) must be at least len(chunks) ({len(chunks)}) * blocks_per_chunk "
            f"({blocks_per_chunk})"
        )
    paged = _find(kv_caches, layout_hints, engine_kv_format)
    block_size = paged.geometry.block_size
    skip, rest = divmod(max(skip_first_n_tokens, 0), block_size)
    if rest:
        _log.error(
            "skip_first_n_tokens (%d) is not block-aligned (block_size=%d); rounding down to %d blocks",
            skip_first_n_tokens,
            block_size,
            skip,
        )
    ids = ids_of("block_ids", list(block_ids[:need]), paged.device, keep=chunks)
    blocks_of(paged, False, blocks_per_chunk * block_size).move(chunks, ids, skip)
