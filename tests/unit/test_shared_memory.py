"""Shared memory: who creates, attaches, unlinks and sweeps; processes that are killed; a full /dev/shm."""

from __future__ import annotations

import errno
import os
import signal
import stat

import pytest

import kvraw
from kvraw.runtime.host import libc, shm
from kvraw.runtime.host.mapping import HostOptions
from tests.helpers.leaks import nothing_left
from tests.helpers.segments import SHM, Child, folder, names

SIZE = 64 << 20
SHARED = HostOptions(kind="shared")

__all__ = ["folder"]


def test_a_segment_of_ones_own() -> None:
    with nothing_left(SIZE):
        pool = kvraw.HostPool(SIZE, options=SHARED)
        assert pool.name is not None
        path = SHM / pool.name
        status = path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == SIZE
        assert status.st_blocks * 512 >= SIZE  # set aside, not just promised
        with kvraw.HostBuffer.attach(pool.name) as other, kvraw.HostBuffer.attach(pool.name, 4096) as part:
            (chunk,) = pool.chunks(1, SIZE)
            chunk.numpy()[:] = 9
            assert (other.view(other.address, SIZE) == 9).all()
            assert part.nbytes == 4096
            view = other.view(other.address + 5, 10)
        assert path.exists()
        assert (view == 9).all()
        pool.close()
        assert not path.exists()
        del chunk, view


def test_a_name_is_taken_once() -> None:
    name = f"kvraw-test-{os.getpid()}"
    options = HostOptions(kind="shared", name=name)
    with nothing_left(SIZE):
        with kvraw.HostPool(SIZE, options=options) as pool:
            assert pool.name == name
            with pytest.raises(FileExistsError, match="exists"):
                kvraw.HostPool(SIZE, options=options)
            assert kvraw.sweep_shared_memory() == []  # its owner lives
        with kvraw.HostPool(SIZE, options=HostOptions(kind="shared", name="/" + name)) as pool:
            assert pool.name == name
    for bad in ("", "/", "a/b", "..", "x" * 256, "a\0", "\ud800"):
        with pytest.raises(kvraw.BoundsError, match="name is"):
            kvraw.HostPool(SIZE, options=HostOptions(kind="shared", name=bad))


def test_a_name_that_somebody_took_over_is_left_alone() -> None:
    pool = kvraw.HostPool(SIZE, options=SHARED)
    path = SHM / str(pool.name)
    path.unlink()
    path.write_bytes(b"another's")
    pool.close()
    assert path.read_bytes() == b"another's"
    path.unlink()


def test_attach_what_is_not_there_or_too_small() -> None:
    with pytest.raises(FileNotFoundError):
        kvraw.HostBuffer.attach("kvraw-nothing-of-that-name")
    with kvraw.HostPool(SIZE, options=SHARED) as pool:
        for nbytes in (0, -1, SIZE + 1):
            with pytest.raises(kvraw.BoundsError, match=rf"nbytes is {nbytes}, must be in \[1, {SIZE}\]"):
                kvraw.HostBuffer.attach(str(pool.name), nbytes)
        with pytest.raises(TypeError, match=r"nbytes is 1\.5, must be an integer"):
            kvraw.HostBuffer.attach(str(pool.name), 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", ["ftruncate", "posix_fallocate", "fchmod"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_a_full_file_system(monkeypatch: pytest.MonkeyPatch, step: str, number: int) -> None:
    def full(*args: object) -> None:
        raise OSError(number, "injected")

    with nothing_left(SIZE), monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        files = len(os.listdir("/proc/self/fd"))
        with pytest.raises(kvraw.HostMemoryError, match=rf"{SIZE} bytes.*injected"):
            kvraw.HostPool(SIZE, options=SHARED)
        assert len(os.listdir("/proc/self/fd")) == files


def test_too_little_room_is_seen_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "shared_memory_room", lambda: SIZE - 1)
    with nothing_left(SIZE), pytest.raises(kvraw.HostMemoryError, match=rf"{SIZE - 1} bytes are free.*--shm-size"):
        kvraw.HostPool(SIZE, options=SHARED)
    with pytest.raises(kvraw.HostMemoryError, match="cannot hold"):
        kvraw.HostPool(1 << 50, options=SHARED)


def test_a_segment_that_cannot_be_mapped_or_populated(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*args: object) -> int:
        raise OSError(errno.ENOMEM, "injected")

    for step in ("map_file", "advise"):
        with nothing_left(SIZE), monkeypatch.context() as patch:
            patch.setattr(libc, step, no)
            with pytest.raises(kvraw.HostMemoryError, match="injected"):
                kvraw.HostPool(SIZE, options=HostOptions(kind="shared", populate=True))
    with kvraw.HostPool(SIZE, options=SHARED) as pool, monkeypatch.context() as patch:
        patch.setattr(libc, "map_file", no)
        with pytest.raises(kvraw.HostMemoryError, match="injected"):
            kvraw.HostBuffer.attach(str(pool.name))


def test_an_owner_is_killed_and_who_attached_goes_on() -> None:
    with nothing_left(SIZE):
        owner = Child("pool = own(); pool.chunks(1, 4096)[0].numpy()[:] = 8; say(pool.name); sys.stdin.read()")
        name = owner.line()
        reader = Child(
            "b = kvraw.HostBuffer.attach(sys.argv[1]); v = b.view(b.address, b.nbytes); say('attached')\n"
            "sys.stdin.readline(); v[-1] = 1; assert (v[:4096] == 8).all(); say(str(int(v[-1])))\n"
            "b.close(); sys.stdin.readline()",
            name,
        )
        assert reader.line() == "attached"
        assert kvraw.sweep_shared_memory() == []  # both live
        code, _ = owner.end(signal.SIGKILL)
        assert code == -signal.SIGKILL
        assert (SHM / name).exists()
        with kvraw.HostPool(4096, options=SHARED):  # the next owner sweeps
            assert not (SHM / name).exists()
        reader.tell()
        assert reader.line() == "1"
        reader.tell()
        assert reader.end() == (0, "")


def test_the_name_of_a_killed_owner_can_be_had_again() -> None:
    name = f"kvraw-again-{os.getpid()}"
    for _ in range(2):
        owner = Child("pool = own(sys.argv[1]); say(pool.name); sys.stdin.read()", name)
        assert owner.line() == name
        owner.end(signal.SIGKILL)
    with kvraw.HostPool(SIZE, options=HostOptions(kind="shared", name=name)) as pool:
        assert not pool.view(pool.address, SIZE).any()
    assert not (SHM / name).exists()


def test_who_only_attached_never_unlinks() -> None:
    attach = "b = kvraw.HostBuffer.attach(sys.argv[1])\n"
    with kvraw.HostPool(SIZE, options=SHARED) as pool:
        for end in ("b.close()", "", "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", "sys.exit(3)"):
            child = Child(attach + end, str(pool.name))
            code, _ = child.end()
            assert code == {"sys.exit(3)": 3}.get(end, -signal.SIGTERM if "SIGTERM" in end else 0)
            assert (SHM / str(pool.name)).exists()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pool = own(); say(pool.name)", 0),
        ("pool = own(); say(pool.name); raise SystemExit(4)", 4),
        ("t = threading.Thread(target=lambda: say(own().name)); t.start(); t.join(); sys.exit(4)", 4),
        ("pool = own('mine'); say(pool.name)", 0),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); pool = own(); say(pool.name); time.sleep(60)", 5),
        ("pool = own(); signal.signal(signal.SIGTERM, lambda *_: sys.exit(6)); say(pool.name); time.sleep(60)", 6),
    ],
    ids=["exit", "exit code", "made in a thread", "a name of one's own", "a handler before", "a handler after"],
)
def test_an_owner_unlinks_however_it_ends(code: str, expected: int) -> None:
    child = Child(code)
    name = child.line()
    assert name in (names() if "sleep" in code else ["mine", name])
    ended, errors = child.end(signal.SIGTERM if "sleep" in code else None)
    assert (ended, errors) == (expected, "")
    assert not names()


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler])
def test_no_signal_handler_is_touched(before: signal.Handlers) -> None:
    old = signal.signal(signal.SIGTERM, before)
    try:
        with kvraw.HostPool(4096, options=SHARED):
            assert signal.getsignal(signal.SIGTERM) == before
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, old)


@pytest.mark.parametrize("step", ["ftruncate", "posix_fallocate", "link"])
def test_nobody_can_attach_before_a_segment_is_whole(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    real, tried = getattr(os, step), []

    def attach(*args: object) -> None:
        with pytest.raises(FileNotFoundError):
            kvraw.HostBuffer.attach("mine")
        tried.append(step)
        real(*args)

    monkeypatch.setattr(os, step, attach)
    with kvraw.HostPool(SIZE, options=HostOptions(kind="shared", name="mine")):
        assert tried == [step]
        assert kvraw.HostBuffer.attach("mine").nbytes == SIZE


def test_two_that_want_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has it only once this one has looked whether it is free."""
    options = HostOptions(kind="shared", name="mine")
    real, others = os.posix_fallocate, []

    def late(file: int, offset: int, nbytes: int) -> None:
        if not others:
            others.append(None)
            others[0] = kvraw.HostPool(4096, options=options)  # type: ignore[call-overload]
        real(file, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", late)
    with nothing_left(SIZE):
        with pytest.raises(FileExistsError, match="'mine' exists"):
            kvraw.HostPool(SIZE, options=options)
        assert len(names()) == 2
        others[0].close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("step", ["open", "link"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_file_system_that_takes_no_file(monkeypatch: pytest.MonkeyPatch, step: str, number: int) -> None:
    real = getattr(os, step)

    def refuse(path: str, *args: int) -> int:
        if step == "link" or args[0] & os.O_CREAT:
            raise OSError(number, os.strerror(number), path)
        return int(real(path, *args))

    with nothing_left(SIZE), monkeypatch.context() as patch:
        patch.setattr(os, step, refuse)
        with pytest.raises(kvraw.HostMemoryError, match=rf"{SIZE} bytes of shared memory.*{os.strerror(number)}"):
            kvraw.HostPool(SIZE, options=HostOptions(kind="shared", name="mine"))
    assert not names()
    monkeypatch.setattr(shm, "FOLDER", "/nowhere")
    with pytest.raises(kvraw.HostMemoryError, match="/nowhere is not there"):
        kvraw.HostPool(SIZE, options=SHARED)
