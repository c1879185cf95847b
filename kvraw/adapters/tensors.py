"""What the adapters ask of torch and of tensors, by duck typing; torch is never imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from kvraw.arrays import I64, U64
from kvraw.copying.device_state import device_state
from kvraw.errors import LayoutError, PlacementError
from kvraw.plain import unusable
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import locate

__all__ = [
    "Span",
    "current_stream",
    "device_of",
    "dtype_name",
    "flatten",
    "host_array",
    "host_values",
    "index_array",
    "mapped_address",
    "page_gap",
    "reach",
    "row_of",
    "span",
    "table_array",
    "token_stride",
    "torch_cuda",
]

_names: dict[Any, str] = {}
_raw_stream: Callable[[int], int] | None = None


def torch_cuda() -> Any:
    """Torch's CUDA part where it is in use, else None."""
    torch: Any = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def current_stream(device: int) -> int:
    """The caller's current stream on a device: torch's, or the default stream where torch is not in use."""
    global _raw_stream
    if _raw_stream is None:
        cuda = torch_cuda()
        if cuda is None:
            return 0
        # The handle alone, without a stream object around it, where this torch offers that.
        found = getattr(sys.modules["torch"]._C, "_cuda_getCurrentRawStream", None)
        _raw_stream = found or (lambda at: cuda.current_stream(at).cuda_stream)
    return int(_raw_stream(device))


def device_of(*groups: Iterable[Any]) -> int | None:
    """The GPU that some of these tensors lie on; None where all lie on the host.

    Raises
    ------
    PlacementError
        They lie on several.
    """
    found = {int(t.get_device()) for group in groups for t in group if t.is_cuda}
    if len(found) > 1:
        raise PlacementError(f"tensors lie on devices {sorted(found)}, must lie on one and the host")
    return found.pop() if found else None


def flatten(tensors: Any) -> list[Any]:
    """Tensors of nested lists and tuples, in order."""
    return [x for t in tensors for x in flatten(t)] if isinstance(tensors, (list, tuple)) else [tensors]


def dtype_name(tensor: Any) -> str:
    """Name of a tensor's dtype, such as ``int64``."""
    name = _names.get(tensor.dtype)
    if name is None:
        name = _names[tensor.dtype] = str(tensor.dtype).removeprefix("torch.")
    return name


def reach(tensor: Any) -> int:
    """Bytes from a tensor's first element to the end of its memory: of itself, or where it has gaps of its storage."""
    size = int(tensor.element_size())
    if tensor.is_contiguous():
        return int(tensor.numel()) * size
    return int(tensor.untyped_storage().nbytes()) - int(tensor.storage_offset()) * size


@lru_cache(maxsize=1024)
def row_of(name: str, shape: tuple[int, ...], strides: tuple[int, ...], axes: int = 1) -> tuple[int, int]:
    """Elements of a tensor's row, all axes but the first `axes`, and along the first; a row must lie without gaps.

    Raises
    ------
    LayoutError
        It has gaps, or too few axes.
    """
    if len(shape) < axes:
        raise LayoutError(f"{name} has shape {tuple(shape)}, must have at least {axes} axes")
    row = 1
    for n, step in zip(reversed(shape[axes:]), reversed(strides[axes:]), strict=True):
        if n != 1 and step != row:
            raise LayoutError(f"{name} has shape {tuple(shape)}, strides {tuple(strides)}: gaps inside a row")
        row *= n
    return int(row), int(strides[0])


def token_stride(name: str, group: tuple[Any, ...], item: int) -> int:
    """Bytes from token to token of tensors of one layer, by their strides; `item` is the bytes of a token.

    Raises
    ------
    LayoutError
        A tensor with gaps has other rows, or gaps inside them, or the tensors differ.
    """
    found = set()
    for t in group:
        step = item
        if not t.is_contiguous():
            row, stride = row_of(name, t.shape, t.stride())
            size = int(t.element_size())
            step = stride * size
            if row * size != item or step < item:
                raise LayoutError(
                    f"{name} has shape {tuple(t.shape)}, strides {tuple(t.stride())}: a token must be a row of {item} "
                    f"bytes, as item_size says"
                )
        found.add(step)
    if len(found) > 1:
        raise LayoutError(f"k and v of {name} have strides of {sorted(found)} bytes, must have one")
    return found.pop()


def page_gap(name: str, page: int, group: tuple[Any, ...]) -> int:
    """Bytes from page to page of `page` bytes where padding that they do not count lies between them, else 0.

    Raises
    ------
    LayoutError
        A tensor with gaps has other rows, or gaps inside them, or the tensors differ.
    """
    found = set()
    for t in group:
        if t.is_contiguous():
            found.add(0)
            continue
        (row, stride), size = row_of(name, t.shape, t.stride()), int(t.element_size())
        if page not in (row * size, stride * size) or stride < row:
            raise LayoutError(
                f"{name} has shape {tuple(t.shape)}, strides {tuple(t.stride())}: must be rows of {page} bytes, as its "
                f"layout_dim says"
            )
        found.add(stride * size if row * size == page else 0)
    if len(found) > 1:
        raise LayoutError(f"k and v of {name} have strides of {sorted(found)} bytes (0: no gaps), must have one")
    return found.pop()


def mapped_address(name: str, address: int) -> int:
    """Address at which the GPU sees host memory; the device's context is current.

    Raises
    ------
    PlacementError
        It is pageable host memory.
    """
    where = locate(address, 1)
    if not where.device_address:
        raise PlacementError(
            f"{name} at {address:#x} is pageable host memory; the kernel takes pinned, host-registered or device memory"
        )
    return where.device_address


Span = tuple[int, int]
"""Address and bytes of a range of host memory."""


def span(tensor: Any) -> Span:
    """The range that a tensor's elements lie in."""
    reached = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.data_ptr()), (int(reached) + 1) * int(tensor.element_size()) if tensor.numel() else 0


def host_values(tensor: Any, name: str = "indices") -> I64:
    """A tensor's int64 values on the host; waits for the current stream where they lie on a GPU."""
    if not tensor.is_cuda:
        return index_array(tensor, name)
    count, device = int(tensor.numel()), int(tensor.get_device())
    if not count:
        return np.zeros(0, np.int64)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    stream = current_stream(device)
    with DeviceScope(device):
        state = device_state(device)
        upload = state.take_upload(count)
        upload.fetch(int(tensor.data_ptr()), count * 8, stream)
        driver().stream_synchronize(stream)
        values: I64 = upload.words[:count].copy().view(np.int64)
        state.give_upload(upload)
    return values


def index_array(tensor: Any, name: str = "indices") -> I64:
    """Indices on the host as they are: int64, or other integers widened."""
    try:
        array: np.ndarray[Any, Any] = tensor.numpy()
    except (AttributeError, TypeError, RuntimeError):
        array = host_array(tensor, name)
    if array.ndim == 1 and array.dtype == np.int64 and array.flags.c_contiguous:
        return array
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} holds {array.dtype}, must hold integers")
    return np.ascontiguousarray(array.ravel(), np.int64)


def table_array(tensor: Any, name: str = "table") -> U64:
    """A pointer table that lies on the host."""
    return np.ascontiguousarray(host_array(tensor, name).ravel()).view(np.uint64)


def host_array(tensor: Any, name: str) -> np.ndarray[Any, Any]:
    """A host tensor's values as an array."""
    try:
        # What torch offers itself takes half as long as numpy's way to it.
        return tensor.numpy() if hasattr(tensor, "numpy") else np.asarray(tensor)
    except (TypeError, RuntimeError) as error:  # without memory, or of a type that numpy does not have
        raise unusable(name, tensor, error) from None
