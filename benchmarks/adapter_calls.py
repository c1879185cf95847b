"""Host time of LMCache's operations without a GPU: `python -m benchmarks.adapter_calls [--rounds N] [--calls NAME]`.

Each operation runs against a driver whose calls cost nothing, with tensors that only say where they lie. The figures
are Python functions of kvraw that a repeated call enters, the files that these are in, calls of the driver, and
microseconds (median). `--calls NAME` lists the functions, in order, that operations with this in their names enter.
Programs of driver commands are run by the compiled runner, on C functions that do nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw.adapters import tensors
from kvraw.errors import DriverError
from kvraw.runtime import program
from kvraw.runtime.driver import CudaDriver, PointerInfo, install

ROOT = str(Path(kvraw.__file__).parent)
DEVICE_MEMORY, PINNED = range(1 << 44, 1 << 45), range(1 << 45, 1 << 46)  # addresses that nobody reads
STREAM = 0x5000


class NullDriver:
    """The methods of `CudaDriver` with canned answers; counts its calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._kept: dict[int, Any] = {}
        self._next = 0x9000

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name != "calls":
            self.calls[name] += 1
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        """A call that answers nothing."""
        return _nothing

    def relaxed(self) -> contextlib.AbstractContextManager[None]:
        return _RELAXED

    def version(self) -> int:
        return 13000

    def batch_supported(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def device_name(self, device: int) -> str:
        return "NVIDIA H200"

    def device_attribute(self, device: int, name: str) -> int:
        return {"MULTIPROCESSOR_COUNT": 132, "COMPUTE_CAPABILITY_MAJOR": 9}.get(name, 0)

    def device_pci_address(self, device: int) -> str:
        return "0000:00:00.0"

    def device_memory(self, device: int) -> int:
        return 141 << 30

    def context_device(self) -> int:
        return 0

    def context_current(self) -> int:
        return 0x100

    def context_id(self, context: int) -> int:
        return 1

    def primary_retain(self, device: int) -> int:
        return 0x100

    def primary_active(self, device: int) -> bool:
        return True

    def stream_context(self, stream: int) -> int:
        return 0x100

    def stream_capturing(self, stream: int) -> bool:
        return False

    def _handle(self) -> int:
        self._next += 16
        return self._next

    def stream_create(self) -> int:
        return self._handle()

    def event_create(self, timing: bool = False) -> int:
        return self._handle()

    def event_done(self, event: int) -> bool:
        return True

    def event_milliseconds(self, start: int, end: int) -> float:
        return 1.0

    def library_load(self, image: bytes) -> int:
        return self._handle()

    def library_kernel(self, library: int, name: str) -> int:
        return self._handle()

    def mem_alloc(self, nbytes: int) -> int:
        return DEVICE_MEMORY.stop - (len(self._kept) + 1) * (1 << 30)

    def host_alloc(self, nbytes: int) -> int:
        made = np.zeros(nbytes + 4096, np.uint8)
        address = -(-int(made.ctypes.data) // 4096) * 4096
        self._kept[address] = made
        return address

    def host_device_address(self, address: int) -> int:
        return address

    def pointer_number(self, address: int) -> int:
        return 1 + (address >> 36)

    def pointer_info(self, address: int) -> PointerInfo | None:
        base = address >> 36 << 36
        kind = "device" if address in DEVICE_MEMORY else "host"
        return PointerInfo(kind, 0, address, base, 1 << 36)

    def pointer_in_pieces(self, address: int) -> bool:
        return False


_RELAXED = contextlib.nullcontext()


def _nothing(*args: Any) -> None:
    return None


_DEVICE, _HOST = SimpleNamespace(type="cuda", index=0), SimpleNamespace(type="cpu", index=None)


class Tensor:
    """What adapters ask of a torch tensor; its memory is never read."""

    def __init__(self, address: int, shape: tuple[int, ...], size: int = 2, values: Any = None) -> None:
        self.address, self.shape, self.size, self.values = address, shape, size, values
        self.is_cuda = address in DEVICE_MEMORY
        self.device = _DEVICE if self.is_cuda else _HOST
        self.dtype = {2: "torch.bfloat16", 8: "torch.int64", 4: "torch.int32"}[size]
        self.count = int(np.prod(shape))
        self.strides = tuple(int(np.prod(shape[k + 1 :])) for k in range(len(shape)))
        self.nbytes, self._version = self.count * size, 0

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return 0 if self.is_cuda else -1

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return self.size

    def stride(self, axis: int | None = None) -> Any:
        return self.strides if axis is None else self.strides[axis]

    def is_contiguous(self) -> bool:
        return True

    def is_neg(self) -> bool:
        return False

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> Any:
        return self.values


def operations() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every operation that is measured, as `benchmarks.lmcache_ops` has it."""
    layers, blocks, bs, heads, hs, count = 32, 4096, 16, 8, 128, 4
    nbytes = 2 * layers * 256 * heads * hs * 2
    paged = [Tensor(DEVICE_MEMORY.start + (k << 30), (2, blocks, bs, heads, hs)) for k in range(layers)]
    bases = np.array([p.address for p in paged], np.int64)
    table = Tensor(DEVICE_MEMORY.start + (40 << 30), (layers,), 8, bases)
    rng = np.random.default_rng(1)
    ids = rng.permutation(blocks)[:64].astype(np.int64)
    there = Tensor(DEVICE_MEMORY.start + (41 << 30), (64,), 8)
    slots = Tensor(DEVICE_MEMORY.start + (42 << 30), (1024,), 8)
    d = ops.PageBufferShapeDesc()
    d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size = 2, layers, blocks, bs, heads, hs, 2
    fmt = ops.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS
    place = SimpleNamespace(type="cuda", index=0)
    shape = (2, layers, 256, heads * hs)
    # Objects in one registration, each in one of its own (they are 64 GiB apart here), and in device memory.
    kinds = ("pinned", PINNED, nbytes), ("apart", PINNED, 1 << 36), ("device", DEVICE_MEMORY, nbytes)
    for kind, memory, step in kinds:
        start = memory.start + (50 << 30)
        objects = [Tensor(start + k * step, shape) for k in range(count)]
        places = [o.address for o in objects]
        rows = Tensor(start, (2, layers, 1024, heads * hs))
        for way in (ops.D2H, ops.H2D):
            name = "D2H" if way == ops.D2H else "H2D"
            for named, index, given in (
                ("host ids", ids.tolist(), objects),
                ("host ids, addresses", ids.tolist(), places),
                ("device ids, addresses", there, places),
            ):
                yield (
                    f"blocks {kind} {name}, {named}",
                    lambda given=given, index=index, way=way: ops.multi_layer_block_kv_transfer(
                        table, given, index, place, way, d, 256, fmt, 0
                    ),
                )
            if kind != "apart":
                yield (
                    f"slots {kind} {name}",
                    lambda rows=rows, way=way: ops.multi_layer_kv_transfer(
                        rows, table, slots, place, blocks * bs, way, fmt, bs, hs
                    ),
                )
    one = Tensor(DEVICE_MEMORY.start + (60 << 30), (2, 1024, heads * hs))
    tokens = Tensor(DEVICE_MEMORY.start + (61 << 30), (2, layers, 1024, heads * hs))
    keys, values = (Tensor(paged[0].address + k * paged[0].nbytes // 2, (blocks, bs, heads, hs)) for k in (0, 1))
    yield "layer", lambda: ops.single_layer_kv_transfer(one, paged[0], slots, ops.D2H, fmt, False)
    yield "layer of two tensors", lambda: ops.single_layer_kv_transfer_sgl(one, keys, values, slots, ops.D2H, False)
    yield "flash D2H", lambda: ops.load_and_reshape_flash(tokens, keys, values, slots, 0)
    yield "flash H2D", lambda: ops.reshape_and_cache_back_flash(tokens, keys, values, slots, 0)
    host = [PINNED.start + (70 << 30) + k * nbytes for k in range(count)]
    staging = [DEVICE_MEMORY.start + (70 << 30) + k * nbytes for k in range(count)]
    for way in (ops.D2H, ops.H2D):

        def planned(way: Any = way) -> None:
            group = ops.KernelGroupSpec(table.address, list(staging), d, 256, fmt, there.address, 64)
            ends = zip(host, staging, strict=True) if way == ops.D2H else zip(staging, host, strict=True)
            copies = [ops.StagingCopy(a, b, nbytes, k * nbytes) for k, (a, b) in enumerate(ends)]
            steps = [ops.BatchStep(copies, [ops.LaunchVar(0, 0, 64, 4, 0)]) for _ in range(4)]
            ops.execute_object_group_transfer(way, place, 1 << 26, [group], steps)

        yield f"plan of 4 steps {'D2H' if way == ops.D2H else 'H2D'}", planned
    yield "memcpy", lambda: ops.lmcache_memcpy_async(staging[0], host[0], nbytes, ops.H2D, 0, 1 << 26)


@contextlib.contextmanager
def null_driver() -> Iterator[NullDriver]:
    """Install it, and have programs run by compiled code on C functions that do nothing."""
    from numba import cfunc

    @cfunc("int32(CPointer(uint64), int64, uint64)")  # type: ignore[untyped-decorator]
    def number(answer: Any, what: int, address: int) -> int:
        answer[0] = np.uint64(1) + (address >> np.uint64(36))  # as `pointer_number`
        return 0

    made = cfunc("int32(int64)")(lambda a: 0)

    names = (*program.pr.CALLS.values(), "cuThreadExchangeStreamCaptureMode")
    addresses = dict.fromkeys(names, made.address) | {"cuPointerGetAttribute": number.address}
    functions = program.DriverFunctions(addresses, lambda *_: DriverError("failed", 1, ""))
    kvraw.warm_up()
    driver: Any = NullDriver()
    known, raw = program.driver_functions, tensors._raw_stream
    before: CudaDriver | None = install(driver)
    program.driver_functions = lambda d: functions if d is driver else known(d)
    tensors._raw_stream = lambda device: STREAM
    try:
        yield driver
    finally:
        program.driver_functions, tensors._raw_stream = known, raw
        install(before)


def functions_of(work: Callable[[], None]) -> list[tuple[str, str]]:
    """Functions of kvraw that a call enters: their files and names."""
    found: list[tuple[str, str]] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            found.append(
                (code.co_filename[len(ROOT) + 1 :], code.co_qualname if sys.version_info >= (3, 11) else code.co_name)
            )

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def main(named: Callable[[], Iterator[tuple[str, Callable[[], None]]]] = operations) -> None:
    """Measure operations as the arguments of the command say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--calls", help="list the functions of operations whose names have this in them")
    options = parser.parse_args()
    with null_driver() as driver:
        print(f"{'':40} | functions | files | driver |    us |   p90")
        for name, work in named():
            if options.calls is not None and options.calls not in name:
                continue
            for _ in range(40):  # every slot of a staging ring was used, and everything is bound
                work()
            driver.calls.clear()
            work()
            calls = sum(driver.calls.values())
            entered = functions_of(work)
            times = []
            for _ in range(options.rounds):
                begin = time.perf_counter_ns()
                work()
                times.append((time.perf_counter_ns() - begin) / 1e3)
            times.sort()
            files = len({file for file, _ in entered})
            middle, high = times[len(times) // 2], times[len(times) * 9 // 10]
            print(f"{name:40} | {len(entered):9} | {files:5} | {calls:6} | {middle:5.1f} | {high:5.1f}")
            if options.calls is not None:
                print("\n".join(f"    {file}: {function}" for file, function in entered))


if __name__ == "__main__":
    main()
