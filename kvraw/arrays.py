"""Takes in tensors, pointers and indices of any library by protocol: no torch, no driver."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.plain import PLACES, fault, masked, odd, unusable

__all__ = [
    "ASK_DRIVER",
    "IndexVector",
    "TensorView",
    "dtype_name",
    "element_type",
    "host_bytes",
    "index_vector",
    "is_pointer",
    "pointer_vector",
    "require_apart",
    "require_writable",
    "tensor_view",
]

ASK_DRIVER = -1  # a device tensor whose protocol does not tell the device

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TensorView:
    """The memory of a tensor.

    Attributes
    ----------
    address : int
        Of element (0, 0, ...).
    shape, strides : tuple of int
        Elements and bytes per axis.
    itemsize : int
        Bytes per element.
    device : int or None
        None for host memory, `ASK_DRIVER` where the protocol does not tell.
    owner : object
        What to keep alive.
    readonly : bool
        It says that it must not be written.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    device: int | None
    owner: object
    readonly: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, gaps left out."""
        return math.prod(self.shape) * self.itemsize

    @property
    def contiguous(self) -> bool:
        """True where the elements lie in order and without gaps."""
        return self.strides == _tight(self.shape, self.itemsize) or self.nbytes == 0


def _tight(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    out: list[int] = []
    for size in reversed(shape):
        out.append(itemsize)
        itemsize *= size
    return tuple(reversed(out))


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DL_CUDA, _DL_MANAGED = (2, 13)  # kDLCUDA, kDLCUDAManaged; 1 and 3 are host memory
_DL_HOST = (1, 3)


def _from_dlpack(name: str, tensor: Any) -> TensorView:
    kind, device = tensor.__dlpack_device__()
    # -1: the producer must not wait for any stream; ordering is the caller's stream's business.
    capsule = tensor.__dlpack__(stream=-1) if kind in (_DL_CUDA, _DL_MANAGED) else tensor.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    t = _DLTensor.from_address(get(capsule, b"dltensor"))
    shape = tuple(t.shape[k] for k in range(t.ndim))
    if t.bits * t.lanes % 8:
        raise TypeError(f"{name} has elements of {t.bits * t.lanes} bits, must have whole bytes")
    itemsize = t.bits * t.lanes // 8
    strides = tuple(t.strides[k] * itemsize for k in range(t.ndim)) if t.strides else _tight(shape, itemsize)
    if kind not in (_DL_CUDA, _DL_MANAGED, *_DL_HOST):
        raise TypeError(f"{name} lies on DLPack device type {kind}, must be CPU or CUDA")
    where = None if kind in _DL_HOST else int(device)
    # The capsule, never consumed, keeps the memory and frees the export when it goes.
    return TensorView((t.data or 0) + t.byte_offset, shape, strides, itemsize, where, (tensor, capsule))


def _no_objects(name: str, dtype: np.dtype[Any]) -> int:
    if dtype.hasobject:
        raise TypeError(f"{name} holds Python objects ({dtype}), must hold plain values")
    return dtype.itemsize


def _from_torch(name: str, tensor: Any) -> TensorView:
    try:
        size, kind = int(tensor.element_size()), tensor.device.type
        strides, shape = tuple(int(s) * size for s in tensor.stride()), tuple(map(int, tensor.shape))
        address = int(tensor.data_ptr())
    except (RuntimeError, NotImplementedError) as error:  # sparse, nested, and others without a memory
        raise unusable(name, tensor, error) from None
    if kind not in PLACES or (not address and 0 not in shape) or odd(tensor):
        raise unusable(name, tensor)
    device = None if kind == "cpu" else ASK_DRIVER if tensor.device.index is None else int(tensor.device.index)
    return TensorView(address, shape, strides, size, device, tensor)


def tensor_view(tensor: Any, name: str = "tensor") -> TensorView:
    """Describe a tensor of any library.

    Parameters
    ----------
    tensor : object
        Has ``data_ptr()`` (torch), ``__cuda_array_interface__``, ``__array_interface__`` (numpy), ``__dlpack__`` or the
        buffer protocol. It is borrowed.
    name : str
        What errors call it.

    Raises
    ------
    TypeError
        It has none of them, holds Python objects, lies on a device that is neither the host nor a CUDA device, or its
        memory is not what its shape and type say: sparse, nested, quantized, conjugate, masked.
    """
    if isinstance(tensor, TensorView):
        return tensor
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "element_size"):
        return _from_torch(name, tensor)
    for protocol, where in (("__cuda_array_interface__", ASK_DRIVER), ("__array_interface__", None)):
        interface = getattr(tensor, protocol, None)
        if interface is not None:
            if masked(tensor) or interface.get("mask") is not None:
                raise TypeError(f"{name} is a masked array, must be a plain one")
            dtype = tensor.dtype if isinstance(tensor, np.ndarray) else np.dtype(interface["typestr"])
            shape, size = tuple(interface["shape"]), _no_objects(name, dtype)
            strides = tuple(interface.get("strides") or _tight(shape, size))
            address, readonly = interface["data"]
            return TensorView(int(address), shape, strides, size, where, tensor, bool(readonly))
    if hasattr(tensor, "__dlpack__"):
        return _from_dlpack(name, tensor)
    try:
        array = np.asarray(memoryview(tensor))
    except TypeError:
        raise TypeError(
            f"{name} is a {type(tensor).__name__}; must have data_ptr(), __cuda_array_interface__, __dlpack__ or the "
            f"buffer protocol"
        ) from None
    size = _no_objects(name, array.dtype)
    readonly = not array.flags.writeable
    return TensorView(int(array.ctypes.data), array.shape, array.strides, size, None, array, readonly)


def require_writable(name: str, view: TensorView) -> TensorView:
    """The tensor; `PlacementError` where it is read-only memory."""
    if view.readonly:
        raise PlacementError(f"{name} is read-only memory, must be writable")
    return view


def require_apart(name: str, view: TensorView) -> TensorView:
    """Refuse a tensor that is to be written and repeats itself, as an expanded one does.

    Raises
    ------
    LayoutError
        An axis of more than one element has stride 0.
    """
    still = (size > 1 and stride == 0 for size, stride in zip(view.shape, view.strides, strict=True))
    if view.nbytes and any(still):
        raise LayoutError(
            f"{name} has strides {view.strides} bytes for shape {view.shape}, and is written: none may be 0"
        )
    return view


def dtype_name(tensor: Any) -> str:
    """Name of a tensor's element type, such as "int8" or "bfloat16"; "" where its protocol does not tell."""
    if isinstance(tensor, TensorView):
        return ""
    return str(getattr(tensor, "dtype", "")).removeprefix("torch.")


def element_type(name: str, tensor: Any, view: TensorView, given: object, sizes: Mapping[str, int]) -> str:
    """The element type of a tensor, one of those whose bytes `sizes` tells; `given` counts where it is not None.

    Raises
    ------
    TypeError
        It is another, or not to be told.
    """
    found = str(given or dtype_name(tensor)).removeprefix("torch.")
    if given is not None and found not in sizes:
        raise TypeError(f"dtype is {given!r}, must be one of {', '.join(sizes)}")
    if sizes.get(found) != view.itemsize:
        raise TypeError(
            f"{name} holds {found or 'elements of a type that its protocol does not tell'} of {view.itemsize} bytes; "
            f"pass dtype=, one of {', '.join(sizes)}"
        )
    return found


def host_bytes(view: TensorView) -> npt.NDArray[np.uint8]:
    """Every byte from the first to the last element of a tensor in host memory, gaps included, to read and write."""
    if 0 in view.shape:
        return np.zeros(0, np.uint8)
    size = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) + view.itemsize
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(view.address))


def is_pointer(value: object) -> bool:
    """True where a value is a plain address."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


_NO_ROWS = (str, bytes, Mapping, Set)


def _host_array(name: str, values: Any) -> np.ndarray[Any, Any]:
    """Values on the host as an array of whatever type; the errors on the way name the argument."""
    if type(values) is np.ndarray:
        return values
    if isinstance(values, _NO_ROWS):
        raise TypeError(f"{name} is a {type(values).__name__}, must be a sequence of integers")
    if masked(values):
        raise TypeError(f"{name} is a masked array, must be a plain one")
    if hasattr(values, "data_ptr") and hasattr(values, "device"):
        kind, why = dtype_name(values), fault(values) if hasattr(values, "layout") else ""
        if why:
            raise TypeError(f"{name} {why}")
        if "int" not in kind and values.numel():
            raise TypeError(f"{name} holds {kind}, must hold integers")
    try:
        return np.asarray(values)
    except ValueError:  # rows of several lengths
        raise BoundsError(f"{name} holds rows of different lengths, must have 1 axis") from None
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name} is a {type(values).__name__}, must be a sequence of integers: {error}") from None


def _no_integers(name: str, array: np.ndarray[Any, Any], given: Any) -> TypeError:
    if array.dtype == object and not isinstance(given, np.ndarray):
        odd_one = next((v for v in array.flat if not is_pointer(v)), given)
        return TypeError(f"{name} holds a {type(odd_one).__name__}, must hold integers")
    must = "have an integer dtype" if array.dtype == object else "hold integers"
    return TypeError(f"{name} holds {array.dtype}, must {must}")


def pointer_vector(name: str, values: Any) -> U64:
    """Addresses or sizes as a 1-D C-contiguous uint64 vector.

    Raises
    ------
    TypeError, BoundsError
        They are not integers, not 1-D, or outside [0, 2**64).
    """
    if isinstance(values, np.ndarray) and values.dtype == np.uint64 and values.ndim == 1:
        return np.ascontiguousarray(values)
    array = _host_array(name, values)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.uint64)
    if array.dtype.kind == "f" and not hasattr(values, "dtype"):
        array = np.asarray(values, object)  # numpy makes floats of integers on both sides of 2**63
        if not all(map(is_pointer, array.flat)):
            array = np.asarray(values)
    if array.dtype == object and all(is_pointer(v) for v in array.flat):
        for at, value in enumerate(array.flat):
            if not 0 <= value < 2**64:
                raise BoundsError(f"{name}[{at}] is {value}, must be in [0, 2**64)")
    elif array.dtype.kind not in "iu":
        raise _no_integers(name, array, values)
    elif array.dtype.kind == "i" and (array < 0).any():
        at = int(np.argmax(array.ravel() < 0))
        raise BoundsError(f"{name}[{at}] is {array.ravel()[at]}, must be in [0, 2**64)")
    if array.ndim != 1:
        raise BoundsError(f"{name} has {array.ndim} axes, must have 1")
    return np.ascontiguousarray(array.astype(np.uint64))


_INT64 = np.dtype(np.int64)


class IndexVector(NamedTuple):
    """Block ids or slots.

    Attributes
    ----------
    host : numpy.ndarray or None
        The values as int64 where they are on the host.
    address : int
        Where they are on a device; 0 otherwise.
    count, width : int
        Values, and bytes per value (8, or 4 for int32 values on a device).
    device : int or None
        The device, `ASK_DRIVER`, or None.
    owner : object
        What to keep alive.
    """

    host: I64 | None
    address: int
    count: int  # type: ignore[assignment]  # not a tuple's search, here
    width: int = 8
    device: int | None = None
    owner: object = None


def index_vector(name: str, values: Any) -> IndexVector:
    """Take in indices: a list, an array, or a CPU or CUDA tensor of int64 or int32 values.

    Values on a device stay there and are borrowed.

    Raises
    ------
    TypeError
        They are not integers.
    BoundsError
        They are not 1-D, or a device vector has gaps.
    """
    if type(values) is np.ndarray and values.dtype == _INT64 and values.strides == (8,):
        return IndexVector(values, 0, len(values))
    if isinstance(values, IndexVector):
        return values
    if isinstance(values, np.ndarray) or not (
        hasattr(values, "__cuda_array_interface__") or getattr(getattr(values, "device", None), "type", "cpu") != "cpu"
    ):
        array = _host_array(name, values)
        if array.size == 0 and array.ndim == 1:
            return IndexVector(np.zeros(0, np.int64), 0, 0)
        if array.dtype == object and all(map(is_pointer, array.flat)):
            for at, value in enumerate(array.flat):
                if not -(2**63) <= value < 2**63:
                    raise BoundsError(f"{name}[{at}] is {value}, must be in [-2**63, 2**63)")
        if array.dtype.kind not in "iu":
            raise _no_integers(name, array, values)
        if array.ndim != 1:
            raise BoundsError(f"{name} has {array.ndim} axes, must have 1")
        if array.dtype == np.uint64 and array.max() > np.uint64(2**63 - 1):
            raise BoundsError(f"{name} holds {array.max()}, must be below 2**63")
        return IndexVector(np.ascontiguousarray(array, np.int64), 0, len(array))
    view = tensor_view(values, name)
    dtype = dtype_name(values) or np.dtype(values.__cuda_array_interface__["typestr"]).name
    if dtype not in ("int64", "int32"):
        raise TypeError(f"{name} holds {dtype} on a device, must hold int64 or int32")
    if len(view.shape) != 1 or not view.contiguous:
        raise BoundsError(
            f"{name} has shape {view.shape}, strides {view.strides} bytes on a device: must be 1-D and dense"
        )
    return IndexVector(None, view.address, view.shape[0], view.itemsize, view.device, values)
