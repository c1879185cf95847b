"""LMCache's names for CacheGen's entropy coder and for the re-rotation of keys."""

from __future__ import annotations

from typing import Any

from kvraw.adapters.lmcache._place import current_stream, raise_seen, tensor_device, watch
from kvraw.codec import decode_into, encode_into, write_cdf
from kvraw.engines.grid import Operation
from kvraw.rope import rerotate_keys

__all__ = [
    "calculate_cdf",
    "decode_fast_new",
    "decode_fast_prefsum",
    "encode_fast_new",
    "rotary_embedding_k_fused",
    "rotary_embedding_k_fused_strided",
]


def _stream(tensor: Any) -> tuple[int | None, int | None]:
    """The device of a call and the caller's stream there, after raising what earlier calls left behind."""
    device = tensor_device(tensor)
    if device is None:
        return None, None
    stream = current_stream(device)
    raise_seen(device, stream)
    return device, stream


def _noted(device: int | None, operation: Operation) -> None:
    if device is not None:
        watch(device, operation)


def calculate_cdf(input_tensor: Any, num_bins: int) -> Any:
    """Cumulative distributions of symbols [layers, tokens, channels], as int16 [layers, channels, num_bins + 1].

    A symbol outside the alphabet counts as the nearest inside.
    """
    import torch

    layers, _, channels = input_tensor.shape
    out = input_tensor.new_empty((layers, channels, num_bins + 1), dtype=torch.int16)
    device, stream = _stream(input_tensor)
    _noted(device, write_cdf(input_tensor, out, clamp=True, stream=stream))
    return out


def encode_fast_new(cdf: Any, input_sym: Any, output_buffer: Any, output_lengths: Any) -> None:
    """Code symbols into `output_buffer`, and write the bytes of each stream into `output_lengths`."""
    device, stream = _stream(input_sym)
    _noted(device, encode_into(cdf, input_sym, output_buffer, output_lengths, stream=stream))


def decode_fast_new(cdf: Any, bytestreams: Any, lengths: Any, output: Any) -> None:
    """Decode streams [layers, channels, bytes] into `output`."""
    device, stream = _stream(output)
    _noted(device, decode_into(cdf, bytestreams, lengths, output, stream=stream))


def decode_fast_prefsum(cdf: Any, bytestreams: Any, lengths_prefsum: Any, output: Any) -> None:
    """Decode streams that lie back to back, told apart by inclusive prefix sums of their lengths, into `output`."""
    device, stream = _stream(output)
    _noted(device, decode_into(cdf, bytestreams, lengths_prefsum, output, packed=True, stream=stream))


def rotary_embedding_k_fused(
    old_positions: Any, new_positions: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool
) -> None:
    """Take the rotation of keys at their old positions back and apply that of the new ones, in place."""
    rotary_embedding_k_fused_strided(old_positions, new_positions, key, head_size, head_size, cos_sin_cache, is_neox)


def rotary_embedding_k_fused_strided(
    old_positions: Any,
    new_positions: Any,
    key: Any,
    head_size: int,
    head_stride: int,
    cos_sin_cache: Any,
    is_neox: bool,
) -> None:
    """The same for heads that are `head_stride` elements apart."""
    device, stream = _stream(key)
    flat = key if key.dim() == 2 else key.view(key.shape[0], -1)
    done = rerotate_keys(
        flat,
        old_positions,
        new_positions,
        cos_sin_cache,
        neox=is_neox,
        head_size=head_size,
        head_stride=head_stride,
        stream=stream,
    )
    _noted(device, done)
