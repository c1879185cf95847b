"""Block ids and slots as callers hand them over: on the device as they lie, or on the host."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import numpy as np

from kvraw.adapters.lmcache._paged import is_tensor
from kvraw.arrays import ASK_DRIVER, I64, IndexVector, index_vector
from kvraw.errors import BoundsError

__all__ = ["host_ids", "ids_of", "ids_on"]

_widths: dict[Any, int] = {}  # bytes of an id that kernels read, by dtype; 0: they do not read it


def _width(dtype: Any) -> int:
    found = _widths[dtype] = {"torch.int64": 8, "torch.int32": 4}.get(str(dtype), 0)
    return found


def ids_on(ids: Any, device: int) -> tuple[int, int, int] | None:
    """Address, bytes and number of ids that a kernel of the device can read as they lie; None for others."""
    try:
        where = ids.device
        width = _widths.get(ids.dtype)
        if width is None:
            width = _width(ids.dtype)
        (count,) = ids.shape
        if not width or where.index != device or where.type == "cpu" or not ids.is_contiguous():
            return None
        return ids.data_ptr(), width, count
    except (AttributeError, TypeError, ValueError):
        return None


def ids_of(name: str, ids: Any, device: int | None, most: int | None = None, keep: object = None) -> IndexVector:
    """Ids as an index of at most `most` values, on the device or the host, that keeps `keep` alive as well."""
    if device is not None and hasattr(ids, "data_ptr") and ids.device.type != "cpu":
        width = _widths.get(ids.dtype) or _width(ids.dtype)
        if not width:
            if "int" not in str(ids.dtype):
                raise TypeError(f"{name} holds {ids.dtype}, must hold integers")
            ids, width = ids.long(), 8
        shape = ids.shape
        if len(shape) != 1:
            raise BoundsError(f"{name} has {len(shape)} axes, must have 1")
        if not ids.is_contiguous():
            ids = ids.contiguous()
        count, where = shape[0], ids.device.index
        if most is not None and count > most:
            count = most
        return IndexVector(None, ids.data_ptr(), count, width, ASK_DRIVER if where is None else where, (ids, keep))
    if type(ids) is list and ids:
        try:
            found = np.frombuffer(array("q", ids), np.int64)[:most]  # of the ways to take integers in, the fastest
            return IndexVector(found, 0, len(found), 8, None, keep)
        except (TypeError, OverflowError):  # said better below
            pass
    if is_tensor(ids):
        try:
            values = (ids if ids.device.type == "cpu" else ids.cpu()).numpy()
        except (TypeError, RuntimeError, NotImplementedError):  # said better below
            values = index_vector(name, ids).host
        if values.dtype == np.int64 and values.ndim == 1 and values.flags.c_contiguous:
            values = values[:most]
            return IndexVector(values, 0, len(values), 8, None, keep)
        ids = values
    index = index_vector(name, ids)
    if index.host is None:  # a device vector of another library
        return index._replace(count=index.count if most is None else min(index.count, most), owner=(ids, keep))
    host = index.host[:most]
    return IndexVector(host, 0, len(host), 8, None, keep)


def host_ids(address: int, count: int) -> I64:
    """A vector of int64 ids in host memory."""
    if not count:
        return np.zeros(0, np.int64)
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address)).view(np.int64)
