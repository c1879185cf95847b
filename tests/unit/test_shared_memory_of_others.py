"""Shared memory of dead owners, of forked children, and of other users: what is swept, and what is attached to."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvraw
from kvraw.runtime.host.mapping import HostOptions
from tests.helpers.segments import SHM, Child, folder, left_by, names

SIZE = 64 << 20
SHARED = HostOptions(kind="shared")

__all__ = ["folder"]


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


MULTIPROCESSING = """
import multiprocessing, os, sys
import kvraw
from kvraw.runtime.host import shm
from kvraw.runtime.host.mapping import HostOptions

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
    with pytest.raises(TypeError, match="name is 5, must be a str"):
        kvraw.HostBuffer.attach(5)  # type: ignore[arg-type]
    (SHM / "link").unlink()
    (SHM / "folder").rmdir()
    (SHM / "pipe").unlink()


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
