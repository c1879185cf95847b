"""A transformers cache to host memory and back: ``saved = offload(cache)``, then ``saved.restore()``."""

from __future__ import annotations

from typing import Any

from kvraw.adapters.tensors import current_stream, device_of
from kvraw.batch import memcpy_batch
from kvraw.copying.transfer import Transfer
from kvraw.errors import ClosedError, LayoutError
from kvraw.runtime.host.buffer import HostBuffer
from kvraw.runtime.host.mapping import HostOptions

__all__ = ["HostCache", "offload"]

_ALIGN = 256


class _Held:
    """One tensor of a layer: where it belongs, what it was, and where it lies in the host's memory."""

    __slots__ = ("empty", "layer", "name", "nbytes", "offset", "shape")

    def __init__(self, layer: Any, name: str, tensor: Any, offset: int) -> None:
        self.layer, self.name, self.offset = layer, name, offset
        self.shape, self.empty = tuple(tensor.shape), tensor.new_empty(0)
        self.nbytes = tensor.numel() * tensor.element_size()


def _static(layer: Any) -> bool:
    """Whether compiled code may know the addresses of a layer's tensors."""
    return bool(getattr(layer, "is_compileable", False))


def _layers(cache: Any) -> list[Any]:
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, (list, tuple)):
        raise TypeError(f"cache is a {type(cache).__name__}, must be a cache of transformers with a list of layers")
    return [inner for layer in layers for inner in (getattr(layer, "layers", None) or [layer])]


def _is_tensor(value: object) -> bool:
    return all(hasattr(value, name) for name in ("data_ptr", "new_empty", "is_cuda")) and value.numel() > 0  # type: ignore[attr-defined]


class HostCache:
    """The tensors of a transformers cache in host memory, pinned where they were on a GPU.

    Attributes
    ----------
    nbytes : int
        Bytes of the tensors.
    closed : bool
        Whether the host's memory was given back.
    """

    def __init__(self, cache: Any) -> None:
        found = [
            (layer, name, value) for layer in _layers(cache) for name, value in vars(layer).items() if _is_tensor(value)
        ]
        at, self._held = 0, []
        for layer, name, value in found:
            held = _Held(layer, name, value, at)
            self._held.append(held)
            at += -(-held.nbytes // _ALIGN) * _ALIGN
        self.nbytes = sum(held.nbytes for held in self._held)
        self._device = device_of([value for _, _, value in found])
        options = HostOptions(populate=True)
        self._buffer = HostBuffer(max(at, 1), device=self._device, pin=self._device is not None, options=options)
        # What has gaps is copied to be without them ahead, in the order of the stream.
        dense = [value if value.is_contiguous() else value.contiguous() for _, _, value in found]
        self.closed = False
        self._move([t.data_ptr() for t in dense], dense, store=True)
        for held in self._held:
            if not _static(held.layer):
                setattr(held.layer, held.name, held.empty)

    def _move(self, addresses: list[int], refs: list[Any], *, store: bool) -> None:
        host = [self._buffer.address + held.offset for held in self._held]
        src, dst = (addresses, host) if store else (host, addresses)
        device = self._device
        stream = None if device is None else current_stream(device)
        sizes = [held.nbytes for held in self._held]
        kept = (self._buffer, *refs)
        self._transfer: Transfer = memcpy_batch(dst, src, sizes, stream=stream, device=device, refs=kept)

    def wait(self) -> None:
        """Wait until the copies are over that were enqueued."""
        self._transfer.wait()

    def restore(self, *, keep: bool = False) -> Transfer:
        """Bring the cache's tensors back, on the current stream; what runs there afterwards sees them.

        Parameters
        ----------
        keep : bool
            Keep the copy, to restore it once more. Otherwise its memory is given back when the copies are over.

        Returns
        -------
        Transfer
            To wait for, where another stream uses the cache.

        Raises
        ------
        ClosedError
            It was restored, or closed, before.
        LayoutError
            A static layer has a tensor of another shape by now.
        """
        if self.closed:
            raise ClosedError("the host's copy of this cache was given back")
        self._transfer.wait()  # it may have been stored on another stream
        targets = []
        for held in self._held:
            target = getattr(held.layer, held.name, None)
            if not _static(held.layer):
                target = held.empty.new_empty(held.shape)
            elif target is None or tuple(target.shape) != held.shape or not target.is_contiguous():
                shape = None if target is None else tuple(target.shape)
                raise LayoutError(f"{held.name} of a static layer has shape {shape}, must have {held.shape} as stored")
            targets.append(target)
        self._move([t.data_ptr() for t in targets], targets, store=False)
        for held, target in zip(self._held, targets, strict=True):
            setattr(held.layer, held.name, target)
        if not keep:
            self._transfer.wait()
            self.close()
        return self._transfer

    def close(self) -> None:
        """Give the host's memory back, once the copies are over. Idempotent."""
        self.closed = True
        self._buffer.close()

    def __enter__(self) -> HostCache:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def offload(cache: Any) -> HostCache:
    """Copy a cache's tensors to host memory, on the current stream, and take them from its dynamic layers.

    A dynamic layer's device memory is free for others from then on, and the cache is not to be used until `restore`.
    Static layers keep their tensors, whose addresses compiled code knows: what they hold may be overwritten.

    Parameters
    ----------
    cache : transformers.Cache
        A ``DynamicCache``, ``StaticCache``, or another one that has `layers`.

    Returns
    -------
    HostCache
        To `restore`.

    Raises
    ------
    TypeError
        It has no list of layers.
    PlacementError
        Its tensors lie on several GPUs.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> saved = offload(SimpleNamespace(layers=[]))  # a cache that holds nothing yet
    >>> saved.nbytes
    0
    >>> _ = saved.restore()
    """
    return HostCache(cache)
