"""Programs: what a call does on a device as a table of driver commands, handed as a whole to one compiled function.

The rows of the table are described in `program_rows`. They are carried out by a function that numba compiles, which
calls the driver's functions by their addresses and, in a short program, keeps the GIL; or, row for row and with the
same errors, by Python through the methods of the driver object. The latter is the reference: it is what runs where a
driver has no addresses, where numba cannot be had, and until it has compiled (in the background, from the first program
on).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvraw.errors import BoundsError, DriverError
from kvraw.runtime import program_rows as pr
from kvraw.runtime.compiled import Compiled
from kvraw.runtime.driver import CudaDriver
from kvraw.runtime.program_rows import IDS, IDS_COUNT, Commands, Operand, Value

__all__ = [
    "IDS",
    "IDS_COUNT",
    "Commands",
    "DriverFunctions",
    "Operand",
    "Program",
    "Value",
    "driver_functions",
    "warm_up",
]


I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
_NO_IDS: I64 = np.zeros(0, np.int64)
Entry = Callable[[int, I64], int]


class DriverMethods(Protocol):
    """What the Python runner calls: a part of `CudaDriver`."""

    # fmt: off
    def launch(self, kernel: int, ctas: int, threads: int, stream: int, params: int) -> None: ...
    def memcpy_async(self, dst: int, src: int, nbytes: int, stream: int) -> None: ...
    def memcpy_pinned_async(self, dst: int, src: int, nbytes: int, stream: int) -> None: ...
    def memcpy_batch_async(self, dst: np.ndarray, src: np.ndarray, sizes: np.ndarray, stream: int) -> None: ...
    def memcpy_2d_async(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int
    ) -> None: ...
    def memset_async(self, dst: int, value: int, nbytes: int, stream: int) -> None: ...
    def event_record(self, event: int, stream: int) -> None: ...
    def stream_wait_event(self, stream: int, event: int) -> None: ...
    def event_done(self, event: int) -> bool: ...
    def stream_capturing(self, stream: int) -> bool: ...
    def context_device(self) -> int: ...
    def pointer_number(self, address: int) -> int: ...
    def relaxed(self) -> Any: ...
    # fmt: on


@dataclass(frozen=True, eq=False)
class DriverFunctions:
    """Driver functions as the compiled runner calls them.

    Attributes
    ----------
    addresses : dict of str to int
        Address by name; what is missing cannot be called.
    error : callable
        The error for the name of a function, its result, and the failing copy of a batch or None.
    """

    addresses: dict[str, int]
    error: Callable[[str, int, int | None], DriverError]

    @functools.cached_property
    def table(self) -> I64:
        """Addresses in the order in which the runner looks for them."""
        places = {**pr.CALLS, pr.EXCHANGE: "cuThreadExchangeStreamCaptureMode"}
        return np.array([self.addresses.get(places.get(k, ""), 0) for k in range(16)], np.int64)


def driver_functions(driver: object) -> DriverFunctions | None:
    """Addresses of a driver's functions; None for a driver that has none, as those of tests."""
    if not isinstance(driver, CudaDriver):
        return None
    known: DriverFunctions | None = vars(driver).get("program_functions")
    if known is not None:
        return known
    versions = {"cuMemcpyBatchAsync": 12080}  # the nine-argument form
    names = (*pr.CALLS.values(), "cuThreadExchangeStreamCaptureMode")
    found = {name: driver._address(name, versions.get(name, 12000)) for name in names}

    def error(call: str, code: int, index: int | None) -> DriverError:
        if call == "cuMemcpyBatchAsync":
            return DriverError(driver._cu.CUresult(code).name, code, call, index=index)
        try:
            driver._fail(call, code)
        except DriverError as made:
            return made.with_traceback(None)

    known = vars(driver)["program_functions"] = DriverFunctions(found, error)
    return known


def _compile() -> Entry:
    from kvraw.runtime.program_numba import entry_point

    return entry_point()


COMPILED: Compiled[Entry] = Compiled("programs of driver calls are run", _compile)


def warm_up() -> bool:
    """Compile the runner of programs now; whether it could be."""
    COMPILED.compile()
    return COMPILED.entry is not None


class Program:
    """Commands made ready to be run any number of times.

    A run is two steps: the caller writes `values` that changed, and calls `run`; both under one lock of the caller's,
    if threads share the program. The context in which kernels are launched must be current. Addresses, and what lies
    at them, are the caller's to keep.

    Parameters
    ----------
    commands : Commands
        What it does.
    driver : object
        Has the methods of `CudaDriver` that the commands need.
    release : bool
        The compiled runner gives the GIL away, once, from the first driver call on: for programs that take long (some
        hundred microseconds; to have it back may take 5 ms where other threads run Python) or that may wait, as copies
        of pageable memory do. Python gives it away call by call, where a call may wait.
    functions : DriverFunctions, optional
        Default: those of `driver`.

    Attributes
    ----------
    values : memoryview
        Unsigned words by `Value.index`, written by the caller; those of `IDS` and `IDS_COUNT` by `run`.
    vector : numpy.ndarray of uint64
        The same words.
    ended_at : int
        The row at which the last run ended that returned False.
    """

    __slots__ = (
        "_addressed",
        "_driver",
        "_entry",
        "_functions",
        "_header",
        "_header_address",
        "_links",
        "_marks",
        "_names",
        "_table",
        "ended_at",
        "values",
        "vector",
    )

    def __init__(
        self,
        commands: Commands,
        driver: Any,
        *,
        release: bool = False,
        functions: DriverFunctions | None = None,
    ) -> None:
        self._driver: DriverMethods = driver
        self.ended_at = -1
        self.vector: U64 = np.zeros(commands.values, np.uint64)
        self.values: memoryview[int] = memoryview(self.vector.view("u1").data).cast("B").cast("Q")
        self._names = dict(commands.names)
        self._marks = {row: np.zeros((limit + 63) // 64, np.uint64) for row, limit in commands.limits.items()}
        at = int(self.vector.ctypes.data)
        self._table: U64 = np.array(commands.words, np.uint64).reshape(-1, pr.WORDS)
        for word, value in commands.addresses:
            self._table.flat[word] = at + 8 * value
        for row, array in self._marks.items():
            self._table[row, 6] = array.ctypes.data
        start = int(self._table.ctypes.data)
        self._links: U64 = np.array(commands.links, np.uint64).reshape(-1, 3)
        # The compiled runner's: a word and a value by their addresses.
        self._addressed: U64 = self._links * np.array([8, 8, 1], np.uint64) + np.array([start, at, 0], np.uint64)
        self._header: U64 = np.zeros(pr.HEADER_WORDS, np.uint64)
        self._header_address = int(self._header.ctypes.data)
        head = self._header.view(np.int64)
        head[pr.ROWS], head[pr.ROW_COUNT] = start, len(commands)
        head[pr.LINKS], head[pr.LINK_COUNT] = self._addressed.ctypes.data, len(self._links)
        head[pr.VALUES], head[pr.RELEASE] = at, release
        head[pr.ATTRIBUTES] = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, and no locations
        head[pr.COPY_2D_AT + 2] = head[pr.COPY_2D_AT + 9] = 4  # CU_MEMORYTYPE_UNIFIED, both sides
        self._entry: Entry | None = None
        self._functions = driver_functions(driver) if functions is None else functions
        if self._functions is not None:
            if not all(self._functions.addresses.get(name) for name in commands.calls()):
                self._functions = None  # Python says what is missing, or does without
            else:
                head[pr.FUNCTIONS] = self._functions.table.ctypes.data
                COMPILED.start()
                self._entry = COMPILED.entry

    def __len__(self) -> int:
        return len(self._table)

    @property
    def compiled(self) -> bool:
        """Whether the next run is the compiled runner's."""
        if self._entry is None and self._functions is not None:
            self._entry = COMPILED.entry
        return self._entry is not None

    @property
    def release(self) -> bool:
        """Whether the compiled runner gives the GIL away."""
        return bool(self._header[pr.RELEASE])

    @release.setter
    def release(self, value: bool) -> None:
        self._header[pr.RELEASE] = value

    def run(self, ids: I64 = _NO_IDS) -> bool:
        """Carry the rows out.

        Parameters
        ----------
        ids : numpy.ndarray
            What `IDS` and `IDS_COUNT` stand for: int64, one axis, without gaps. It is not checked that it is.

        Returns
        -------
        bool
            False where a row for `Commands.reached`, `uncaptured`, `on_device` or `same_memory` ended it.

        Raises
        ------
        BoundsError
            Ids are bad; no row behind that check was carried out.
        DriverError
            A driver call failed, at the row that its `command` names; rows before it were carried out.
        """
        entry = self._entry
        if entry is None:
            if not self.compiled:
                return self.run_python(ids)
            entry = self._entry
            assert entry is not None
        if entry(self._header_address, ids):
            return self._stopped()
        return True

    def _stopped(self) -> bool:
        """What ended a run of the compiled runner."""
        head = self._header.view(np.int64)
        row, result, detail = int(head[pr.FAILED_ROW]), int(head[pr.RESULT]), int(head[pr.DETAIL])
        op = int(self._table[row, 0])
        if op == pr.CHECK:
            raise self._bad_id(row, result, detail)
        if result == pr.ENDED:
            self.ended_at = row
            return False
        assert self._functions is not None
        index = detail if op == pr.BATCH and 0 <= detail < int(self._table[row, 4]) else None
        error = self._functions.error(pr.CALLS[op], result, index)
        error.command = row
        raise error

    def _bad_id(self, row: int, kind: int, position: int) -> BoundsError:
        _, ids, count, width, limit, flags, _, first = self._table[row].tolist()
        name, value = self._names[row], int(_signed(ids, count, width)[position])
        if kind == pr.DUPLICATE:
            return BoundsError(f"{name} has {value} more than once; each is written once")
        negative = " (or negative: left out)" if flags & pr.SKIP_NEGATIVE else ""
        return BoundsError(f"{name}[{first + position}] is {value}, must be in [0, {limit}){negative}")

    def run_python(self, ids: I64 = _NO_IDS) -> bool:
        """`run` by Python through the driver object's methods: the reference."""
        values, words, release = self.vector, self._table.ravel(), self.release
        values[0], values[1] = ids.ctypes.data, len(ids)
        if len(self._links):
            target, value, add = self._links.T
            words[target] = values[value] + add
        for at, row in enumerate(self._table.tolist()):
            op, operands = row[0], row[1:]
            if op == pr.CHECK:
                bad = _check(operands)
                if bad is not None:
                    raise self._bad_id(at, *bad)
            elif op == pr.WRITE:
                dst, src, count, width, add, first = operands[:6]
                if count:
                    _words(dst, count)[:] = _signed(src + width * first, count, width).view(np.uint64) + np.uint64(add)
            else:
                try:
                    goes_on = _call(self._driver, op, operands, release)
                except DriverError as error:
                    error.command = at
                    raise
                if not goes_on:
                    self.ended_at = at
                    return False
        return True


def _words(address: int, count: int) -> U64:
    return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address))


def _signed(address: int, count: int, width: int) -> I64:
    """Signed integers of 4 or 8 bytes, as int64."""
    if not count:
        return _NO_IDS
    kind = ctypes.c_int64 if width == 8 else ctypes.c_int32
    return np.ctypeslib.as_array((kind * count).from_address(address)).astype(np.int64)


def _check(operands: Sequence[int]) -> tuple[int, int] | None:
    """What ids are, and the place of the first that is so; None: they are in order."""
    address, count, width, limit, flags, _, _ = operands
    ids = _signed(address, count, width)
    bad = (ids >= limit) if flags & pr.SKIP_NEGATIVE else (ids >= limit) | (ids < 0)
    if bad.any():
        return pr.OUT_OF_RANGE, int(np.argmax(bad))
    if flags & pr.DISTINCT:
        order = np.argsort(ids, kind="stable")
        in_order = ids[order]
        again = order[1:][(in_order[1:] == in_order[:-1]) & (in_order[1:] >= 0)]
        if again.size:
            return pr.DUPLICATE, int(again.min())
    return None


def _call(driver: DriverMethods, op: int, operands: Sequence[int], release: bool) -> bool:
    """Make the driver call of a row; whether the program goes on."""
    a, b, c, d, e, f, g = operands
    if op == pr.LAUNCH:
        if b:
            # No kernel here takes dynamic shared memory so far, and the driver's method has no word for it.
            driver.launch(a, b, c, e, f, *((d,) if d else ()))
    elif op == pr.COPY:
        if c:
            # Either is the same call; the latter gives the GIL away.
            (driver.memcpy_async if release else driver.memcpy_pinned_async)(a, b, c, d)
    elif op == pr.BATCH:
        if d:
            driver.memcpy_batch_async(_words(a, d), _words(b, d), _words(c, d), e)
    elif op == pr.EACH:
        for k in range(d):
            _call(driver, pr.COPY, (*(int(_words(v, d)[k]) for v in (a, b, c)), e, 0, 0, 0), release)
    elif op == pr.COPY_2D:
        if e and f:
            driver.memcpy_2d_async(a, b, c, d, e, f, g)
    elif op == pr.MEMSET:
        if c:
            driver.memset_async(a, b, c, d)
    elif op == pr.RECORD:
        driver.event_record(a, b)
    elif op == pr.WAIT:
        driver.stream_wait_event(a, b)
    elif op == pr.REACHED:
        with driver.relaxed():
            return driver.event_done(a)
    elif op == pr.UNCAPTURED:
        return not driver.stream_capturing(a)
    elif op == pr.ON_DEVICE:
        return driver.context_device() == a
    elif op == pr.SAME_MEMORY:
        return driver.pointer_number(a) == b
    else:
        raise AssertionError(f"a row has operation {op}")
    return True
