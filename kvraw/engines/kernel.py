"""The kernel engine: one launch of a shipped PTX kernel carries out a whole plan."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass

import numpy as np

from kvraw import config
from kvraw.engines import kernel_args as ka
from kvraw.engines.device_state import DeviceState, StatusWord, Upload
from kvraw.engines.operands import Operands
from kvraw.errors import BoundsError
from kvraw.plan import CopyPlan
from kvraw.ptx.loader import read_ptx
from kvraw.runtime.inflight import Completion
from kvraw.runtime.module import ArgumentBlock, Kernel

__all__ = ["KernelPlan", "LaunchShape", "copy_kernel", "launch_shape"]

THREADS = 1024
LINK_CTAS = 16  # enough to saturate PCIe 5 x16 on an H200 with margin (benchmarks/README.md)


@functools.cache
def copy_kernel(width: int) -> Kernel:
    """The copy kernel for accesses of `width` bytes."""
    return Kernel(read_ptx(f"copy_v{width}.ptx"), f"kvraw_copy_v{width}")


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Thread blocks and threads per block of a launch."""

    ctas: int
    threads: int


def launch_shape(segments: int, most: int) -> LaunchShape:
    """At most `most` thread blocks, no more warps than there are groups of 32 segments."""
    groups = -(-segments // 32)
    warps = max(min(THREADS // 32, -(-groups // most)), 1)
    return LaunchShape(min(most, -(-groups // warps)), warps * 32)


class KernelPlan:
    """A copy plan made ready for the kernel engine: a packed argument block, changed and launched at each call.

    Parameters
    ----------
    plan : CopyPlan
        What to copy.
    ctas : int, optional
        Most thread blocks of a launch; default: 16 where host memory takes part, else two per multiprocessor.
    check : bool
        Check indices that lie on the device, in the kernel.
    names : tuple of str
        What errors call the source's and the destination's index.
    """

    def __init__(
        self,
        plan: CopyPlan,
        *,
        ctas: int | None = None,
        check: bool = True,
        names: tuple[str, str] = ("src_index", "dst_index"),
    ) -> None:
        self.plan, self.ctas, self.check, self.names = plan, ctas, check, names
        self._block = ArgumentBlock(ka.ARGS)
        self._width = 0
        self._split = 0
        self._lock = threading.Lock()
        ka.fill_plan(self._block.record, plan, check)

    def most_ctas(self, link: bool, multiprocessors: int) -> int:
        """Most thread blocks of a launch; `link` says that host memory takes part."""
        return self.ctas or config.CTAS.get() or (LINK_CTAS if link else 2 * multiprocessors)

    def width(self, src: Operands, dst: Operands) -> int:
        """Bytes per access for these base addresses."""
        return self.plan.width(int(np.bitwise_or.reduce(src.bases)), int(np.bitwise_or.reduce(dst.bases)))

    def launch(
        self,
        state: DeviceState,
        stream: int,
        src: Operands,
        dst: Operands,
        first: int,
        count: int,
        *,
        link: bool,
        refs: tuple[object, ...] = (),
    ) -> Completion:
        """Enqueue the plan for items `first` to `first + count` on a stream.

        Bases and indices are read during the call; `refs`, and indices that lie on the device, are kept until the
        copy is over. The context of the device is current.

        Returns
        -------
        Completion
            Its `error` is a `BoundsError` where the kernel met a bad index.
        """
        plan = self.plan
        state.books.reap()
        status: StatusWord | None = None
        upload: Upload | None = None
        try:
            with self._lock:
                args = self._block.record
                a = args[0]
                width = self.width(src, dst)
                if width != self._width:
                    self._split, self._width = ka.fill_width(args, plan, width), width
                on_device = [o.index is not None and o.index.host is None for o in (src, dst)]
                ka.fill_side(args, "src", plan.src_flat, src.index, self.check and on_device[0])
                ka.fill_side(args, "dst", plan.dst_flat, dst.index, self.check and on_device[1])
                if self.check and any(on_device):
                    status = state.take_status()
                a["status"] = status.device_address if status else 0
                upload = self._place(state, stream, src, dst, first, count)
                segments = count * plan.runs_per_item * self._split
                a["segments"], a["first_item"] = segments, first
                shape = launch_shape(segments, self.most_ctas(link, state.multiprocessors))
                copy_kernel(width).launch(shape.ctas, shape.threads, stream, self._block)
            used = (self, src.index, dst.index, *refs)
            return state.books.open(stream, used, functools.partial(self._settle, state, status, upload))
        except BaseException:
            # Work that was enqueued before the failure may still use them: they are dropped, not used again.
            if status is not None and upload is None:
                state.give_status(status)
            raise

    def _place(
        self, state: DeviceState, stream: int, src: Operands, dst: Operands, first: int, count: int
    ) -> Upload | None:
        """Put tables and host indices into the block; what does not fit goes to the device through an upload."""
        a = self._block.record[0]
        words = a["words"]
        pieces = []
        for name, side in (("src", src), ("dst", dst)):
            pieces.append((name, "table", side.bases, 0, ka.TABLE_INLINE))
        for name, side in (("src", src), ("dst", dst)):
            if side.host_index is not None:
                pieces.append((name, "index", side.host_index[first : first + count], first, ka.INDEX_INLINE))
            elif side.index is not None:
                a[name]["index"] = side.index.address
        spilled = []
        room = ka.WORDS
        for piece in sorted(pieces, key=lambda p: len(p[2])):
            if len(piece[2]) > room:
                spilled.append(piece)
            else:
                room -= len(piece[2])
        at = 0
        for piece in pieces:
            name, field, values, skipped, flag = piece
            if not any(piece is s for s in spilled):
                words[at : at + len(values)] = values.view(np.uint64)
                a[name][field] = (at - skipped) % 2**64
                a[name]["flags"] = (int(a[name]["flags"]) & ~(ka.INDEX_I64 if field == "index" else 0)) | flag
                at += len(values)
        if not spilled:
            return None
        total = sum(len(p[2]) for p in spilled)
        upload = state.take_upload(total)
        at = 0
        for name, field, values, skipped, _ in spilled:
            upload.words[at : at + len(values)] = values.view(np.uint64)
            a[name][field] = (upload.device.address + (at - skipped) * 8) % 2**64
            at += len(values)
        upload.send(total, stream)
        return upload

    def _settle(self, state: DeviceState, status: StatusWord | None, upload: Upload | None) -> Exception | None:
        if upload is not None:
            state.give_upload(upload)
        if status is None:
            return None
        where, value = int(status.values[0]), int(status.values[1].view(np.int64))
        state.give_status(status)
        if not where:
            return None
        side = (self.plan.src_flat, self.plan.dst_flat)[where & 1]
        return BoundsError(
            f"{self.names[where & 1]}[{(where >> 1) - 1}] is {value}, must be in [0, {side.limit}); the kernel left out "
            f"every such entry"
        )
