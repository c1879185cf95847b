"""Kernels from PTX text, compiled by the driver on first use, once per process."""

from __future__ import annotations

import numpy as np

from kvraw.errors import DriverError, UnsupportedDriverError
from kvraw.runtime import fork
from kvraw.runtime.context import tie
from kvraw.runtime.driver import CudaDriver, driver

__all__ = ["ArgumentBlock", "Kernel", "no_compiler"]

_lock = fork.lock()
# What stands in the way of compiling PTX, by the driver's result, and what to change.
_NO_COMPILER = {
    221: "install libnvidia-ptxjitcompiler.so.1 of the driver's version (in a container, the capability 'compute')",
    222: "the driver is too old for this PTX, install a newer one",
    223: "unset CUDA_DISABLE_PTX_JIT",
}


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
        tie(self)

    def context_lost(self) -> None:
        """Load it again at its next use."""
        self._owner = None

    def handle(self) -> int:
        """The kernel's handle; compiles the image on first use."""
        return self.handle_for(driver())

    def handle_for(self, d: CudaDriver) -> int:
        """The same, for those who hold the driver already."""
        if self._owner is not d:
            with _lock:
                if self._owner is not d:
                    self._handle = _load(d, self._image, self.name)
                    self._owner = d
        return self._handle

    def launch(self, ctas: int, threads: int, stream: int, block: ArgumentBlock) -> None:
        """Launch on a stream of the current context's device; the block is read during the call."""
        driver().launch(self.handle(), ctas, threads, stream, block.address)


def _load(d: CudaDriver, image: bytes, name: str) -> int:
    why = ""
    try:
        library = d.library_load(image)
        try:
            kernel = d.library_kernel(library, name)
            if d.context_device() >= 0:
                d.kernel_load(kernel)
        except BaseException:
            d.library_unload(library)
            raise
        return kernel
    except DriverError as error:
        why = no_compiler(error)
        if not why:
            raise
    raise UnsupportedDriverError(why)


def no_compiler(error: DriverError) -> str:
    """Why the driver compiles no PTX here, and what to change; empty where the error is another one."""
    change = _NO_COMPILER.get(error.code)
    return f"the driver compiles no kernels here: {error.name} ({error.code}); {change}" if change else ""


class ArgumentBlock:
    """A kernel's only argument, a structure passed by value, that is changed in place between launches.

    Attributes
    ----------
    words : numpy.ndarray of uint64
        The structure's memory, and behind it the array of argument addresses: its own.
    start : int
        Where it lies.
    address : int
        Address of the array of argument addresses that the driver takes.
    """

    __slots__ = ("_dtype", "address", "start", "words")

    def __init__(self, dtype: np.dtype) -> None:
        count = -(-dtype.itemsize // 8)
        self._dtype, self.words = dtype, np.zeros(count + 1, np.uint64)  # numpy makes records ten times as slowly
        self.start = int(self.words.ctypes.data)
        self.words[count], self.address = self.start, self.start + 8 * count

    @property
    def record(self) -> np.ndarray:
        """The structure, as one record of its dtype."""
        return self.words.view(np.uint8)[: self._dtype.itemsize].view(self._dtype)
