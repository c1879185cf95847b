"""Kernels from PTX text, compiled by the driver on first use, once per process."""

from __future__ import annotations

import numpy as np

from kvraw.runtime import fork
from kvraw.runtime.driver import CudaDriver, driver

__all__ = ["ArgumentBlock", "Kernel"]

_lock = fork.lock()


class Kernel:
    """One kernel of one PTX image.

    Parameters
    ----------
    image : bytes
        PTX text.
    name : str
        Its entry.
    """

    def __init__(self, image: bytes, name: str) -> None:
        self.name = name
        self._image = image
        self._owner: CudaDriver | None = None
        self._handle = 0

    def handle(self) -> int:
        """The kernel's handle; compiles the image on first use."""
        return self.handle_for(driver())

    def handle_for(self, d: CudaDriver) -> int:
        """The same, for those who hold the driver already."""
        if self._owner is not d:
            with _lock:
                if self._owner is not d:
                    self._handle = d.library_kernel(d.library_load(self._image), self.name)
                    self._owner = d
        return self._handle

    def launch(self, ctas: int, threads: int, stream: int, block: ArgumentBlock) -> None:
        """Launch on a stream of the current context's device; the block is read during the call."""
        driver().launch(self.handle(), ctas, threads, stream, block.address)


class ArgumentBlock:
    """A kernel's only argument, a structure passed by value: a numpy record that is changed in place between launches.

    Attributes
    ----------
    record : numpy.ndarray
        One record of the structure's dtype.
    address : int
        Address of the array of argument addresses that the driver takes.
    """

    __slots__ = ("_params", "address", "record")

    def __init__(self, dtype: np.dtype) -> None:
        self.record = np.zeros(1, dtype)
        self._params = np.array([self.record.ctypes.data], np.uint64)
        self.address = int(self._params.ctypes.data)
