"""A driver in this process with the methods of `CudaDriver`: kernels run through the PTX interpreter.

Nothing is done when it is asked for: copies and launches wait in their stream until something waits for them
(`fake_streams`), so a missing wait, or memory given back too early, shows as wrong bytes. Any call can be made to fail
at its n-th use.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvraw.errors import DriverError
from kvraw.runtime.driver import PointerInfo
from tests.emulator.fake_streams import LEGACY, RESULTS, FakeStreams, _Op
from tests.emulator.ptx_memory import Memory
from tests.emulator.ptx_run import Module, module_of

_FILLED = (
    4 << 20
)  # of device memory; behind it are zeros, as wrong as these, which take no memory until they are touched


@dataclass
class _Block:
    """Device memory, pinned memory or a registration."""

    kind: str
    device: int
    address: int
    nbytes: int
    device_address: int
    maps: tuple[mmap.mmap, ...] = ()
    in_pieces: bool = False
    number: int = field(default_factory=itertools.count(1).__next__)


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


class FakeDriver(FakeStreams):
    """See the module's text. `seed` draws the order in which streams are served."""

    def __init__(self, *, devices: int = 2, version: int = 13000, seed: int = 0) -> None:
        super().__init__(seed)
        self.devices, self._version = devices, version
        self.memory = Memory()
        self.calls: Counter[str] = Counter()
        self.violations: list[str] = []
        self.no_ptx = ""  # the result of whatever compiles PTX
        self.sticky = ""  # the result of every call, as after an illegal access
        self.lazy = False  # what is loaded is compiled at its first use
        self.distances: dict[int, int] = {}  # of registrations that begin here: from host addresses to the device's
        self._faults: dict[tuple[str, int], str] = {}
        self._lock = threading.RLock()
        self._contexts: dict[int, int] = {}  # handle -> device, primary contexts retained
        self._ids: dict[int, int] = {}  # of contexts, handles of which come again
        self._current = threading.local()
        self._blocks: dict[int, _Block] = {}
        self._libraries: dict[int, Module] = {}
        self._kernels: dict[int, tuple[Module, str]] = {}

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("_") or not callable(value) or name in _CONTROL:
            return value

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls[name] += 1
                if name == "event_done" and not self._current.__dict__.get("relaxed") and self._captures():
                    self.violations.append("event_done would end a capture that is in progress")
                if self.sticky and name not in _WITHOUT_CONTEXT:
                    raise DriverError(self.sticky, RESULTS[self.sticky], name)
                fault = self._faults.pop((name, self.calls[name]), None)
                if fault is not None:
                    raise DriverError(fault, RESULTS[fault], name)
                return value(*args, **kwargs)

        return call

    # for tests

    def fail(self, name: str, nth: int, result: str) -> None:
        """Make the n-th call from now of a method fail with a result, without doing anything."""
        self._faults[(name, self.calls[name] + nth)] = result

    def capture(self, stream: int, on: bool) -> None:
        """Pretend that a capture begins or ends on a stream."""
        self._streams[stream].capturing = on

    def reset(self, device: int) -> None:
        """What another library does with ``cudaDeviceReset``: all that the primary context held is gone."""
        self._contexts.pop(0x100 + device, None)
        for event in [e for e in self._events if self._event_devices[e] == device]:
            del self._events[event]
        for handle in [h for h, s in self._streams.items() if s.device == device and h not in LEGACY]:
            del self._streams[handle]
        for address in [a for a, b in self._blocks.items() if b.device == device]:
            self.memory.remove(self._blocks.pop(address).device_address)

    def map_in_pieces(self, device: int, nbytes: int, pieces: int) -> int:
        """Device memory at neighbouring addresses, each piece mapped on its own, as virtual memory management does."""
        memory = mmap.mmap(-1, nbytes * pieces)
        for at in range(_address(memory), _address(memory) + nbytes * pieces, nbytes):
            self._keep(_Block("device", device, at, nbytes, at, (memory,), in_pieces=True))
        return _address(memory)

    def _captures(self) -> bool:
        return any(stream.capturing for stream in self._streams.values())

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        self._current.relaxed = self._current.__dict__.get("relaxed", 0) + 1
        try:
            yield
        finally:
            self._current.relaxed -= 1

    def live(self) -> dict[str, int]:
        """What was made and not given back."""
        return {
            "blocks": len(self._blocks),
            "streams": len(self._streams) - len(LEGACY),
            "events": len(self._events),
            "pending": len(self.pending()),
        }

    def pending(self) -> list[_Op]:
        """What was enqueued and not done yet."""
        return [op for stream in self._all() for op in stream.ops]

    # plumbing

    def _stack(self) -> list[int]:
        if not hasattr(self._current, "stack"):
            self._current.stack = []
        return self._current.stack  # type: ignore[no-any-return]

    def _here(self, call: str) -> int:
        """Device of the current context; an error without one."""
        stack = self._stack()
        if not stack:
            raise self._error("CUDA_ERROR_INVALID_CONTEXT", call, "no context is current")
        return self._contexts[stack[-1]]

    def _find(self, address: int) -> _Block | None:
        for b in self._blocks.values():
            if b.address <= address < b.address + b.nbytes:
                return b
            if b.device_address <= address < b.device_address + b.nbytes:
                return b
        return None

    def _range(self, address: int, nbytes: int, call: str, index: int | None = None) -> _Block | None:
        """The block that holds a whole range; None for pageable memory; an error where it spans an end."""
        block = self._find(address)
        last = self._find(address + nbytes - 1)
        if block is not last:
            raise self._error("CUDA_ERROR_INVALID_VALUE", call, f"{address:#x} + {nbytes} spans an end", index)
        return block

    # devices and contexts

    def version(self) -> int:
        return self._version

    def device_count(self) -> int:
        return self.devices

    def device_name(self, device: int) -> str:
        return f"Emulated device {device}"

    def device_attribute(self, device: int, name: str) -> int:
        return {"MULTIPROCESSOR_COUNT": 2, "COMPUTE_CAPABILITY_MAJOR": 7, "COMPUTE_CAPABILITY_MINOR": 5}.get(name, 1)

    def device_memory(self, device: int) -> int:
        return 1 << 30

    def device_pci_address(self, device: int) -> str:
        if not 0 <= device < self.devices:
            raise self._error("CUDA_ERROR_INVALID_VALUE", "device_pci_address", f"{device}")
        return f"0000:0{device}:00.0"

    def primary_active(self, device: int) -> bool:
        return 0x100 + device in self._contexts

    def context_device(self) -> int:
        stack = self._stack()
        return self._contexts[stack[-1]] if stack else -1

    def context_push(self, context: int) -> None:
        self._need(self._contexts, context, "context_push")
        self._stack().append(context)

    def context_pop(self) -> None:
        self._here("context_pop")
        self._stack().pop()

    def stream_context(self, stream: int) -> int:
        found = self._need(self._streams, stream, "stream_context")
        return 0x100 + (self._here("stream_context") if stream in LEGACY else found.device)

    def primary_retain(self, device: int) -> int:
        handle = 0x100 + device
        if handle not in self._contexts:
            self._contexts[handle], self._ids[handle] = device, self._handle()
        return handle

    def context_current(self) -> int:
        return (self._stack() or [0])[-1]

    def context_id(self, context: int) -> int:
        return self._ids[context] if context in self._contexts else 0

    # memory

    def _keep(self, block: _Block) -> int:
        self.memory.add(block.device_address, block.nbytes, f"{block.kind} {block.device_address:#x}")
        self._blocks[block.address] = block
        return block.address

    def _drop(self, address: int, kind: str, call: str) -> None:
        block = self._blocks.get(address)
        if block is None or block.kind != kind:
            raise self._error("CUDA_ERROR_INVALID_VALUE", call, f"{address:#x} is no {kind}")
        # The real call waits for the device first.
        self._until(lambda: not any(s.ops for s in self._all()), call)
        del self._blocks[address]
        self.memory.remove(block.device_address)

    def mem_alloc(self, nbytes: int) -> int:
        device = self._here("mem_alloc")
        memory = mmap.mmap(-1, nbytes)
        np.frombuffer(memory, np.uint8)[:_FILLED] = 0xDB
        address = _address(memory)
        return self._keep(_Block("device", device, address, nbytes, address, (memory,)))

    def mem_free(self, address: int) -> None:
        self._drop(address, "device", "mem_free")

    def host_alloc(self, nbytes: int) -> int:
        device = self._here("host_alloc")
        file = os.memfd_create("pinned")
        os.ftruncate(file, nbytes)
        # Mapped twice: the device's address of pinned memory is not the host's.
        host, mapped = mmap.mmap(file, nbytes), mmap.mmap(file, nbytes)
        os.close(file)
        return self._keep(_Block("pinned", device, _address(host), nbytes, _address(mapped), (host, mapped)))

    def host_free(self, address: int) -> None:
        self._drop(address, "pinned", "host_free")

    def host_register(self, address: int, nbytes: int) -> None:
        device = self._here("host_register")
        for b in self._blocks.values():
            if b.address < address + nbytes and address < b.address + b.nbytes:
                raise self._error("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "host_register")
        self._keep(_Block("registered", device, address, nbytes, address + self.distances.get(address, 0)))

    def host_unregister(self, address: int) -> None:
        if address not in self._blocks or self._blocks[address].kind != "registered":
            raise self._error("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "host_unregister")
        # A memset of device memory, which may be left to itself, touches none.
        if any(op.call != "memset_async" for op in self.pending()):
            self.violations.append(f"host memory {address:#x} unregistered while work is pending")
        self._drop(address, "registered", "host_unregister")

    def host_device_address(self, address: int) -> int:
        block = self._find(address)
        if block is None or block.kind == "device":
            raise self._error("CUDA_ERROR_INVALID_VALUE", "host_device_address")
        return block.device_address + address - block.address

    def pointer_info(self, address: int) -> PointerInfo | None:
        b = self._find(address)
        if b is None:
            return None
        if b.kind == "device":
            return PointerInfo("device", b.device, address, b.address, b.nbytes)
        offset = address - b.address if b.address <= address < b.address + b.nbytes else address - b.device_address
        # Without a current context a driver does not tell where a GPU sees pinned memory.
        seen = b.device_address + offset if self._stack() else 0
        return PointerInfo("host", b.device, seen, b.address, b.nbytes)

    def pointer_in_pieces(self, address: int) -> bool:
        return bool(getattr(self._find(address), "in_pieces", False))

    def pointer_number(self, address: int) -> int:
        b = self._find(address)
        return 0 if b is None else b.number

    # copies

    def _move(self, dst: int, src: int, nbytes: int) -> Callable[[], None]:
        view = np.ctypeslib.as_array
        from ctypes import c_uint8

        def at(address: int) -> np.ndarray:
            return view((c_uint8 * nbytes).from_address(address))

        def work() -> None:
            at(dst)[:] = at(src).copy()

        return work

    def memcpy_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        if nbytes == 0:
            return
        to, at = (self._range(a, nbytes, "memcpy_async") for a in (dst, src))
        work = self._move(dst, src, nbytes)
        if at is None:  # pageable source: read before the call returns
            import ctypes

            held = ctypes.create_string_buffer(ctypes.string_at(src, nbytes), nbytes)
            inner = self._move(dst, ctypes.addressof(held), nbytes)
            work = lambda: (held, inner())[1]  # noqa: E731
        self._push(stream, "memcpy_async", work)
        if to is None:  # pageable destination: the call returns when it is done
            self._until(lambda: not self._streams[stream].ops, "memcpy_async")

    def memcpy_pinned_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        for end in (dst, src):
            if nbytes and self._range(end, nbytes, "memcpy_pinned_async") is None:
                self.violations.append(f"memcpy_pinned_async of pageable memory at {end:#x} would wait with the GIL")
        self.memcpy_async(dst, src, nbytes, stream)

    def memcpy_2d_async(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        if min(dst_pitch, src_pitch) < width or rows < 1:
            raise self._error("CUDA_ERROR_INVALID_VALUE", "memcpy_2d_async")
        for start, pitch in ((dst, dst_pitch), (src, src_pitch)):
            self._range(start, pitch * (rows - 1) + width, "memcpy_2d_async")
        for k in range(rows):
            self.memcpy_async(dst + k * dst_pitch, src + k * src_pitch, width, stream)

    def memset_async(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        import ctypes

        self._range(dst, nbytes, "memset_async")
        self._push(stream, "memset_async", lambda: ctypes.memset(dst, value, nbytes) and None)

    def batch_supported(self) -> bool:
        return self._version >= 12080

    def memcpy_batch_async(self, dst: np.ndarray, src: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        name = "cuMemcpyBatchAsync"
        if stream in LEGACY or not len(sizes):
            raise self._error("CUDA_ERROR_INVALID_VALUE", name)
        if self._streams[stream].capturing:
            raise self._error("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", name)
        work = []
        for k, (to, at, n) in enumerate(zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True)):
            for end in (to, at):
                if n == 0 or self._range(end, n, name, k) is None:
                    raise self._error("CUDA_ERROR_INVALID_VALUE", name, "empty or pageable", k)
            work.append(self._move(to, at, n))
        self._rng.shuffle(work)
        for one in work:
            self._push(stream, name, one)

    # kernels

    def library_load(self, image: bytes) -> int:
        if not self.lazy:
            self._refuse_ptx("library_load")
        handle = self._handle()
        self._libraries[handle] = module_of(image)
        return handle

    def library_unload(self, library: int) -> None:
        self._need(self._libraries, library, "library_unload")
        del self._libraries[library]

    def library_kernel(self, library: int, name: str) -> int:
        module = self._need(self._libraries, library, "library_kernel")
        if name not in module.entries:
            raise self._error("CUDA_ERROR_NOT_FOUND", "library_kernel", name)
        handle = self._handle()
        self._kernels[handle] = (module, name)
        return handle

    def kernel_load(self, kernel: int) -> None:
        self._need(self._kernels, kernel, "kernel_load")
        self._here("kernel_load")
        self._refuse_ptx("kernel_load")

    def _refuse_ptx(self, call: str) -> None:
        if self.no_ptx:
            raise self._error(self.no_ptx, call)

    def launch(self, kernel: int, ctas: int, threads: int, stream: int, params: int) -> None:
        import ctypes

        module, name = self._need(self._kernels, kernel, "launch")
        self._refuse_ptx("launch")
        if not 1 <= threads <= 1024 or ctas < 1:
            raise self._error("CUDA_ERROR_INVALID_VALUE", "launch", f"{ctas} x {threads}")
        where = ctypes.c_uint64.from_address(params).value
        block = ctypes.string_at(where, module.entries[name].param_bytes)  # read during the call, as the real one
        seed = self._rng.randrange(1 << 30)
        self._push(stream, "launch", lambda: module.run(name, ctas, threads, block, self.memory, seed=seed) and None)


_WITHOUT_CONTEXT = {"context_push", "context_pop", "context_current", "context_id", "device_count", "version"}
_CONTROL = {"fail", "capture", "live", "map_in_pieces", "pending", "relaxed", "reset"}
