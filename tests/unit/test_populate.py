"""Memory that is backed with pages ahead of its use, where the system refuses a part of it."""

from __future__ import annotations

import errno
import os
import threading

import pytest

import kvraw
from kvraw.runtime.host import backing, libc, populate
from kvraw.runtime.host.mapping import HostOptions
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.failing import failing_advice
from tests.helpers.leaks import nothing_left

MIB = 1 << 20
SIZE = 64 * MIB

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_memory_that_cannot_be_populated(monkeypatch: Patch, nth: int) -> None:
    monkeypatch.setattr(populate, "PIECE", SIZE // 4)
    monkeypatch.setattr(libc, "advise", failing_advice(libc.POPULATE_WRITE, errno.ENOMEM, nth))
    with nothing_left(SIZE), pytest.raises(kvraw.HostMemoryError, match=r"cannot populate 67108864 bytes.*injected"):
        kvraw.HostPool(SIZE, options=HostOptions(populate=True, threads=2))
    assert not [t for t in threading.enumerate() if t.name.startswith("kvraw-populate")]


# An old kernel, and what sandboxes say to a call that they do not let through.
NOT_OFFERED = [errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP]


@pytest.mark.parametrize("number", NOT_OFFERED)
@pytest.mark.parametrize("kind", ["anonymous", "shared"])
def test_pages_are_touched_where_they_cannot_be_asked_for(monkeypatch: Patch, kind: str, number: int) -> None:
    def refuse(address: int, nbytes: int, advice: int) -> None:
        raise OSError(number, "injected")

    monkeypatch.setattr(libc, "advise", refuse)
    with kvraw.HostPool(SIZE, options=HostOptions(kind=kind, populate=True)) as pool:  # type: ignore[arg-type]
        assert not pool.view(pool.address, SIZE).any()
        nodes = pool.info()["nodes"]
        assert nodes is None or sum(nodes.values()) == SIZE  # type: ignore[attr-defined]


@pytest.mark.parametrize("started", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
@pytest.mark.parametrize("grow", [False, True])
def test_where_threads_are_not_to_be_had(monkeypatch: Patch, started: int, error: type[Exception], grow: bool) -> None:
    """Those that start do the work, else this thread does."""
    real, left, populating = threading.Thread.start, [started], set()

    def start(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise error("injected")
        real(thread)

    def advise(address: int, nbytes: int, advice: int) -> None:
        if advice == libc.POPULATE_WRITE:
            populating.add(threading.current_thread())
        advise_really(address, nbytes, advice)

    advise_really = libc.advise
    monkeypatch.setattr(libc, "advise", advise)
    monkeypatch.setattr(threading.Thread, "start", start)
    options = HostOptions(populate=True, grow=grow, first_bytes=16 * MIB, step_bytes=16 * MIB, threads=4)
    with nothing_left(SIZE), kvraw.HostPool(SIZE, pin=False, options=options) as pool:
        pool.wait_ready(60)
        assert (pool.ready_bytes, pool.info()["growing"]) == (SIZE, False)
        assert (threading.main_thread() in populating) == (grow or not started)
        nodes = pool.info()["nodes"]
        assert nodes is None or sum(nodes.values()) >= SIZE  # type: ignore[attr-defined]


def test_a_helper_that_dies_is_noticed(monkeypatch: Patch) -> None:
    def short(*args: object) -> None:
        raise MemoryError("injected")

    monkeypatch.setattr(populate.Populator, "_take", short)
    with nothing_left(SIZE), pytest.raises(MemoryError, match="injected"):
        kvraw.HostPool(SIZE, options=HostOptions(populate=True, threads=2))


@pytest.mark.parametrize("kind", ["anonymous", "shared"])
def test_more_than_the_control_group_may_have(monkeypatch: Patch, fake: FakeDriver, kind: str) -> None:
    """An error before any page is touched; memory that is backed by use alone may be as large as it likes."""
    touched: list[int] = []
    monkeypatch.setattr(backing, "cgroup_limit", lambda: SIZE - 4096)
    for module, call in ((libc, "advise"), (os, "posix_fallocate"), (FakeDriver, "host_register")):
        monkeypatch.setattr(module, call, lambda *a: touched.append(1))
    message = rf"{SIZE} bytes of host memory.*control group's limit is {SIZE - 4096} bytes"
    for wanted in ({"device": 0}, {"options": {"populate": True}}, {"options": {"populate": True, "grow": True}}):
        options = HostOptions(kind=kind, **wanted.pop("options", {}))  # type: ignore[call-overload, arg-type]
        with nothing_left(SIZE), pytest.raises(kvraw.HostMemoryError, match=message):
            kvraw.HostPool(SIZE, options=options, **wanted)  # type: ignore[arg-type]
    if kind == "anonymous":
        assert all(n == 1 for n in touched)
        touched.clear()  # advice of huge pages
        with kvraw.HostPool(SIZE, pin=False) as pool:
            touched.clear()
            with pytest.raises(kvraw.HostMemoryError, match=message):
                pool.pin(0)
            assert not pool.pinned
    assert not touched
    monkeypatch.setattr(backing, "cgroup_limit", lambda: SIZE)
    backing.require_memory(SIZE)
    monkeypatch.setattr(backing, "cgroup_limit", lambda: None)
    backing.require_memory(SIZE)
    with pytest.raises(kvraw.HostMemoryError, match=r"the machine has \d+ bytes; ask for less$"):
        backing.require_memory(1 << 60)


def test_memory_in_use_is_not_touched(monkeypatch: Patch, fake: FakeDriver) -> None:
    monkeypatch.setattr(libc, "advise", failing_advice(libc.POPULATE_WRITE, errno.EPERM))
    with (
        kvraw.HostPool(MIB, pin=False, options=HostOptions(kind="shared")) as pool,
        kvraw.HostPool(MIB, pin=False) as private,
    ):
        for one in (pool, private):
            one.view(one.address, MIB)[:] = 6
        with kvraw.HostBuffer.attach(str(pool.name), device=0) as other:
            assert other.pinned
            private.pin(0)
            for one in (pool, private):
                assert (one.view(one.address, MIB) == 6).all()
