"""The coder's single steps, between buffers of the caller's."""

from __future__ import annotations

from typing import Any

from kvraw.codec import args, cpu, gpu
from kvraw.codec.operands import Job
from kvraw.copying.launch import Launch, LaunchCache, key_of
from kvraw.copying.transfer import Transfer
from kvraw.runtime.stream import capturing, stream_handle

__all__ = ["decode_into", "encode_into", "prepare", "write_cdf"]


_launches = LaunchCache()


def prepare(what: str, flags: int, tensors: tuple[Any, ...]) -> tuple[Launch, Job] | None:
    """The launch of a call on a GPU; None where there is nothing to launch: a call in host memory is done then."""
    job = Job.make(*tensors, out="out" if what == "encode" else "", flags=flags)
    if job.device is None:
        cpu.run_job(what, job)
        return None
    return (gpu.launch_of(what, job), job) if job.streams else None


def _run(what: str, flags: int, tensors: tuple[Any, ...], stream: Any) -> Transfer:
    """`tensors` is symbols, distributions, streams and lengths, or the first two."""
    key = key_of((what, flags), *tensors)
    launch = _launches.get(key)
    if launch is None:
        made = prepare(what, flags, tensors)
        if made is None:
            return Transfer()
        launch, job = made
        if key is None:
            return launch.enqueue(stream_handle(stream, launch.device), (job,))
        _launches.put(key, launch)
    handle = stream_handle(stream, launch.device)
    return launch.run(handle, tensors, capturing(handle, launch.device))


def write_cdf(symbols: Any, out: Any, *, clamp: bool = False, stream: Any = None) -> Transfer:
    """Count symbols, and write each channel's cumulative distribution.

    Entry b is ``(65535 - alphabet) * (symbols below b) // tokens + b``, or b where there are no tokens: every symbol
    keeps a share, and the last entry is 65535 at most.

    Parameters
    ----------
    symbols : tensor of uint8 or int8, [layers, tokens, channels]
        Any non-negative strides.
    out : tensor of int16 or uint16, [layers, channels, alphabet + 1]
        Written; its last axis tells the alphabet.
    clamp : bool
        Count a symbol outside the alphabet as the nearest inside (negative int8 ones as 0) instead of refusing it.
    stream : object
        Stream of the device that holds the tensors; not needed in host memory, where the call returns when it is done.

    Returns
    -------
    Transfer
        On a GPU, its `wait` raises what the kernel found.

    Raises
    ------
    LayoutError, TypeError, PlacementError, BoundsError
        Shapes, element types or places do not fit, or a symbol is outside the alphabet; says which.

    Examples
    --------
    >>> symbols = np.array([0, 2, 2, 1], np.uint8).reshape(1, 4, 1)
    >>> cdf = np.zeros((1, 1, 4), np.uint16)
    >>> kvraw.codec.write_cdf(symbols, cdf).wait()
    >>> cdf.ravel().tolist()
    [0, 16384, 32768, 65535]
    """
    return _run("cdf", args.CLAMP if clamp else 0, (symbols, out), stream)


def encode_into(cdf: Any, symbols: Any, out: Any, lengths: Any, *, stream: Any = None) -> Transfer:
    """Code each channel into its slot of a buffer.

    Parameters
    ----------
    cdf : tensor of int16 or uint16, [layers, channels, alphabet + 1]
        Rising but for the last entry, which stands for 65536 whatever it is.
    symbols : tensor of uint8 or int8, [layers, tokens, channels]
        Any non-negative strides.
    out : tensor of uint8, [layers, channels, bytes]
        Receives the streams; bytes behind a stream's end stay as they are.
    lengths : tensor of int32, [layers, channels]
        Receives the bytes of each stream, also where they do not fit.
    stream : object
        See `write_cdf`.

    Returns
    -------
    Transfer
        To wait for; on a GPU, its `wait` raises what the kernel found.

    Raises
    ------
    BoundsError
        A stream does not fit its slot (says which and how much it needs), or a symbol is outside the alphabet.
    LayoutError, TypeError, PlacementError
        Shapes, element types or places do not fit, or a distribution does not rise.

    Examples
    --------
    >>> symbols = np.random.default_rng(1).integers(0, 4, (1, 256, 8), dtype=np.uint8)
    >>> cdf, out = np.zeros((1, 8, 5), np.uint16), np.zeros((1, 8, 80), np.uint8)
    >>> lengths = np.zeros((1, 8), np.int32)
    >>> kvraw.codec.write_cdf(symbols, cdf).wait()
    >>> kvraw.codec.encode_into(cdf, symbols, out, lengths).wait()
    >>> bool((lengths <= 80).all())
    True
    """
    return _run("encode", 0, (symbols, cdf, out, lengths), stream)


def decode_into(cdf: Any, data: Any, lengths: Any, out: Any, *, packed: bool = False, stream: Any = None) -> Transfer:
    """Decode each channel.

    Parameters
    ----------
    cdf : tensor of int16 or uint16, [layers, channels, alphabet + 1]
        What the streams were coded with.
    data : tensor of uint8
        [layers, channels, bytes]; packed: one axis, the streams back to back.
    lengths : tensor, [layers, channels]
        Bytes of each stream, int32; packed: their inclusive prefix sums, int32 or int64.
    out : tensor of uint8 or int8, [layers, tokens, channels]
        Receives the symbols; any non-negative strides. Damaged streams give wrong symbols, all inside the alphabet.
    packed : bool
        Which form `data` and `lengths` have.
    stream : object
        See `write_cdf`.

    Returns
    -------
    Transfer
        To wait for; on a GPU, its `wait` raises what the kernel found.

    Raises
    ------
    BoundsError
        A length or prefix sum reaches outside `data`; nothing outside is read.
    LayoutError, TypeError, PlacementError
        Shapes, element types or places do not fit, or a distribution does not rise.

    Examples
    --------
    >>> symbols = np.random.default_rng(1).integers(0, 4, (1, 256, 8), dtype=np.uint8)
    >>> encoded = kvraw.codec.encode(symbols)
    >>> out = np.zeros_like(symbols)
    >>> kvraw.codec.decode_into(encoded.cdf, encoded.data, encoded.ends, out, packed=True).wait()
    >>> bool((out == symbols).all())
    True
    """
    return _run("decode", args.PACKED if packed else 0, (out, cdf, data, lengths), stream)
