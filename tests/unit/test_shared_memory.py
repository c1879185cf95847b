"""Shared memory: who creates, attaches, unlinks and sweeps; processes that are killed; a full /dev/shm.

All of it lies in a folder of its own: another run of these tests sweeps too.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvraw
from kvraw.runtime import libc, shm
from kvraw.runtime.host_map import HostOptions
from tests.helpers.leaks import nothing_left

SIZE = 64 << 20
SHM = Path(f"/dev/shm/kvraw-tests-{os.getpid()}-{secrets.token_hex(4)}")
SHARED = HostOptions(kind="shared")

START = f"""
import os, signal, sys, threading, time
import kvraw
from kvraw.runtime import shm
from kvraw.runtime.host_map import HostOptions
shm.FOLDER = {str(SHM)!r}
"""
START += """
def own(name=None, nbytes=1 << 20):
    return kvraw.HostPool(nbytes, options=HostOptions(kind="shared", name=name))
def say(text):
    print(text, flush=True)
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    SHM.mkdir()
    monkeypatch.setattr(shm, "FOLDER", str(SHM))
    yield
    left = sorted(path.name for path in SHM.iterdir())
    shutil.rmtree(SHM)
    assert not left


def names() -> list[str]:
    return sorted(os.listdir(SHM))


class Child:
    """A Python process that runs code and talks by lines."""

    def __init__(self, code: str, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", START + code, *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Its exit code and what it complained about."""
        if number is not None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


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


@pytest.mark.parametrize(
    "code",
    [
        "pool = own(); say(pool.name); time.sleep(60)",
        "kept = []; t = threading.Thread(target=lambda: kept.append(own())); t.start(); t.join()\n"
        "say('made'); time.sleep(60)",
        # a main thread that never comes back to Python is ended as well
        "import ctypes; pool = own('mine'); c = ctypes.CDLL(None); m = ctypes.create_string_buffer(64)\n"
        "c.pthread_mutex_init(m, None); c.pthread_mutex_lock(m); say('made'); c.pthread_mutex_lock(m)",
    ],
    ids=["asleep", "made in a thread", "in C"],
)
def test_sigterm_ends_an_owner_at_once_and_the_next_sweeps(code: str) -> None:
    child = Child(code)
    assert child.line()
    begin = time.monotonic()
    assert child.end(signal.SIGTERM) == (-signal.SIGTERM, "")
    assert time.monotonic() - begin < 10
    assert names()
    with kvraw.HostPool(4096, options=SHARED) as pool:
        assert names() == [pool.name]


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler])
def test_no_signal_handler_is_touched(before: signal.Handlers) -> None:
    old = signal.signal(signal.SIGTERM, before)
    try:
        with kvraw.HostPool(4096, options=SHARED):
            assert signal.getsignal(signal.SIGTERM) == before
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, old)


MULTIPROCESSING = """
import multiprocessing, os, sys
import kvraw
from kvraw.runtime import shm
from kvraw.runtime.host_map import HostOptions

def work(folder, how, name, names):
    global pool
    shm.FOLDER = folder
    pool = kvraw.HostPool(1 << 20, options=HostOptions(kind="shared", name=name))
    if name == "of-a-child":
        child = multiprocessing.get_context(how).Process(target=work, args=(folder, how, "of-its-child", names))
        child.start()
        child.join()
        names.put(sorted(os.listdir(folder)))

if __name__ == "__main__":
    shm.FOLDER, how = sys.argv[1:]
    parents = kvraw.HostPool(1 << 20, options=HostOptions(kind="shared", name="of-the-parent"))
    context = multiprocessing.get_context(how)
    names = context.SimpleQueue()
    child = context.Process(target=work, args=(shm.FOLDER, how, "of-a-child", names))
    child.start()
    assert [name for name in names.get() if not name.startswith("kvraw-")] == ["of-a-child", "of-the-parent"]
    child.join()
    left = os.listdir(shm.FOLDER)
    assert child.exitcode == 0
    assert len(left) == 2 and "of-the-parent" in left, left
"""


@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn"])
def test_an_owner_that_multiprocessing_started_unlinks(tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(MULTIPROCESSING)
    command = [sys.executable, str(script), str(SHM), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert not names()


def test_a_forked_child_is_no_owner() -> None:
    child = Child(
        "import warnings; warnings.simplefilter('ignore')\n"
        "pool = own(); say(pool.name); pid = os.fork()\n"
        "if pid == 0:\n    pool.close(); sys.exit(0)\n"
        "os.waitpid(pid, 0); say(str(os.path.exists(shm.FOLDER + '/' + pool.name)))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    say(str(os.getpid())); time.sleep(60)\n"
        "sys.stdin.read()"
    )
    name = child.line()
    assert child.line() == "True"
    orphan = int(child.line())
    child.process.kill()
    child.process.wait(60)
    try:
        assert kvraw.sweep_shared_memory() == [name]  # also while a child of the owner lives on
    finally:
        os.kill(orphan, signal.SIGKILL)
    child.end()


def test_a_sweep_between_creation_and_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    real, swept = fcntl.flock, []

    def flock(file: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not swept:
            swept.append(None)
            swept.extend(kvraw.sweep_shared_memory())
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with kvraw.HostPool(SIZE, options=SHARED) as pool:
        assert len(swept) == 2
        assert names() == [pool.name]
        assert np.array_equal(pool.view(pool.address, 3), [0, 0, 0])
        assert (SHM / str(pool.name)).exists()


def left_by(*chosen: str) -> None:
    """What an owner that is killed leaves: segments of these names, or one without."""
    owner = Child(
        "kept = [own(*a) for a in (zip(sys.argv[1:]) if sys.argv[1:] else [()])]; say('made'); input()", *chosen
    )
    assert owner.line() == "made"
    assert set(chosen) <= set(names())
    owner.end(signal.SIGKILL)


def test_sweep_takes_segments_of_dead_owners_by_every_name() -> None:
    left_by()
    left_by("mine")
    left_by("kvraw-mine")
    with kvraw.HostPool(4096, options=HostOptions(kind="shared", name="living")):
        pass  # its creation swept
    assert not names()
    left_by("mine", "other", "another")
    assert kvraw.sweep_shared_memory("no") == []
    assert kvraw.sweep_shared_memory("oth") == ["other"]
    assert sorted(kvraw.sweep_shared_memory()) == ["another", "mine"]
    assert not names()


def test_sweep_leaves_what_kvraw_did_not_create(tmp_path: Path) -> None:
    own = f"kvraw-{os.getpid()}-{'0' * 12}"
    link, plain, open_to_all = SHM / own, SHM / "kvraw-mine", SHM / own.replace("0" * 12, "1" * 12)
    fifo = SHM / own.replace("0" * 12, "2" * 12)
    (tmp_path / "mine").touch(0o600)
    link.symlink_to(tmp_path / "mine")
    plain.touch(0o600)
    open_to_all.write_bytes(b"x")
    open_to_all.chmod(0o666)
    os.mkfifo(fifo, 0o600)
    with kvraw.HostPool(4096, options=HostOptions(kind="shared", name="living")):
        there = names()
        for prefix in ("", "kvraw-", "living"):
            assert kvraw.sweep_shared_memory(prefix) == []
        assert names() == there
    for path in (link, plain, open_to_all, fifo):
        path.unlink()


def test_a_name_that_was_made_anew_is_no_name_of_the_dead_ones() -> None:
    left_by("mine")
    (SHM / "mine").unlink()
    (SHM / "mine").write_bytes(b"another's")
    (own,) = set(names()) - {"mine"}
    assert kvraw.sweep_shared_memory() == [own]
    assert (SHM / "mine").read_bytes() == b"another's"
    (SHM / "mine").unlink()


def test_names_are_literals_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    name = "x\nCRITICAL kvraw: forged \x1b[2J\udcff"
    left_by(name)
    with caplog.at_level(logging.INFO, "kvraw"):
        assert kvraw.sweep_shared_memory() == [name]
    (text,) = caplog.messages
    assert text.isprintable()
    assert repr(name) in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_sweep_leaves_what_is_of_other_users() -> None:
    path = SHM / f"kvraw-{os.getpid()}-{'0' * 12}"
    path.touch(0o600)
    os.chown(path, 1001, 1001)
    assert kvraw.sweep_shared_memory() == []
    path.unlink()


@pytest.mark.parametrize("user", [0, 1001, 1002])
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666])
def test_attach_takes_what_no_other_user_can_truncate(monkeypatch: pytest.MonkeyPatch, user: int, mode: int) -> None:
    path = SHM / "wanted"
    path.write_bytes(bytes(4096))
    path.chmod(mode)
    real = os.fstat

    def fstat(file: int) -> os.stat_result:
        status = list(real(file))
        status[stat.ST_UID] = user
        return os.stat_result(status)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        patch.setattr(os, "geteuid", lambda: 1001)
        if user == 1002 or mode == 0o666:
            why = "is user 1002's, must be of user 1001 or of root" if user == 1002 else "has mode 0o666, must not be"
            with pytest.raises(PermissionError, match=rf"shared memory 'wanted' {why}.*any_user=True"):
                kvraw.HostBuffer.attach("wanted")
        else:
            kvraw.HostBuffer.attach("wanted").close()
        kvraw.HostBuffer.attach("wanted", any_user=True).close()
    path.unlink()


def test_attach_takes_regular_files_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    (SHM / "link").symlink_to(tmp_path / "file")
    (SHM / "folder").mkdir()
    os.mkfifo(SHM / "pipe")
    for name, kind in (("link", "a symbolic link"), ("folder", "a directory"), ("pipe", "a FIFO")):
        for any_user in (False, True):
            with pytest.raises(kvraw.HostMemoryError, match=f"'{name}' is {kind}, must be a regular file"):
                kvraw.HostBuffer.attach(name, any_user=any_user)
    with pytest.raises(TypeError, match="name is 5, must be a string"):
        kvraw.HostBuffer.attach(5)  # type: ignore[arg-type]
    (SHM / "link").unlink()
    (SHM / "folder").rmdir()
    (SHM / "pipe").unlink()


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


@pytest.mark.parametrize("step", ["open", "posix_fallocate"])
def test_a_fork_while_a_segment_is_made_leaves_no_lock_in_the_child(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """In both places where the creator lets others run: just behind the opening, and while room is set aside."""
    real, inside, go, made = getattr(os, step), threading.Event(), threading.Event(), []

    def held(*args: int, **options: object) -> int | None:
        found: int | None = real(*args, **options)
        if step != "open" or args[1] & os.O_CREAT:
            inside.set()
            go.wait(0.2 if step == "open" else 60)  # the opening, and what follows it, holds a fork up
        return found

    monkeypatch.setattr(os, step, held)
    thread = threading.Thread(target=lambda: made.append(kvraw.HostPool(SIZE, options=SHARED)))
    thread.start()
    assert inside.wait(60)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        at = "/proc/self/fd"
        files = [os.path.realpath(f"{at}/{file}") for file in os.listdir(at)]
        os.write(write, b"x" if any(str(SHM) in file for file in files) else b".")
        os._exit(0)
    go.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 1) == b"."
    os.close(read)
    os.close(write)
    made[0].close()
