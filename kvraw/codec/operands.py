"""Arguments of codec calls, validated: shapes, element types, places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvraw.arrays import ASK_DRIVER, TensorView, dtype_name, require_apart, require_writable, tensor_view
from kvraw.codec import args
from kvraw.errors import BoundsError, KvrawError, LayoutError, PlacementError
from kvraw.runtime.memory import locate

__all__ = ["MOST_TOKENS", "Job", "common_device", "take"]

MOST_TOKENS = 1 << 29  # a stream's length in bytes fits int32
MOST_SYMBOLS = 256


def take(
    name: str, tensor: Any, axes: int, dtypes: Sequence[str], itemsize: int, dense: bool = True, written: bool = False
) -> TensorView:
    """Take in a tensor of one of some element types.

    Raises
    ------
    TypeError
        Its element type is another.
    LayoutError
        It has another number of axes, negative strides, or gaps where it must be dense.
    PlacementError
        It is to be written, and is read-only.
    """
    view = tensor_view(tensor, name)
    found = dtype_name(tensor)
    if view.itemsize != itemsize or (found and found not in dtypes):
        raise TypeError(f"{name} holds {found or f'{view.itemsize}-byte elements'}, must hold {' or '.join(dtypes)}")
    if len(view.shape) != axes:
        raise LayoutError(f"{name} has {len(view.shape)} axes, must have {axes}")
    if dense and not view.contiguous:
        raise LayoutError(f"{name} has strides {view.strides} bytes for shape {view.shape}, must be dense")
    if min(view.strides, default=0) < 0:
        raise LayoutError(f"{name} has strides {view.strides} bytes, must not be negative")
    return require_apart(name, require_writable(name, view)) if written else view


def common_device(views: dict[str, TensorView]) -> int | None:
    """The device on which all of some tensors lie; None for host memory.

    Raises
    ------
    PlacementError
        They lie apart; says where.
    """
    places = {}
    for name, view in views.items():
        device = view.device
        if device == ASK_DRIVER:
            device = locate(view.address, max(view.nbytes, 1)).device
        if view.nbytes:
            places[name] = device
    if len(set(places.values())) > 1:
        said = ", ".join(f"{n} {'in host memory' if d is None else f'on device {d}'}" for n, d in places.items())
        raise PlacementError(f"all must lie in one place: {said}")
    return next(iter(places.values()), None)


@dataclass(frozen=True, slots=True)
class Job:
    """A call on streams: counts, and where things are."""

    symbols: TensorView
    cdf: TensorView
    data: TensorView | None
    lengths: TensorView | None
    flags: int
    device: int | None

    @classmethod
    def make(
        cls, symbols: Any, cdf: Any, data: Any = None, lengths: Any = None, *, out: str = "", flags: int = 0
    ) -> Job:
        """Check the parts against each other; `out` is the name of the argument that receives streams."""
        decoded = data is not None and not out
        s = take("symbols", symbols, 3, ("uint8", "int8"), 1, dense=False, written=decoded)
        if dtype_name(symbols) == "int8":
            flags |= args.SIGNED
        layers, tokens, channels = s.shape
        if tokens >= MOST_TOKENS:
            raise BoundsError(f"symbols has {tokens} tokens, must have fewer than {MOST_TOKENS}")
        c = take("cdf", cdf, 3, ("int16", "uint16"), 2, written=data is None)
        if c.shape[:2] != (layers, channels) or not 2 <= c.shape[2] <= MOST_SYMBOLS + 1:
            raise LayoutError(
                f"cdf has shape {c.shape}, must be ({layers}, {channels}, alphabet + 1), alphabet 1 to {MOST_SYMBOLS}"
            )
        views = {"symbols": s, "cdf": c}
        if data is None:
            return cls(s, c, None, None, flags, common_device(views))
        if flags & args.PACKED:
            d = take("data", data, 1, ("uint8", "int8"), 1)
            ends = (
                take("ends", lengths, 2, ("int64",), 8) if _wide(lengths) else take("ends", lengths, 2, ("int32",), 4)
            )
            flags |= args.WIDE if ends.itemsize == 8 else 0
        else:
            d = take(out or "data", data, 3, ("uint8", "int8"), 1, written=not decoded)
            ends = take("lengths", lengths, 2, ("int32",), 4, written=not decoded)
            if d.shape[:2] != (layers, channels):
                raise LayoutError(f"{out or 'data'} has shape {d.shape}, must be ({layers}, {channels}, bytes)")
        if ends.shape != (layers, channels):
            raise LayoutError(f"lengths has shape {ends.shape}, must be ({layers}, {channels})")
        views |= {out or "data": d, "lengths": ends}
        return cls(s, c, d, ends, flags, common_device(views))

    def without_owners(self) -> Job:
        """The same, keeping no tensor alive."""
        views = (self.symbols, self.cdf, self.data, self.lengths)
        symbols, cdf, data, lengths = (None if v is None else replace(v, owner=None) for v in views)
        assert symbols is not None
        assert cdf is not None
        return Job(symbols, cdf, data, lengths, self.flags, self.device)

    @property
    def tokens(self) -> int:
        """Symbols of a stream."""
        return self.symbols.shape[1]

    @property
    def channels(self) -> int:
        """Streams of a layer."""
        return self.symbols.shape[2]

    @property
    def streams(self) -> int:
        """Streams in all."""
        return self.symbols.shape[0] * self.symbols.shape[2]

    @property
    def alphabet(self) -> int:
        """Symbols that there are."""
        return self.cdf.shape[2] - 1

    @property
    def row(self) -> int:
        """Bytes of a stream's slot; 0 where streams are packed."""
        return self.data.shape[2] if self.data is not None and not self.flags & args.PACKED else 0

    def error(self, fault: int, stream: int, value: int) -> KvrawError:
        """The error for what a kernel found."""
        layer, channel = divmod(stream, max(self.channels, 1))
        where = f"layer {layer}, channel {channel}"
        if fault == args.BAD_SYMBOL:
            value -= 256 if self.flags & args.SIGNED and value > 127 else 0
            return BoundsError(f"symbols holds {value} in {where}, must be in [0, {self.alphabet})")
        if fault == args.TOO_SMALL:
            return BoundsError(f"out has {self.row} bytes per channel, {where} needs {value}")
        if fault == args.BAD_CDF:
            return LayoutError(f"cdf[{layer}, {channel}] does not rise: entry {value} is not above entry {value - 1}")
        signed = value - (1 << 64) if value >> 63 else value
        if self.flags & args.PACKED:
            size = self.data.nbytes if self.data is not None else 0
            return BoundsError(f"ends[{layer}, {channel}] is {signed}, must rise from 0 to at most {size}")
        return BoundsError(f"lengths[{layer}, {channel}] is {signed}, must be in [0, {self.row}]")


def _wide(tensor: Any) -> bool:
    return tensor_view(tensor).itemsize == 8
