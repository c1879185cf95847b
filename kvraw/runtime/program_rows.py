"""The rows of a program: a flat table of driver commands, and the values that change from call to call.

A row is eight 64-bit words: what it does, then its operands. An address, a handle or a size is a whole word; grids,
threads and bytes of shared memory are its low 32 bits, a memset's value its low 8.

========== === ================================================================== ==========================
row         op operands                                                           what is called
========== === ================================================================== ==========================
LAUNCH       1 kernel, blocks, threads, shared bytes, stream, params              cuLaunchKernel
COPY         2 dst, src, bytes, stream                                            cuMemcpyAsync
BATCH        3 dst, src, sizes (addresses of uint64 vectors), copies, stream      cuMemcpyBatchAsync (12080)
COPY_2D      4 dst, dst pitch, src, src pitch, width, rows, stream                cuMemcpy2DAsync
MEMSET       5 dst, value, bytes, stream                                          cuMemsetD8Async
RECORD       6 event, stream                                                      cuEventRecord
WAIT         7 stream, event                                                      cuStreamWaitEvent
REACHED      8 event                                                              cuEventQuery
UNCAPTURED   9 stream                                                             cuStreamIsCapturing
ON_DEVICE   10 device                                                             cuCtxGetDevice
SAME_MEMORY 11 address, number                                                    cuPointerGetAttribute
EACH        12 dst, src, sizes (addresses of uint64 vectors), copies, stream      cuMemcpyAsync, one by one
CHECK       13 ids, count, width, limit, flags, marks, first                      nothing: checks ids
WRITE       14 dst, src, count, width, add, first                                 nothing: writes words
========== === ================================================================== ==========================

LAUNCH has a grid of ``blocks`` x 1 x 1 and ``threads`` x 1 x 1; ``params`` is the address of an array of argument
addresses. A LAUNCH of no blocks and a COPY, BATCH, EACH, COPY_2D or MEMSET of nothing is left out, so a value may
switch it off. Four end the program, without an error: REACHED where the event is not reached (asked in relaxed capture
mode), UNCAPTURED where a capture is in progress on the stream, ON_DEVICE where the current context is not one of the
device, SAME_MEMORY where the allocation or registration around an address is not the one of this number
(`pointer_number`).

CHECK looks at ``count`` ids of ``width`` 4 or 8 bytes, signed: each is in [0, limit), and with `DISTINCT` none stands
twice; with `SKIP_NEGATIVE` negative ones count for neither. ``marks`` is one bit for each id below the limit, all zero
before and after; ``first`` is what errors add to a position. All are checked against the limit before any duplicate is
looked for. WRITE stores ``count`` signed integers of ``width`` 4 or 8 bytes from entry
``first`` of a vector on as 64-bit words, ``add`` added to each.

A program begins with its links: each stores a value, plus a number, as an operand of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["IDS", "IDS_COUNT", "Address", "Commands", "Operand", "Value"]

WORDS = 8  # of a row
_MASK = 2**64 - 1
(LAUNCH, COPY, BATCH, COPY_2D, MEMSET, RECORD, WAIT, REACHED, UNCAPTURED, ON_DEVICE, SAME_MEMORY, EACH) = range(1, 13)
CHECK, WRITE = 13, 14
DRIVER_ROWS = EACH  # up to here a row calls the driver

SKIP_NEGATIVE, DISTINCT = 1, 2  # flags of CHECK
OUT_OF_RANGE, DUPLICATE = 1, 2  # what CHECK meets
ENDED = -1  # result of a row that ended the program without an error
NOT_READY, NO_CONTEXT = 600, 201  # CUDA_ERROR_NOT_READY, CUDA_ERROR_INVALID_CONTEXT
MOST_MARKS = 1 << 33  # ids that can be checked for duplicates: 1 GiB of marks, of which few pages are ever touched

# The driver functions by the places of their addresses: those of rows, then what these need beside.
CALLS = {
    LAUNCH: "cuLaunchKernel",
    COPY: "cuMemcpyAsync",
    BATCH: "cuMemcpyBatchAsync",
    COPY_2D: "cuMemcpy2DAsync",
    MEMSET: "cuMemsetD8Async",
    RECORD: "cuEventRecord",
    WAIT: "cuStreamWaitEvent",
    REACHED: "cuEventQuery",
    UNCAPTURED: "cuStreamIsCapturing",
    ON_DEVICE: "cuCtxGetDevice",
    SAME_MEMORY: "cuPointerGetAttribute",
    EACH: "cuMemcpyAsync",
}
EXCHANGE = 0  # cuThreadExchangeStreamCaptureMode

# The header, which is all that the compiled runner is given, in words.
(ROWS, ROW_COUNT, LINKS, LINK_COUNT, VALUES, RELEASE, FUNCTIONS) = range(7)
(FAILED_ROW, RESULT, DETAIL) = range(7, 10)  # what it answers
# Structures that driver functions read and write: a capture mode, CUmemcpyAttributes (24 bytes), their first copy,
# the failing copy, CUDA_MEMCPY2D (128 bytes), a capture status, a device or a number of memory.
(MODE, ATTRIBUTES, ATTRIBUTES_AT, FAILED_COPY, COPY_2D_AT, STATUS) = (10, 11, 14, 15, 16, 32)
HEADER_WORDS = 40
NO_INDEX = -1


@dataclass(frozen=True, slots=True)
class Address:
    """Where a value lies: for a WRITE from the values of a program."""

    value: int


@dataclass(frozen=True, slots=True)
class Value:
    """A word that a caller changes between runs, plus a number: an operand of any number of rows.

    Attributes
    ----------
    index : int
        Its place in `Program.values`.
    add : int
        What is added to it where it is used.
    """

    index: int
    add: int = 0

    def __add__(self, other: int) -> Value:
        return Value(self.index, self.add + other)

    @property
    def address(self) -> Address:
        """Where it lies."""
        return Address(self.index)


Operand = int | Value | Address

# What `Program.run` was given, as values.
IDS, IDS_COUNT = Value(0), Value(1)


class Commands:
    """Rows in the order in which a program carries them out.

    Every method appends a row and returns its number; operands are integers, or values of these commands.
    """

    def __init__(self) -> None:
        self.words: list[int] = []  # of all rows
        self.links: list[int] = []  # three each: a word, the value that is stored to it, and what is added
        self.addresses: list[tuple[int, int]] = []  # words that hold where a value lies
        self.names: dict[int, str] = {}  # of what CHECK rows check
        self.limits: dict[int, int] = {}  # of those whose ids must be distinct
        self.values = 2

    def value(self, count: int = 1) -> Value:
        """Make `count` new values, one behind the other; returns the first. All are zero until they are written."""
        first, self.values = self.values, self.values + count
        return Value(first)

    def _row(self, op: int, *operands: Operand) -> int:
        words, at = self.words, len(self.words)
        words += (op, 0, 0, 0, 0, 0, 0, 0)
        for place, operand in enumerate(operands, at + 1):
            if type(operand) is Value:
                if operand.index >= self.values:
                    raise ValueError(f"row {at // WORDS} uses value {operand.index}, of {self.values}")
                self.links += (place, operand.index, operand.add & _MASK)
            elif type(operand) is Address:
                self.addresses.append((place, operand.value))
            else:
                words[place] = int(operand) & _MASK  # type: ignore[arg-type]
        return at // WORDS

    def launch(
        self, kernel: Operand, blocks: Operand, threads: Operand, stream: Operand, params: Operand, shared: Operand = 0
    ) -> int:
        """Launch a kernel; `params` is the address of an array of argument addresses, read during the call."""
        return self._row(LAUNCH, kernel, blocks, threads, shared, stream, params)

    def copy(self, dst: Operand, src: Operand, nbytes: Operand, stream: Operand) -> int:
        """One copy between any two addresses."""
        return self._row(COPY, dst, src, nbytes, stream)

    def copy_batch(self, dst: Operand, src: Operand, sizes: Operand, count: Operand, stream: Operand) -> int:
        """All copies of three uint64 vectors, given by their addresses, unordered among themselves."""
        return self._row(BATCH, dst, src, sizes, count, stream)

    def copy_each(self, dst: Operand, src: Operand, sizes: Operand, count: Operand, stream: Operand) -> int:
        """The same one by one: for few copies, and where a driver has no batch call."""
        return self._row(EACH, dst, src, sizes, count, stream)

    def copy_2d(
        self,
        dst: Operand,
        dst_pitch: Operand,
        src: Operand,
        src_pitch: Operand,
        width: Operand,
        rows: Operand,
        stream: Operand,
    ) -> int:
        """`rows` copies of `width` bytes, each a pitch behind the one before."""
        return self._row(COPY_2D, dst, dst_pitch, src, src_pitch, width, rows, stream)

    def memset(self, dst: Operand, value: Operand, nbytes: Operand, stream: Operand) -> int:
        """Fill device memory with a byte."""
        return self._row(MEMSET, dst, value, nbytes, stream)

    def record(self, event: Operand, stream: Operand) -> int:
        """Record an event on a stream."""
        return self._row(RECORD, event, stream)

    def wait(self, stream: Operand, event: Operand) -> int:
        """Make a stream wait for an event."""
        return self._row(WAIT, stream, event)

    def reached(self, event: Operand) -> int:
        """End here where an event was not reached."""
        return self._row(REACHED, event)

    def uncaptured(self, stream: Operand) -> int:
        """End here where a capture is in progress on a stream."""
        return self._row(UNCAPTURED, stream)

    def on_device(self, device: Operand) -> int:
        """End here where the current context is not one of this device."""
        return self._row(ON_DEVICE, device)

    def same_memory(self, address: Operand, number: Operand) -> int:
        """End here where the memory at an address is not the allocation or registration of this number any more."""
        return self._row(SAME_MEMORY, address, number)

    def check(
        self,
        name: str,
        ids: Operand,
        count: Operand,
        limit: int,
        *,
        skip_negative: bool = False,
        distinct: bool = False,
        first: Operand = 0,
        width: int = 8,
    ) -> int:
        """Check ids; errors call them `name` and count positions from `first`.

        Raises
        ------
        ValueError
            The limit is not in [0, 2**63), or above 2**33 where ids are to be distinct; the width is neither 4 nor 8.
        """
        if not 0 <= limit < 2**63:
            raise ValueError(f"limit is {limit}, must be in [0, 2**63)")
        if width not in (4, 8):
            raise ValueError(f"width is {width}, must be 4 or 8")
        if distinct and limit > MOST_MARKS:
            raise ValueError(f"limit is {limit}, must be at most {MOST_MARKS} where ids must be distinct")
        flags = SKIP_NEGATIVE * skip_negative | DISTINCT * distinct
        row = self._row(CHECK, ids, count, width, limit, flags, 0, first)
        self.names[row] = name
        if distinct:
            self.limits[row] = limit
        return row

    def write(
        self, dst: Operand, src: Operand, count: Operand, *, add: Operand = 0, width: int = 8, first: Operand = 0
    ) -> int:
        """Store `count` signed integers of `width` bytes, from entry `first` on, as 64-bit words, plus `add`."""
        if width not in (4, 8):
            raise ValueError(f"width is {width}, must be 4 or 8")
        return self._row(WRITE, dst, src, count, width, add, first)

    def __len__(self) -> int:
        return len(self.words) // WORDS

    def calls(self) -> set[str]:
        """The driver functions that rows call."""
        return {CALLS[op] for op in set(self.words[::WORDS]) if op in CALLS}
