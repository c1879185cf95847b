"""LMCache's names for CacheGen's entropy coder and for the re-rotation of keys."""

from __future__ import annotations

import functools
from typing import Any

from kvraw.adapters.deferred_errors import pending_of, raise_deferred
from kvraw.adapters.tensors import current_stream
from kvraw.codec import args
from kvraw.codec.coder import prepare
from kvraw.copying.launch import Launch, LaunchCache, key_of
from kvraw.errors import LayoutError
from kvraw.rope.rotate import Call, launch_key

__all__ = [
    "calculate_cdf",
    "decode_fast_new",
    "decode_fast_prefsum",
    "encode_fast_new",
    "rotary_embedding_k_fused",
    "rotary_embedding_k_fused_strided",
]

_launches = LaunchCache()


@functools.cache
def _int16() -> Any:
    import torch

    return torch.int16


def _start(launch: Launch, tensors: tuple[Any, ...]) -> None:
    """Launch on the caller's stream, after raising what earlier calls left behind."""
    device = launch.device
    stream = current_stream(device)
    launch.start(stream, tensors, raise_deferred(device, stream))


def _code(what: str, flags: int, tensors: tuple[Any, ...]) -> None:
    """`tensors` is symbols, distributions, streams and lengths, or the first two."""
    key = key_of((what, flags), *tensors)
    launch = _launches.get(key)
    if launch is None:
        made = prepare(what, flags, tensors)
        if made is None:
            return
        launch = made[0]
        launch.on_error = pending_of(launch.device)
        _launches.put(key, launch)
    _start(launch, tensors)


def calculate_cdf(input_tensor: Any, num_bins: int) -> Any:
    """Cumulative distributions of symbols [layers, tokens, channels], as int16 [layers, channels, num_bins + 1].

    A symbol outside the alphabet counts as the nearest inside.
    """
    layers, _, channels = input_tensor.shape
    out = input_tensor.new_empty((layers, channels, num_bins + 1), dtype=_int16())
    _code("cdf", args.CLAMP, (input_tensor, out))
    return out


def encode_fast_new(cdf: Any, input_sym: Any, output_buffer: Any, output_lengths: Any) -> None:
    """Code symbols into `output_buffer`, and write the bytes of each stream into `output_lengths`."""
    _code("encode", 0, (input_sym, cdf, output_buffer, output_lengths))


def decode_fast_new(cdf: Any, bytestreams: Any, lengths: Any, output: Any) -> None:
    """Decode streams [layers, channels, bytes] into `output`."""
    _code("decode", 0, (output, cdf, bytestreams, lengths))


def decode_fast_prefsum(cdf: Any, bytestreams: Any, lengths_prefsum: Any, output: Any) -> None:
    """Decode streams that lie back to back, told apart by inclusive prefix sums of their lengths, into `output`."""
    _code("decode", args.PACKED, (output, cdf, bytestreams, lengths_prefsum))


def rotary_embedding_k_fused(
    old_positions: Any, new_positions: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool
) -> None:
    """Take the rotation of keys at their old positions back and apply that of the new ones, in place.

    Keys are [tokens, heads * head_size], or [tokens, heads, head_size] with any strides; or [batch, tokens, heads,
    head_size] with a position for each token of each row.
    """
    rotary_embedding_k_fused_strided(old_positions, new_positions, key, head_size, None, cos_sin_cache, is_neox)


def _by_tokens(key: Any, head_stride: int) -> Any:
    """Keys as [tokens, elements] where nothing lies between their heads, else as [tokens, heads, head size]."""
    shape, strides = key.shape, key.stride()
    if len(shape) == 4:
        batch, tokens = shape[:2]
        if batch > 1 and tokens > 1 and strides[0] != tokens * strides[1]:
            raise LayoutError(f"key has shape {tuple(shape)}, strides {strides}: rows of tokens must follow each other")
        key = key.view(batch * tokens, *shape[2:])
        shape, strides = key.shape, key.stride()
    if len(shape) != 3 or strides[2] != 1 or (shape[1] != 1 and strides[1] != shape[2]):
        return key
    width = shape[1] * shape[2]
    return key if head_stride <= 0 or width % head_stride else key.view(shape[0], width)


def rotary_embedding_k_fused_strided(
    old_positions: Any,
    new_positions: Any,
    key: Any,
    head_size: int,
    head_stride: int | None,
    cos_sin_cache: Any,
    is_neox: bool,
) -> None:
    """The same for heads that are `head_stride` elements apart, with what lies between them or without."""
    found = launch_key((is_neox, head_size, head_stride), key, old_positions, new_positions, cos_sin_cache)
    launch = _launches.get(found)
    tensors = (key, old_positions, new_positions, cos_sin_cache)
    if launch is None:
        taken = _by_tokens(key, head_stride or head_size), *tensors[1:]
        call = Call.take(taken, is_neox, head_size, head_stride)
        if call is None:
            return
        if call.on_host:
            stream = current_stream(call.device)
            raise_deferred(call.device, stream)
            call.enqueue(stream, pending_of(call.device))
            return
        launch = call.launch()
        launch.on_error = pending_of(launch.device)
        _launches.put(found, launch)
    _start(launch, tensors)
