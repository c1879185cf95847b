"""Re-rotation of keys: operands, checks and the two ways to carry it out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kvraw.arrays import (
    ASK_DRIVER,
    I64,
    IndexVector,
    TensorView,
    dtype_name,
    element_type,
    host_bytes,
    index_vector,
    require_apart,
    require_writable,
    tensor_view,
)
from kvraw.copying.cpu import in_parts
from kvraw.copying.device_state import DeviceState, Upload, device_state
from kvraw.copying.kernel_args import divider
from kvraw.copying.launch import Launch, LaunchCache, key_of
from kvraw.copying.operands import require_index
from kvraw.copying.transfer import Transfer
from kvraw.errors import BoundsError, KvrawError, LayoutError, PlacementError
from kvraw.ptx.loader import read_ptx
from kvraw.rope import args
from kvraw.runtime import fork
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import locate
from kvraw.runtime.module import ArgumentBlock, Kernel
from kvraw.runtime.stream import capturing, stream_handle

__all__ = ["Call", "launch_key", "rerotate_keys"]

THREADS = 256
_SPLIT_ELEMENTS = 1 << 16
# Element types by name: the kernels' name, bytes, and the array type that the numba kernel knows it by.
_DTYPES: dict[str, tuple[str, int, Any]] = {
    "float32": ("fp32", 4, np.float32),
    "float16": ("fp16", 2, np.uint16),
    "bfloat16": ("bf16", 2, np.int16),
}
_SIZES = {name: size for name, (_, size, _) in _DTYPES.items()}
_NAMES = ("old_positions", "new_positions")
Positions = IndexVector | range
_TENSORS = ("key", *_NAMES, "cache")  # fields of the block that take the addresses of a call's tensors
_launches = LaunchCache()


@dataclass(frozen=True, slots=True)
class _Rotation:
    """A call taken in: keys as [layers, tokens, heads] of `head_size` elements that are dense in a head."""

    key: TensorView
    cache: TensorView
    layers: int
    tokens: int
    heads: int
    half: int  # elements
    layer_stride: int  # bytes, as the next
    token_stride: int
    head_stride: int
    cache_row: int
    dtype: str
    neox: bool
    device: int | None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.key.itemsize

    @property
    def limit(self) -> int:
        """Positions that the cache has."""
        return self.cache.shape[0]

    @property
    def something(self) -> bool:
        """True where there is anything to rotate."""
        return bool(self.layers and self.tokens and self.heads and self.half)


def _place(view: TensorView) -> int | None:
    return locate(view.address, max(view.nbytes, 1)).device if view.device == ASK_DRIVER else view.device


def _take(
    key: Any, cache: Any, neox: bool, head_size: int | None, head_stride: int | None, dtype: str | None
) -> _Rotation:
    k, c = tensor_view(key, "key"), tensor_view(cache, "cos_sin_cache")
    kind = element_type("key", key, require_apart("key", require_writable("key", k)), dtype, _SIZES)
    if element_type("cos_sin_cache", cache, c, dtype, _SIZES) != kind:
        raise TypeError(f"cos_sin_cache holds {dtype_name(cache)}, must hold {kind} as key does")
    if len(c.shape) != 2 or c.shape[1] % 2 or (c.shape[1] > 1 and c.strides[1] != c.itemsize) or c.strides[0] < 0:
        raise LayoutError(f"cos_sin_cache has shape {c.shape}, must be [positions, rotary dimension] with dense rows")
    size = k.itemsize
    layers, layer_stride = 1, 0
    if len(k.shape) in (3, 4):
        tokens, heads, width = k.shape[-3:]
        token_stride, at_head, step = k.strides[-3:]
        if len(k.shape) == 4:
            layers, layer_stride = k.shape[0], k.strides[0]
        if head_size not in (None, width) or (heads > 1 and head_stride not in (None, at_head // size)):
            raise LayoutError(
                f"key has heads of {width} elements, {at_head // size} apart; head_size is {head_size} and head_stride "
                f"{head_stride}"
            )
    elif len(k.shape) == 2:
        if head_size is None or head_size <= 0:
            raise LayoutError("key has 2 axes; pass head_size")
        tokens, width = k.shape
        token_stride, step = k.strides
        at_head = (head_stride or head_size) * size
        heads, rest = divmod(width, at_head // size)
        if rest or head_size * size > at_head:
            raise LayoutError(
                f"key has {width} elements per token, must be a multiple of head_stride {at_head // size}, which must "
                f"be at least head_size {head_size}"
            )
        width = head_size
    else:
        raise LayoutError(
            f"key has {len(k.shape)} axes, must be [tokens, heads, head size], with layers in front or without, or "
            f"[tokens, heads * stride]"
        )
    if step != size and width > 1:
        raise LayoutError(f"key has strides {k.strides} bytes, the elements of a head must be dense")
    steps = (layer_stride, token_stride, at_head)
    if min(steps) < 0 or any(one % size for one in steps):
        raise LayoutError(f"key has strides {k.strides} bytes, must be non-negative multiples of {size}")
    if c.shape[1] > width:
        raise LayoutError(f"cos_sin_cache has {c.shape[1]} rotary dimensions, key has heads of {width} elements")
    places = {"key": _place(k), "cos_sin_cache": _place(c)}
    if len(set(places.values())) > 1:
        raise PlacementError(f"key and cos_sin_cache lie apart: device {places['key']}, {places['cos_sin_cache']}")
    half = c.shape[1] // 2
    return _Rotation(k, c, layers, tokens, heads, half, *steps, c.strides[0], kind, neox, places["key"])


def _positions(name: str, values: Any, r: _Rotation, check: bool) -> Positions:
    in_order = isinstance(values, range) and values.step == 1
    found = (
        values if in_order and r.device is not None else index_vector(name, np.asarray(values) if in_order else values)
    )
    count = len(found) if isinstance(found, range) else found.count
    if count != r.tokens:
        raise BoundsError(f"{name} has {count} positions, key has {r.tokens} tokens")
    if isinstance(found, range):
        for at, position in ((0, found.start), (count - 1, found.stop - 1)):
            if count and not 0 <= position < r.limit:
                raise BoundsError(f"{name}[{at}] is {position}, must be in [0, {r.limit})")
        return found
    if found.host is not None and check and found.count:
        bad = (found.host < 0) | (found.host >= r.limit)
        if bad.any():
            at = int(np.argmax(bad))
            raise BoundsError(f"{name}[{at}] is {found.host[at]}, must be in [0, {r.limit})")
    return found


def rerotate_keys(
    key: Any,
    old_positions: Any,
    new_positions: Any,
    cos_sin_cache: Any,
    *,
    neox: bool = True,
    head_size: int | None = None,
    head_stride: int | None = None,
    dtype: str | None = None,
    check: bool = True,
    stream: Any = None,
) -> Transfer:
    """Take the rotation of keys at their old positions back and apply that of new ones, in place.

    Every product and sum is rounded to the keys' type, as a chain of tensor operations would.

    Parameters
    ----------
    key : tensor of float32, float16 or bfloat16
        [tokens, heads, head size], heads apart by any stride; or [layers, tokens, heads, head size], whose layers share
        the positions; or [tokens, heads * head_stride].
    old_positions, new_positions : vector of int64 or int32, or range
        One per token, on the host or on the keys' device. A range of step 1 is not sent to a device.
    cos_sin_cache : tensor of the keys' type, [positions, rotary dimension]
        Rows of cosines, then sines. The rotary dimension may be less than the head size: the rest stays as it is.
    neox : bool
        Pairs are an element and the one half a rotary dimension on; else they are neighbours.
    head_size, head_stride : int, optional
        Elements of a head, and from one head to the next; needed where `key` has two axes (the stride is the size if
        not given).
    dtype : str, optional
        Element type of key and cache, where their protocols do not tell.
    check : bool
        Check positions, on the host where they are there, else in the kernel, which leaves such tokens alone.
    stream : object
        On a GPU, the stream to enqueue it on.

    Returns
    -------
    Transfer
        To wait for; on a GPU, its `wait` raises what the kernel found.

    Raises
    ------
    BoundsError
        A position is outside the cache; from `Transfer.wait` where positions lie on a device.
    LayoutError, TypeError, PlacementError
        Shapes, element types or places do not fit.

    Examples
    --------
    >>> angle = np.arange(64)[:, None] / 10000 ** (np.arange(8) / 8)
    >>> cos_sin = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    >>> keys = np.ones((4, 2, 16), np.float32)
    >>> kvraw.rope.rerotate_keys(keys, np.arange(4), np.arange(4) + 32, cos_sin).wait()
    >>> kvraw.rope.rerotate_keys(keys, range(32, 36), range(4), cos_sin).wait()
    >>> bool(np.abs(keys - 1).max() < 1e-5)
    True
    """
    options = (neox, head_size, head_stride, dtype, check)
    tensors = (key, old_positions, new_positions, cos_sin_cache)
    found = launch_key(options, *tensors)
    launch = _launches.get(found)
    if launch is None:
        call = Call.take(tensors, neox, head_size, head_stride, dtype, check)
        if call is None:
            return Transfer()
        handle = stream_handle(stream, call.device)
        if found is None or call.on_host:
            return call.enqueue(handle)
        launch = call.launch()
        _launches.put(found, launch)
    handle = stream_handle(stream, launch.device)
    return launch.run(handle, tensors, capturing(handle, launch.device))


def launch_key(options: object, key: Any, old: Any, new: Any, cache: Any) -> tuple[Any, ...] | None:
    """The key of a launch for torch tensors; None for other tensors."""
    try:
        # The width of the kernel's accesses hangs on the alignment.
        return key_of((options, (key.data_ptr() | cache.data_ptr()) & 15), key, old, new, cache)
    except AttributeError:
        return None


@dataclass(frozen=True, slots=True)
class Call:
    """A call on a GPU with something to do, taken in and checked."""

    _rotation: _Rotation
    _positions: tuple[Positions, Positions]
    _check: bool

    @classmethod
    def take(
        cls,
        tensors: tuple[Any, Any, Any, Any],
        neox: bool,
        head_size: int | None,
        head_stride: int | None,
        dtype: str | None = None,
        check: bool = True,
    ) -> Call | None:
        """Take in keys, old and new positions and the cache; None where nothing is left to do.

        A call in host memory is carried out.
        """
        key, old_positions, new_positions, cache = tensors
        r = _take(key, cache, neox, head_size, head_stride, dtype)
        old, new = (_positions(n, v, r, check) for n, v in zip(_NAMES, (old_positions, new_positions), strict=True))
        if r.device is None:
            _on_host(r, old, new)
            return None
        if not r.something:
            return None
        for name, index in zip(_NAMES, (old, new), strict=True):
            if not isinstance(index, range):
                require_index(name, index, r.device)
        return cls(r, (old, new), check)

    @property
    def device(self) -> int:
        """The device that holds the keys."""
        assert self._rotation.device is not None
        return self._rotation.device

    @property
    def on_host(self) -> bool:
        """True where positions lie on the host, from where they must be sent."""
        return bool(_listed(self._positions))

    def launch(self, upload: Upload | None = None) -> Launch:
        """The launch for it, which holds no tensor; positions on the host are in `upload`."""
        return _launch(self._rotation, self._positions, self._check, upload)

    def enqueue(self, stream: int, on_error: Callable[[Exception], None] | None = None) -> Transfer:
        """Enqueue it once, with its positions where they are on the host."""
        with DeviceScope(self.device):
            upload = _send(device_state(self.device), self._positions, stream)
            launch = self.launch(upload)
            launch.on_error = on_error
            return launch.enqueue(stream, (self._rotation, *self._positions), upload)


@functools.cache
def _kernels() -> ModuleType:
    try:
        with fork.undivided():
            from kvraw.rope import cpu_kernels
    except ImportError as error:
        raise ImportError(f"key re-rotation on the CPU needs numba, which cannot be imported: {error}") from error
    return cpu_kernels


def _on_host(r: _Rotation, *positions: Positions) -> None:
    lists = _listed(positions)
    if len(lists) < 2:
        raise PlacementError("key is in host memory, positions lie on a device")
    if not r.something:
        return
    size, array_type = r.itemsize, _DTYPES[r.dtype][2]
    strides = (r.layer_stride // size, r.token_stride // size, r.head_stride // size, r.cache_row // size)
    counts = np.array([r.heads, r.half, *strides, not r.neox], np.int64)
    kernel = _kernels().rerotate
    keys, cache = host_bytes(r.key).view(array_type), host_bytes(r.cache).view(array_type)
    work = lambda begin, end: kernel(keys, cache, *lists, counts, begin, end)  # noqa: E731
    rows = r.layers * r.tokens
    in_parts(work, rows, rows * r.heads * r.half // _SPLIT_ELEMENTS)


@functools.cache
def _kernel(name: str) -> Kernel:
    return Kernel(read_ptx(f"{name}.ptx"), f"kvraw_{name}")


def _vector(r: _Rotation) -> int:
    """Bytes of a kernel's accesses: 16 where all alignments allow it, else one element."""
    bits = r.key.address | r.cache.address | r.layer_stride | r.token_stride | r.head_stride | r.cache_row
    bits |= r.half * r.itemsize
    assert r.device is not None
    # The vector kernel for bf16 needs arithmetic in that type.
    able = r.dtype != "bfloat16" or driver().device_attribute(r.device, "COMPUTE_CAPABILITY_MAJOR") >= 8
    return 16 if bits % 16 == 0 and able else r.itemsize


def _listed(positions: tuple[Positions, ...]) -> list[I64]:
    """Vectors of positions that are on the host."""
    return [p.host for p in positions if not isinstance(p, range) and p.host is not None]


def _launch(r: _Rotation, positions: tuple[Positions, Positions], check: bool, upload: Upload | None) -> Launch:
    """The launch for a call; it holds no tensor."""
    assert r.device is not None
    vector, limit = _vector(r), r.limit
    vectors, groups = r.half * r.itemsize // vector, -(-r.heads // args.HEADS)
    block = ArgumentBlock(args.ROPE)
    a = block.record[0]
    a["key"], a["cache"] = r.key.address, r.cache.address
    a["units"] = units = r.layers * r.tokens * groups * vectors
    a["key_layer"], a["key_token"], a["key_head"] = r.layer_stride, r.token_stride, r.head_stride
    a["cache_row"], a["limit"] = r.cache_row, limit
    a["heads"], a["half"] = r.heads, r.half * r.itemsize
    for name, count in (("tokens", r.tokens), ("groups", groups), ("vectors", vectors)):
        a[name] = count
        a[f"{name}_magic"], a[f"{name}_shift"] = divider(count)
    flags = 0 if r.neox else args.INTERLEAVED
    if check and any(not isinstance(p, range) and p.host is None for p in positions):
        flags |= args.CHECK
    at = upload.device.address if upload is not None else 0
    kinds = ((args.OLD_I32, args.OLD_RANGE), (args.NEW_I32, args.NEW_RANGE))
    for name, index, (narrow, in_order) in zip(_NAMES, positions, kinds, strict=True):
        if isinstance(index, range):
            a[name], flags = index.start, flags | in_order
            continue
        a[name] = index.address if index.host is None else at
        at += 8 * r.tokens if index.host is not None else 0
        flags |= narrow if index.width == 4 else 0
    a["flags"] = flags

    def explain(which: int, token: int, value: int) -> KvrawError:
        signed = value - (1 << 64) if value >> 63 else value
        return BoundsError(
            f"{_NAMES[which]}[{token}] is {signed}, must be in [0, {limit}); the kernel left out every such token"
        )

    neighbours = vector == 16 and not r.neox  # the kernels of single elements do both, by a flag
    kernel = _kernel(f"rope_{_DTYPES[r.dtype][0]}_v{vector}{'_neighbours' * neighbours}")
    return Launch(r.device, kernel, block, -(-units // THREADS), THREADS, explain, _TENSORS)


def _send(state: DeviceState, positions: tuple[Positions, Positions], stream: int) -> Upload | None:
    """Positions that are on the host, one behind the other, on their way to the device."""
    host = _listed(positions)
    if not host:
        return None
    upload = state.take_upload(sum(len(h) for h in host))
    at = 0
    for values in host:
        upload.words[at : at + len(values)] = values.view(np.uint64)
        at += len(values)
    upload.send(at, stream)
    return upload
