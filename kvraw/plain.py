"""Tells tensors and arrays whose memory is not what their shape, strides and type say: they are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["PLACES", "fault", "masked", "odd", "require_memory", "require_plain", "unusable"]

PLACES = ("cpu", "cuda")  # torch's names of where kvraw reaches memory

_odd: dict[Any, bool] = {}  # by torch dtype: whether a flag of the tensor or its quantizer says what the bytes mean


def _odd_type(dtype: Any) -> bool:
    name = str(dtype).removeprefix("torch.")
    found = _odd[dtype] = name.startswith(("complex", "quint", "qint"))
    return found


def odd(tensor: Any) -> bool:
    """True where the bytes of a torch tensor need more than its type to be read; cheap, to be asked at each call."""
    dtype = tensor.dtype
    found = _odd.get(dtype)
    if (_odd_type(dtype) if found is None else found) and fault(tensor):
        return True
    negative = getattr(tensor, "is_neg", None)
    return negative is not None and bool(negative())


def _says(tensor: Any, name: str) -> bool:
    """A flag of a tensor, an attribute or a method; False where it has none."""
    try:
        flag = getattr(tensor, name, False)
        return bool(flag() if callable(flag) else flag)
    except (RuntimeError, NotImplementedError):
        return False


def fault(tensor: Any) -> str:
    """Why the memory of a torch tensor cannot be used as it lies; "" where it can."""
    layout = str(getattr(tensor, "layout", "torch.strided")).removeprefix("torch.")
    if _says(tensor, "is_nested"):
        return "is a nested tensor, must be a dense one"
    if layout != "strided":
        return f"is a tensor of layout {layout}, must be a dense one"
    if tensor.device.type not in PLACES:
        none = ", which has no memory" if tensor.device.type == "meta" else ""
        return f"lies on {tensor.device}{none}, must be on the CPU or a CUDA device"
    if _says(tensor, "is_quantized"):
        return f"is quantized ({tensor.dtype}), must hold plain values (int_repr())"
    if _says(tensor, "is_conj") or _says(tensor, "is_neg"):
        return "is a conjugate or negative view of other values, must hold its own (resolve_conj(), resolve_neg())"
    try:
        if tensor.numel() and not tensor.data_ptr():
            return f"is a {type(tensor).__name__} without memory"
        tensor.stride()
    except (RuntimeError, NotImplementedError) as error:
        return f"is a {type(tensor).__name__} without memory of its own ({str(error).splitlines()[0]})"
    return ""


def masked(array: Any) -> bool:
    """True where an array is a masked one, whose mask its memory does not hold."""
    return type(array) is not np.ndarray and isinstance(array, np.ndarray) and hasattr(array, "_mask")


def require_plain(name: str, tensor: Any) -> None:
    """Raise `TypeError` where the memory of a torch tensor cannot be used as it lies."""
    why = fault(tensor)
    if why:
        raise TypeError(f"{name} {why}")


def require_memory(name: str, tensor: Any) -> None:
    """The same, cheap enough for each call."""
    try:
        if tensor.data_ptr() and not odd(tensor):
            return
    except (RuntimeError, NotImplementedError):
        pass
    require_plain(name, tensor)


def unusable(name: str, tensor: Any, error: Exception | None = None) -> TypeError:
    """The error for a tensor that cannot be used; what was raised on the way, where nothing better is known."""
    return TypeError(f"{name} {fault(tensor) or f'cannot be used: {error}'}")
