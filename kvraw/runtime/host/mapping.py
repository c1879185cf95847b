"""Host memory of every kind, obtained and described truthfully; not yet pinned (but for what the driver allocates)."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvraw.addresses import FIRST, TOP, in_reach
from kvraw.checks import integer
from kvraw.errors import BoundsError, DriverError, HostMemoryError
from kvraw.runtime.driver import driver
from kvraw.runtime.host import backing, libc, shm
from kvraw.runtime.host.registration import Registration, give_up, is_registered, note_allocation
from kvraw.runtime.memory import PinnedBuffer

__all__ = ["HostMapping", "HostOptions", "allocate_memory", "attach_memory", "borrow_memory"]

Kind = Literal["anonymous", "huge-2MiB", "huge-1GiB", "shared", "pinned"]
HUGE = {"huge-2MiB": 2 << 20, "huge-1GiB": 1 << 30}
TRANSPARENT = 2 << 20  # what the base pages of x86-64, and of most Arm kernels, are joined to
LARGEST_STEP = 256 << 30  # bytes; one registration of 512 GiB or more fails on r580

_log = logging.getLogger("kvraw")
_warned: set[str] = set()


@dataclass(frozen=True)
class HostOptions:
    """Options for the memory of a `HostBuffer` or a `HostPool`.

    Parameters
    ----------
    kind : str
        "anonymous" (transparent huge pages, the default), "huge-2MiB" and "huge-1GiB" (explicit huge pages, which the
        administrator set aside), "shared" (POSIX shared memory), or "pinned" (allocated by the driver; slow to get).
    node : int or "device", optional
        Bind the memory to a NUMA node; "device": the one that the GPU hangs on.
    name : str, optional
        Of shared memory; default: one of its own.
    replace : bool
        Of shared memory: whatever has the name loses it.
    strict : bool
        Raise where huge pages or the node are not to be had, instead of going on without them with one warning.
    populate : bool, optional
        Back the memory with pages now; default: only what is pinned now.
    grow : bool
        Return once the first bytes are ready (populated, and pinned if the whole is to be), and go on in the
        background. Chunks come from what is ready.
    first_bytes : int
        How many bytes these are.
    threads : int, optional
        That populate; default `KVRAW_HOST_THREADS`.
    step_bytes : int, optional
        Bytes per registration with the driver; default `KVRAW_REGISTER_BYTES`.
    progress : callable, optional
        Called with bytes that are ready and bytes in all, after each registration; with `grow`, from a thread. What it
        raises ends the preparation.

    Raises
    ------
    ValueError, BoundsError, TypeError
        An option is none that there is, or does not go with another.

    Examples
    --------
    >>> with kvraw.HostPool(1 << 20, pin=False, options=kvraw.HostOptions(kind="shared", populate=True)) as pool:
    ...     pool.ready_bytes
    1048576
    """

    kind: Kind = "anonymous"
    node: int | Literal["device"] | None = None
    name: str | None = None
    strict: bool = False
    populate: bool | None = None
    grow: bool = False
    first_bytes: int = 256 << 20
    threads: int | None = None
    step_bytes: int | None = None
    progress: Callable[[int, int], None] | None = None
    replace: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("anonymous", "huge-2MiB", "huge-1GiB", "shared", "pinned"):
            raise ValueError(f"kind is {self.kind!r}, must be anonymous, huge-2MiB, huge-1GiB, shared or pinned")
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"name is {self.name!r}, must be a str")
        if self.progress is not None and not callable(self.progress):
            raise TypeError(f"progress is {self.progress!r}, must be callable")
        if self.name is not None and self.kind != "shared":
            raise ValueError(f"name is {self.name!r}, but kind is {self.kind!r}; only shared memory has a name")
        if self.node is not None and self.kind == "pinned":
            raise ValueError("node is given, but the driver chooses where the memory that it allocates lies")
        if self.node not in (None, "device") and not 0 <= integer("node (if not 'device')", self.node) < 1024:
            raise BoundsError(f"node is {self.node}, must be in [0, 1024)")
        for name in ("first_bytes", "threads", "step_bytes"):
            value = getattr(self, name)
            if value is not None and integer(name, value) <= 0:
                raise BoundsError(f"{name} is {value}, must be positive")
        if self.step_bytes is not None and self.step_bytes > LARGEST_STEP:
            raise BoundsError(f"step_bytes is {self.step_bytes}, must be at most {LARGEST_STEP}")


class HostMapping:
    """A mapped range, given back once nothing refers to it any more; arrays over it do.

    Attributes
    ----------
    huge_pages : str
        "transparent" (asked for), "refused" (asked for, not to be had), "2MiB", "1GiB", or "no".
    node : int or None
        The NUMA node it is bound to.
    degraded : list of str
        What was asked for and not obtained.
    allocation : PinnedBuffer or None
        What the driver allocated.
    shift : int or None
        Distance to the device's address, where the driver allocated the memory.
    owned : bool
        False: the memory is borrowed.
    registrations : list of Registration
        Of the memory, in order. They end with it where nobody ends them before: whoever still has a view, such as a
        transfer under way, has pinned memory.
    failures : list of DriverError
        Why the driver would not take back what it allocated; filled once nothing refers to the memory any more.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        kind: str,
        release: Callable[[], None] | None,
        owner: Any = None,
        segment: shm.Segment | None = None,
    ) -> None:
        self.address, self.nbytes, self.kind, self.owner = address, nbytes, kind, owner
        self.huge_pages = "no"
        self.node: int | None = None
        self.degraded: list[str] = []
        self.shift: int | None = None
        self.segment = segment
        self.allocation: PinnedBuffer | None = None
        self.owned = release is not None
        self.hidden_from_children: list[bool] = [False]
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        self.registrations: list[Registration] = []
        self.failures: list[DriverError] = []
        self._finalizer = weakref.finalize(
            self, _release, os.getpid(), (address, nbytes), segment, self.registrations, self.hidden_from_children,
            release, self.failures, owner,
        )  # fmt: skip
        self._finalizer.atexit = False  # threads, and views in other exit functions, may still use it

    def discard(self) -> None:
        """Give it back at once, which nobody has seen yet: the frames of an exception under way would keep it."""
        self._finalizer()

    def closed_copy(self) -> HostMapping:
        """A record of the memory for the time after it is given up, which does not keep it."""
        left = HostMapping(self.address, self.nbytes, self.kind, None)
        left.huge_pages, left.node, left.degraded = self.huge_pages, self.node, self.degraded
        return left

    def account(self) -> dict[str, object]:
        """The part of `HostBuffer.info` on what was obtained."""
        return {
            "nbytes": self.nbytes,
            "kind": self.kind,
            "name": None if self.segment is None else self.segment.name,
            "registrations": len(self.registrations),
            "huge_pages": self.huge_pages,
            "node": self.node,
            "degraded": list(self.degraded),
        }

    def context_lost(self) -> bool:
        """Forget registrations that ended with their context; whether the memory itself did."""
        if self.registrations and all(one.closed for one in self.registrations):
            self.registrations.clear()
            self.shift = None
            self.hide_from_children(False)
        return self.allocation is not None and self.allocation.closed

    def array(self) -> np.ndarray:
        """The whole range as bytes; keeps the memory."""
        return np.asarray(self)

    def hide_from_children(self, hide: bool) -> None:
        """Keep pinned private memory out of forked children.

        The kernel would copy every pinned page at the fork, so that the device goes on with the parent's.
        """
        if self.owned and self.kind not in ("shared", "pinned") and hide != self.hidden_from_children[0]:
            try:
                libc.advise(self.address, self.nbytes, libc.DONTFORK if hide else libc.DOFORK)
            except OSError as error:
                _log.debug("a fork will copy the pinned memory at %#x: %s", self.address, error)
            else:
                self.hidden_from_children[0] = hide

    def degrade(self, what: str, change: str, strict: bool) -> None:
        """Note that something was not to be had: one warning per process, or an error where it was demanded."""
        text = f"{what}; to change: {change}"
        if strict:
            raise HostMemoryError(text)
        self.degraded.append(text)
        if text not in _warned:
            _warned.add(text)
            _log.warning("%s", text)


def _release(
    pid: int,
    span: tuple[int, int],
    segment: shm.Segment | None,
    registrations: list[Registration],
    hidden: list[bool],
    release: Callable[[], None] | None,
    failures: list[DriverError],
    owner: object,
) -> None:
    if segment is not None:
        segment.unlink()  # the name goes in any case, also where the memory has to stay
    if pid == os.getpid():
        with contextlib.suppress(DriverError):
            give_up(registrations)
        if release is not None and is_registered(*span):
            _log.error("%d bytes at %#x stay mapped: the driver would not unregister them", span[1], span[0])
            return
    elif hidden[0]:
        return  # a forked child never had it mapped; something else may be there by now
    if release is not None:
        try:
            release()
        except DriverError as error:
            _log.error("%d bytes at %#x stay allocated: %s", span[1], span[0], error)
            failures.append(error)


def _unmapper(address: int, nbytes: int) -> Callable[[], None]:
    return lambda: libc.unmap(address, nbytes)


def _round(nbytes: int, page: int) -> int:
    return -(-nbytes // page) * page


def _cannot_map(nbytes: int, error: OSError) -> HostMemoryError:
    return HostMemoryError(f"cannot map {nbytes} bytes of host memory: {error}")


def _anonymous(nbytes: int) -> HostMapping:
    size = _round(nbytes, libc.PAGE)
    try:
        address = libc.map_anonymous(size, align=TRANSPARENT if size >= TRANSPARENT else libc.PAGE)
    except OSError as error:
        raise _cannot_map(size, error) from error
    return HostMapping(address, size, "anonymous", _unmapper(address, size))


def _join_pages(memory: HostMapping) -> None:
    """Ask for transparent huge pages."""
    try:
        libc.advise(memory.address, memory.nbytes, libc.HUGEPAGE)
    except OSError:
        memory.huge_pages = "refused"
        return
    # The advice is taken without complaint where the machine never follows it.
    memory.huge_pages = "transparent" if backing.transparent_setting() != "never" else "refused"


def _explicit(nbytes: int, kind: str) -> HostMapping:
    page = HUGE[kind]
    size = _round(nbytes, page)
    address = libc.map_anonymous(size, huge_page=page)
    memory = HostMapping(address, size, kind, _unmapper(address, size))
    memory.huge_pages = kind.removeprefix("huge-")
    return memory


def _no_huge_pages(nbytes: int, kind: str, error: OSError) -> tuple[str, str]:
    page = HUGE[kind]
    need = _round(nbytes, page) // page
    at = f"/sys/kernel/mm/hugepages/hugepages-{page >> 10}kB/nr_hugepages"
    there = backing.free_huge_pages(page)
    if there is None or error.errno == errno.EINVAL:
        return f"{kind} pages: this kernel has none", "ask for another kind"
    return (
        f"{kind} pages: {need} are needed, {there[0]} of {there[1]} are free ({error})",
        f"echo {there[1] - there[0] + need} > {at}, and give the container a hugetlb limit that allows it",
    )


def _bind(memory: HostMapping, node: int | str, device: int | None, strict: bool) -> None:
    if node == "device":
        found = None if device is None else backing.device_node(device)
        if found is None:
            why = "no device is named" if device is None else f"the node of device {device} is not known"
            memory.degrade(f"NUMA binding: {why}", "name a device, or the node itself", strict)
            return
        node = found
    node = integer("node", node)
    known = backing.nodes()
    if known and node not in known:
        raise BoundsError(f"node is {node}, must be one of {known}, the nodes with memory")
    try:
        libc.bind(memory.address, memory.nbytes, node)
    except OSError as error:
        change = "start the process under numactl --membind"
        if error.errno == errno.EPERM:
            change = "give the container CAP_SYS_NICE or a seccomp profile that allows mbind; or " + change
        memory.degrade(f"NUMA binding: {error}", change, strict)
    else:
        memory.node = node


def _shared(segment: shm.Segment) -> HostMapping:
    address, nbytes = segment.address, segment.nbytes
    return HostMapping(address, nbytes, "shared", _unmapper(address, nbytes), segment=segment)


def _pinned(nbytes: int, device: int) -> HostMapping:
    size = _round(nbytes, libc.PAGE)
    buffer = PinnedBuffer(size, device)
    forget = note_allocation(driver(), buffer.address, size)

    def release() -> None:
        forget()
        buffer.close()

    memory = HostMapping(buffer.address, size, "pinned", release)
    memory.shift, memory.allocation = buffer.device_address - buffer.address, buffer
    return memory


def allocate_memory(nbytes: int, options: HostOptions, device: int | None, pin_device: int | None) -> HostMapping:
    """Memory as asked for, of at least `nbytes` in whole pages.

    Parameters
    ----------
    device : int or None
        For ``node="device"``.
    pin_device : int or None
        Where kind is "pinned", the device in whose context the driver allocates; None: there is none, and anonymous
        memory takes the place.

    Raises
    ------
    HostMemoryError
        It is not to be had; nothing stays mapped.
    """
    lost: tuple[str, str] | None = None
    if options.kind == "shared":
        memory = _shared(shm.create_segment(_round(nbytes, libc.PAGE), options.name, replace=options.replace))
    elif options.kind == "pinned" and pin_device is not None:
        return _pinned(nbytes, pin_device)
    elif options.kind in HUGE:
        try:
            memory = _explicit(nbytes, options.kind)
        except OSError as error:
            lost = _no_huge_pages(nbytes, options.kind, error)
            if options.strict:
                raise HostMemoryError(f"{lost[0]}; to change: {lost[1]}") from error
            memory = _anonymous(nbytes)
    else:
        memory = _anonymous(nbytes)
        if options.kind == "pinned":
            lost = ("pinned memory: there is no GPU at hand, the memory is pageable", "name a device")
    try:
        if lost is not None:
            memory.degrade(*lost, options.strict)
        if memory.kind == "anonymous":
            _join_pages(memory)
        if options.node is not None:
            _bind(memory, options.node, device, options.strict)
    except BaseException:
        memory.discard()
        raise
    return memory


def attach_memory(name: str, nbytes: int | None, any_user: bool) -> HostMapping:
    """Shared memory of another process."""
    try:
        return _shared(shm.attach_segment(name, nbytes, any_user=any_user))
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.EAGAIN):
            raise HostMemoryError(f"cannot map shared memory {name!r}: {error}") from error
        raise


def borrow_memory(address: int, nbytes: int, owner: object) -> HostMapping:
    """Memory of somebody else, of exactly this size."""
    address, nbytes = integer("address", address), integer("nbytes", nbytes)
    if nbytes <= 0 or not in_reach(address, nbytes):
        raise BoundsError(
            f"address is {address:#x} with nbytes {nbytes}, must be in [{FIRST:#x}, {TOP:#x}) with positive nbytes"
        )
    return HostMapping(address, nbytes, "borrowed", None, owner)
