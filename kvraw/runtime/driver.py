"""The one module that reaches the CUDA driver.

Handles and addresses are ints in and out; every failure is a `DriverError`. Other modules call `driver()` and never
import ``cuda.bindings``; tests put an object with the methods of `CudaDriver` in its place with `install`.
"""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import numpy as np

from kvraw.errors import DriverError, DriverNotFoundError, ForkError, UnsupportedDriverError
from kvraw.runtime import fork
from kvraw.runtime.driver_calls import BatchCopy, PointerAttributes, PointerInfo, Relaxed
from kvraw.runtime.driver_ctypes import EnqueueCalls
from kvraw.runtime.startup import hiding_file, meaning

__all__ = [
    "CudaDriver",
    "PointerInfo",
    "driver",
    "driver_here",
    "driver_if",
    "driver_or_none",
    "install",
    "relaxed",
    "usable_here",
]

_log = logging.getLogger("kvraw")

MINIMUM_DRIVER = 12000  # CUDA 12.0 (R525): the first that takes the PTX shipped here

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
# CUmemorytype
_HOST, _DEVICE, _ARRAY, _UNIFIED = 1, 2, 3, 4


class CudaDriver(EnqueueCalls):
    """The driver calls that kvraw makes. Construct through `driver()`."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver as cu
        except Exception as error:  # a file of the same name raises anything
            hidden = hiding_file()
            if hidden is not None:
                text = f"{hidden} hides cuda-python, whose package has the same name: rename it"
                _log.warning("no GPU is used: %s", text)
                raise DriverNotFoundError(text) from error
            if not isinstance(error, ImportError):
                raise
            raise DriverNotFoundError(f"cuda-python cannot be imported: {error}") from error
        self._cu: Any = cu
        try:
            result = cu.cuInit(0)
        except RuntimeError as error:  # the bindings raise it, not a CUresult, where libcuda.so.1 cannot be loaded
            raise DriverNotFoundError("no CUDA driver: libcuda.so.1 cannot be loaded") from error
        if result[0]:
            text = f"the CUDA driver does not start: {meaning(int(result[0]), result[0].name)}"
            if int(result[0]) != _NO_DEVICE:  # a machine with a GPU, or one that is to have one
                _log.warning("no GPU is used: %s", text)
            raise DriverNotFoundError(text)
        found = self.version()
        if found < MINIMUM_DRIVER:
            raise UnsupportedDriverError(f"the CUDA driver is {found}, must be {MINIMUM_DRIVER} or newer")
        if self.device_count() == 0:
            raise DriverNotFoundError("the CUDA driver sees no device")
        self._attribute = cu.CUdevice_attribute
        self._legacy = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        self._batch: BatchCopy | bool | None = None
        super().__init__(lambda name: self._address(name, MINIMUM_DRIVER))
        self._attributes = PointerAttributes(self._address("cuPointerGetAttributes", MINIMUM_DRIVER))
        self._exchange = Relaxed.exchange(self._address("cuThreadExchangeStreamCaptureMode", MINIMUM_DRIVER))

    def _do(self, name: str, *args: Any) -> Any:
        """Call a driver function; the values behind its result code, or a `DriverError`."""
        result = getattr(self._cu, name)(*args)
        if result[0]:
            self._fail(name, result[0])
        return result[1] if len(result) == 2 else result[1:]

    def relaxed(self) -> AbstractContextManager[None]:
        """For a ``with`` block around `event_done`, which a capture in progress anywhere would forbid.

        Those of the other calls that it would forbid are made so by themselves.
        """
        return Relaxed(self._exchange)

    def _undisturbed(self, name: str, *args: Any) -> Any:
        """`_do` for a call that has no part in a capture that is in progress, on whatever thread and stream."""
        with Relaxed(self._exchange):
            return self._do(name, *args)

    def _address(self, name: str, version: int) -> int:
        """Address of a driver function, in the form of a CUDA version; 0 where this driver has none."""
        code, address, _ = self._cu.cuGetProcAddress(name.encode(), version, 0)
        return 0 if code else int(address or 0)

    def _fail(self, name: str, result: Any) -> NoReturn:
        code = self._cu.CUresult(int(result))
        detail = self._cu.cuGetErrorString(code)[1]
        raise DriverError(code.name, int(code), name, detail.decode() if detail else "")

    # devices and contexts

    def version(self) -> int:
        """CUDA version of the driver, such as 12080."""
        return int(self._do("cuDriverGetVersion"))

    def device_count(self) -> int:
        """Devices visible to this process."""
        return int(self._do("cuDeviceGetCount"))

    def device_name(self, device: int) -> str:
        """Name of a device."""
        return str(self._do("cuDeviceGetName", 256, self._device(device)).split(b"\0")[0].decode())

    def device_attribute(self, device: int, name: str) -> int:
        """A ``CU_DEVICE_ATTRIBUTE_*`` by its last part, such as ``MULTIPROCESSOR_COUNT``."""
        attribute = getattr(self._attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._do("cuDeviceGetAttribute", attribute, self._device(device)))

    def device_memory(self, device: int) -> int:
        """Bytes of memory of a device."""
        return int(self._do("cuDeviceTotalMem", self._device(device)))

    def device_pci_address(self, device: int) -> str:
        """PCI address of a device, such as ``0000:18:00.0``."""
        return str(self._do("cuDeviceGetPCIBusId", 32, self._device(device)).split(b"\0")[0].decode())

    def _device(self, device: int) -> Any:
        return self._do("cuDeviceGet", device)

    def primary_retain(self, device: int) -> int:
        """Retain the primary context of a device."""
        return int(self._do("cuDevicePrimaryCtxRetain", self._device(device)))

    def context_current(self) -> int:
        """The current context; 0 where there is none."""
        return int(self._do("cuCtxGetCurrent"))

    def context_id(self, context: int) -> int:
        """The number that the driver gave a context, and gives no other; 0 where it is no more."""
        code, number = self._cu.cuCtxGetId(context)
        return 0 if code else int(number)

    def primary_active(self, device: int) -> bool:
        """True where the primary context of a device exists; makes none."""
        return bool(self._do("cuDevicePrimaryCtxGetState", self._device(device))[1])

    # memory

    def mem_alloc(self, nbytes: int) -> int:
        """Device memory in the current context."""
        return int(self._undisturbed("cuMemAlloc", nbytes))

    def mem_free(self, address: int) -> None:
        """Free device memory."""
        self._undisturbed("cuMemFree", address)

    def host_alloc(self, nbytes: int) -> int:
        """Pinned memory, mapped, usable in every context."""
        flags = self._cu.CU_MEMHOSTALLOC_PORTABLE | self._cu.CU_MEMHOSTALLOC_DEVICEMAP
        return int(self._undisturbed("cuMemHostAlloc", nbytes, flags))

    def host_free(self, address: int) -> None:
        """Free pinned memory."""
        self._undisturbed("cuMemFreeHost", address)

    def host_register(self, address: int, nbytes: int) -> None:
        """Pin existing host memory in place, mapped, usable in every context."""
        flags = self._cu.CU_MEMHOSTREGISTER_PORTABLE | self._cu.CU_MEMHOSTREGISTER_DEVICEMAP
        self._undisturbed("cuMemHostRegister", address, nbytes, flags)

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`."""
        self._undisturbed("cuMemHostUnregister", address)

    def host_device_address(self, address: int) -> int:
        """Address at which the current context's device sees pinned host memory."""
        code, found = self._cu.cuMemHostGetDevicePointer(address, 0)
        if code:
            self._fail("cuMemHostGetDevicePointer", code)
        return int(found)

    def pointer_info(self, address: int) -> PointerInfo | None:
        """The driver's account of an address; None for pageable host memory."""
        code, kind, managed, device, mapped, base, size = self._attributes(address)
        if code:
            self._fail("cuPointerGetAttributes", code)
        if kind not in (_HOST, _DEVICE, _UNIFIED):
            return None
        return PointerInfo("managed" if managed else "host" if kind == _HOST else "device", device, mapped, base, size)

    def pointer_in_pieces(self, address: int) -> bool:
        """True where memory is mapped in pieces or from a pool: it may be one with its neighbours."""
        code, alone = self._cu.cuPointerGetAttribute(self._legacy, address)
        return not code and not alone

    # streams and events

    def stream_create(self) -> int:
        """A stream that does not wait for the legacy default stream."""
        return int(self._do("cuStreamCreate", self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value))

    def stream_destroy(self, stream: int) -> None:
        """Destroy a stream once its work is done."""
        self._undisturbed("cuStreamDestroy", stream)

    def stream_synchronize(self, stream: int) -> None:
        """Wait on the host for all that a stream was given."""
        self._undisturbed("cuStreamSynchronize", stream)

    def event_create(self, timing: bool = False) -> int:
        """An event, without timing unless asked."""
        flags = self._cu.CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        return int(self._do("cuEventCreate", flag.value))

    def event_destroy(self, event: int) -> None:
        """Destroy an event."""
        self._undisturbed("cuEventDestroy", event)

    def event_synchronize(self, event: int) -> None:
        """Wait on the host for an event."""
        self._undisturbed("cuEventSynchronize", event)

    def event_milliseconds(self, start: int, end: int) -> float:
        """Time between two timed events that were reached."""
        return float(self._do("cuEventElapsedTime", start, end))

    # copies

    def memcpy_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """One copy between any two addresses, on a stream; waits for a part of it where pageable memory takes part."""
        (code,) = self._cu.cuMemcpyAsync(dst, src, nbytes, stream)
        if code:
            self._fail("cuMemcpyAsync", code)

    def memcpy_2d_async(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """`rows` copies of `width` bytes, each a pitch behind the one before; pitches are bytes, at least `width`."""
        c = self._cu.CUDA_MEMCPY2D()
        c.srcMemoryType = c.dstMemoryType = self._cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        c.srcDevice, c.srcPitch, c.dstDevice, c.dstPitch = src, src_pitch, dst, dst_pitch
        c.WidthInBytes, c.Height = width, rows
        self._do("cuMemcpy2DAsync", c, stream)

    def batch_supported(self) -> bool:
        """True where this driver has ``cuMemcpyBatchAsync`` (12.8 and newer)."""
        if self._batch is None:
            # Version 12080 asks for the nine-argument form, with the failing index, of every driver that has the call.
            address = self._address("cuMemcpyBatchAsync", 12080)
            self._batch = BatchCopy(address) if address else False
        return self._batch is not False

    def memcpy_batch_async(self, dst: np.ndarray, src: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        """All copies of three uint64 vectors in one call, in stream order, unordered among themselves.

        The driver reads the vectors during the call only. It refuses the legacy default stream and captures.
        """
        if not self.batch_supported():
            raise UnsupportedDriverError(f"cuMemcpyBatchAsync needs a CUDA 12.8 driver, this one is {self.version()}")
        assert isinstance(self._batch, BatchCopy)
        code, index = self._batch(dst, src, sizes, stream)
        if code:
            raise DriverError(self._cu.CUresult(code).name, code, "cuMemcpyBatchAsync", index=index)

    # kernels

    def library_load(self, image: bytes) -> int:
        """Compile and load PTX, for every context of the process."""
        return int(self._undisturbed("cuLibraryLoadData", image + b"\0", [], [], 0, [], [], 0))

    def library_unload(self, library: int) -> None:
        """Unload a library."""
        self._undisturbed("cuLibraryUnload", library)

    def library_kernel(self, library: int, name: str) -> int:
        """A kernel of a library."""
        return int(self._do("cuLibraryGetKernel", library, name.encode()))

    def kernel_load(self, kernel: int) -> None:
        """Compile a kernel for the current context's device now, where that was put off until its first launch."""
        self._undisturbed("cuKernelGetFunction", kernel)


_lock = fork.lock()
_driver: CudaDriver | None = None
_absent: DriverNotFoundError | UnsupportedDriverError | None = None
_pid = 0
_starting = False
_forked = False  # this is the child of a process that had started the driver, or was about to


def _after_fork() -> None:
    global _forked
    _forked = _driver is not None or _starting


fork.in_child(_after_fork)


def driver() -> CudaDriver:
    """The driver, started on first use.

    Raises
    ------
    DriverNotFoundError
        There is no driver, no device or no cuda-python.
    UnsupportedDriverError
        The driver is older than CUDA 12.0.
    ForkError
        It was started in a parent process.
    """
    global _driver, _absent, _pid, _starting
    if _driver is not None and not _forked:
        return _driver
    if _forked:
        raise ForkError(f"CUDA was started in process {_pid} and does not survive fork; use spawn")
    with _lock:
        if _driver is None:
            if _absent is not None:
                # A new one each time: a kept exception would hold the frames, and their memory, of whoever caught it.
                raise type(_absent)(*_absent.args)
            _starting, _pid = True, os.getpid()
            try:
                with fork.undivided():
                    _driver = CudaDriver()
            except (DriverNotFoundError, UnsupportedDriverError) as error:
                _absent = type(error)(*error.args)
                raise
            finally:
                _starting = False
    return _driver


def driver_or_none() -> CudaDriver | None:
    """The driver, or None where there is none to be had."""
    if _absent is not None and not _forked:
        return _driver
    try:
        return driver()
    except (DriverNotFoundError, UnsupportedDriverError):
        return None


def driver_here() -> CudaDriver | None:
    """The driver, or None where there is none to be had, or a parent process had started it."""
    return None if _forked else driver_or_none()


def driver_if(known: weakref.ref[CudaDriver]) -> CudaDriver | None:
    """The driver that a finalizer was made with; None in a forked child, and where another driver was put in place."""
    found = known()
    return found if found is not None and found is _driver and not _forked else None


def relaxed() -> AbstractContextManager[None]:
    """`CudaDriver.relaxed` of the driver in use; nothing where this process cannot use one."""
    return _driver.relaxed() if _driver is not None and not _forked else nullcontext()


def usable_here() -> bool:
    """True where the driver was started, and by this very process."""
    return _driver is not None and not _forked


def install(replacement: CudaDriver | None) -> CudaDriver | None:
    """Put another driver object in place (None: forget); returns the one before. For tests."""
    global _driver, _absent, _pid
    before, _driver, _absent, _pid = _driver, replacement, None, os.getpid()
    return before
