"""The errors of kvraw: one tree, each with the builtin that callers would expect among its bases."""

from __future__ import annotations

__all__ = [
    "ArtifactError",
    "BoundsError",
    "ClosedError",
    "DriverError",
    "DriverNotFoundError",
    "ForkError",
    "HostMemoryError",
    "KvrawError",
    "LayoutError",
    "PlacementError",
    "TransferTimeoutError",
    "UnsupportedDriverError",
]


class KvrawError(Exception):
    """Base of every error that kvraw raises on purpose."""


class DriverError(KvrawError, RuntimeError):
    """A CUDA driver call failed.

    Attributes
    ----------
    name : str
        The result's name, such as ``CUDA_ERROR_OUT_OF_MEMORY``.
    code : int
        Its number.
    call : str
        The driver function.
    index : int or None
        The failing descriptor of a batch, where it is known.
    command : int or None
        The failing row of a program of driver calls.
    """

    command: int | None = None

    def __init__(self, name: str, code: int, call: str, detail: str = "", index: int | None = None) -> None:
        self.name, self.code, self.call, self.index = name, code, call, index
        self._detail = detail
        where = "" if index is None else f" at descriptor {index}"
        super().__init__(f"{call} failed{where}: {name} ({code}){': ' + detail if detail else ''}")

    def at(self, index: int | None, detail: str = "") -> DriverError:
        """The same error at another descriptor."""
        return DriverError(self.name, self.code, self.call, detail or self._detail, index)

    def __reduce__(self) -> tuple[type[DriverError], tuple[str, int, str, str, int | None], dict[str, object]]:
        made_of = (self.name, self.code, self.call, self._detail, self.index)  # not the text: pools send it on
        return type(self), made_of, dict(self.__dict__)


class DriverNotFoundError(KvrawError, RuntimeError):
    """No CUDA driver, no device, or no cuda-python on this machine."""


class UnsupportedDriverError(KvrawError, RuntimeError):
    """The CUDA driver is too old for what was asked."""


class LayoutError(KvrawError, ValueError):
    """Tensors, a format or a geometry that do not fit together, or that cannot be told apart."""


class BoundsError(KvrawError, ValueError, IndexError):
    """A block id, slot, count or size outside its bounds."""


class PlacementError(KvrawError, ValueError):
    """Memory that the chosen engine cannot reach, such as pageable memory for the kernel engine, or must not write."""


class ClosedError(KvrawError, RuntimeError):
    """Use of something that was closed."""


class ForkError(KvrawError, RuntimeError):
    """A forked child tried to use what is its parent's alone: CUDA, pinned memory, a copy that was under way."""


class HostMemoryError(KvrawError, MemoryError):
    """Host memory that is not to be had, or not in the way that was demanded."""


class TransferTimeoutError(KvrawError, TimeoutError):
    """Transfers that were still under way when the time to wait for them was over."""


class ArtifactError(KvrawError, RuntimeError):
    """A PTX file that is missing, altered, or out of step with its manifest."""
