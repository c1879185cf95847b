"""Chunks on disk: found again by the next server, a miss where they are cut off or damaged, bounded in bytes."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.errors import BoundsError, KvrawError
from kvraw.multiprocess import CacheServer, ServerError, ServerTimeoutError
from kvraw.multiprocess import messages as m
from kvraw.multiprocess.disk import PAGE, DiskTier
from tests.helpers.serving import CHUNK, TOKENS, HostCache, Server, key, until, worker

IDS = [5, 1, 20, 9, 7, 8]


@pytest.fixture
def memory() -> Iterator[kvraw.HostPool]:
    with kvraw.HostPool(1 << 20, pin=False) as pool:
        yield pool


def name(at: int) -> bytes:
    return at.to_bytes(32, "big")


def put(tier: DiskTier, pool: kvraw.HostPool, at: int, nbytes: int = 5000) -> bool:
    """Write a chunk whose bytes follow from its number."""
    (chunk,) = pool.chunks(1, nbytes)
    view = pool.view(chunk.address, -(-nbytes // PAGE) * PAGE)
    view[:nbytes] = np.random.default_rng(at).integers(0, 256, nbytes, np.uint8)
    future = tier.write(name(at), memoryview(view), nbytes)
    if future is not None:
        future.result(10)
    chunk.free()
    return future is not None


def right(tier: DiskTier, pool: kvraw.HostPool, at: int, nbytes: int = 5000) -> bool:
    """Whether it can be read, and has its bytes."""
    (chunk,) = pool.chunks(1, nbytes)
    view = pool.view(chunk.address, -(-nbytes // PAGE) * PAGE)
    view[:] = 0
    found = tier.read(name(at), memoryview(view)).result(10)
    if found:
        assert (view[:nbytes] == np.random.default_rng(at).integers(0, 256, nbytes, np.uint8)).all()
    chunk.free()
    return found


def served(folder: Path, nbytes: int = 1 << 20) -> CacheServer:
    return CacheServer(nbytes, f"ipc://{folder}/s.sock", disk=folder / "disk", disk_bytes=1 << 20).start()


def test_what_was_written_is_found_again(tmp_path: Path, memory: kvraw.HostPool) -> None:
    tier = DiskTier(tmp_path / "new", 1 << 20, 64 << 10)
    assert all(put(tier, memory, at, 4096 * at + 7) for at in range(1, 8))
    assert not put(tier, memory, 3, 4096)  # it is there
    assert not put(tier, memory, 99, 64 << 10)  # more than a segment holds
    with pytest.raises(KvrawError, match="another server's that lives"):
        DiskTier(tmp_path / "new", 1 << 20, 64 << 10)
    tier.close()
    tier.close()
    again = DiskTier(tmp_path / "new", 1 << 20, 64 << 10)
    assert len(again) == 7
    assert again.holds(name(3), 4096 * 3 + 7)
    assert not again.holds(name(3), 4096)
    assert all(right(again, memory, at, 4096 * at + 7) for at in range(1, 8))
    assert put(again, memory, 50)
    again.close()


def test_the_oldest_goes_where_there_are_too_many(tmp_path: Path, memory: kvraw.HostPool) -> None:
    tier = DiskTier(tmp_path, 64 << 10, 24 << 10)  # two chunks a segment, two segments
    for at in range(9):
        assert put(tier, memory, at)
        assert tier.used <= 64 << 10
        assert sum(path.stat().st_size for path in tmp_path.glob("segment-*")) <= 64 << 10
    assert [at for at in range(9) if tier.holds(name(at), 5000)] == [4, 5, 6, 7, 8]
    assert all(right(tier, memory, at) for at in (4, 8))
    tier.close()
    smaller = DiskTier(tmp_path, 32 << 10, 24 << 10)
    assert smaller.used <= 32 << 10
    assert smaller.holds(name(8), 5000)
    smaller.close()
    with pytest.raises(BoundsError, match="nbytes is 100"):
        DiskTier(tmp_path, 100)


@pytest.mark.parametrize(
    "damage", ["cut in the chunk", "cut in a header", "a chunk", "a header", "nonsense", "empty", "a version"]
)
def test_damage_is_a_miss(tmp_path: Path, memory: kvraw.HostPool, damage: str) -> None:
    tier = DiskTier(tmp_path, 1 << 20, 256 << 10)
    for at in range(4):
        put(tier, memory, at)
    tier.close()
    (path,) = tmp_path.glob("segment-*")
    data, record = bytearray(path.read_bytes()), 3 * PAGE
    if damage == "cut in the chunk":
        del data[2 * record + PAGE + 100 :]
    elif damage == "cut in a header":
        del data[2 * record + 10 :]
    elif damage == "a chunk":
        data[2 * record + PAGE + 10] ^= 1
    elif damage == "a header":
        data[2 * record + 41] ^= 1
    elif damage == "nonsense":
        data[2 * record :] = np.random.default_rng(1).bytes(2 * record)
    elif damage == "a version":
        data[2 * record + 7] ^= 1
    else:
        data.clear()
    path.write_bytes(data)
    again = DiskTier(tmp_path, 1 << 20, 256 << 10)
    there = [at for at in range(4) if again.holds(name(at), 5000)]
    good = [at for at in there if right(again, memory, at)]
    assert good == ([] if damage == "empty" else [0, 1, 3] if damage == "a chunk" else [0, 1])
    assert there == ([0, 1, 2, 3] if damage == "a chunk" else good)
    assert put(again, memory, 9)
    assert right(again, memory, 9)
    again.close()
    last = DiskTier(tmp_path, 1 << 20, 256 << 10)  # nothing stands between what was there and what was added
    assert [at for at in (*range(4), 9) if last.holds(name(at), 5000)] == [*there, 9]
    last.close()


def test_a_server_reads_back_what_was_evicted(tmp_path: Path) -> None:
    one = HostCache(1)
    with (
        served(tmp_path, 32 << 10) as server,
        worker(one.cache, server.endpoint) as a,
        worker(one.cache, server.endpoint, use_messages=True) as b,
    ):
        for at in range(1, 8):
            assert a.store(key(at, 3), IDS).stored == 3
            until(lambda at=at: a.context.stats()["disk_written"] == 3 * at)  # type: ignore[misc]
        assert a.context.stats()["evicted"] >= 12
        assert a.context.lookup(key(1, 3)) == 3 * TOKENS
        for at, w in ((1, a), (2, b), (7, a)):
            for layer in one.layers:
                layer[:, IDS] = 0
            assert w.retrieve(key(at, 3), IDS) == 3 * TOKENS
            assert one.blocks(IDS) == HostCache(1).blocks(IDS)
        assert a.context.prefetch(key(3, 3)) == 3 * TOKENS
        a.context.client.request(m.Clear())
        assert a.context.stats()["locked"] == 3
        a.context.free_lookup_locks(key(3, 3))
        stats = a.context.stats()
        assert stats["disk_loaded"] >= 9
        assert stats["disk_damaged"] == stats["locked"] == stats["writing"] == 0


def test_damage_on_disk_is_a_miss_of_the_server(tmp_path: Path) -> None:
    one = HostCache(1)
    with served(tmp_path) as server, worker(one.cache, server.endpoint) as a:
        a.store(key(1, 3), IDS)
        until(lambda: a.context.stats()["disk_written"] == 3)
    (path,) = (tmp_path / "disk").glob("segment-*")
    data = bytearray(path.read_bytes())
    data[PAGE + 5] ^= 1
    path.write_bytes(data)
    with served(tmp_path) as server, worker(one.cache, server.endpoint) as a:
        assert a.context.lookup(key(1, 3)) == 3 * TOKENS
        assert a.retrieve(key(1, 3), IDS) == 0
        stats = a.context.stats()
        assert (stats["disk_damaged"], stats["object_bytes"]) == (1, stats["objects"] * CHUNK)
        assert a.store(key(1, 3), IDS).stored >= 1
        assert a.retrieve(key(1, 3), IDS) == 3 * TOKENS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_restart_keeps_what_was_stored(tmp_path: Path, number: int) -> None:
    one, disk = HostCache(1), ("--disk", str(tmp_path / "disk"), "--disk-mib", "8")
    with Server(tmp_path, *disk) as first, worker(one.cache, first.endpoint, timeout=0.3) as a:
        a.store(key(1, 3), IDS)
        until(lambda: a.context.stats()["disk_written"] == 3)
        first.end(number)
    with Server(tmp_path, *disk) as second, worker(one.cache, second.endpoint) as b:
        for layer in one.layers:
            layer[:] = 0
        assert b.retrieve(key(1, 3), IDS) == 3 * TOKENS
        assert one.blocks(IDS) == HostCache(1).blocks(IDS)
    kvraw.sweep_shared_memory()


def test_a_disk_that_is_full_costs_the_disk_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = HostCache(1)

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvraw.multiprocess.disk.os.pwritev", full)
    with served(tmp_path) as server, worker(one.cache, server.endpoint) as a:
        assert a.store(key(1, 3), IDS).stored == 3
        until(lambda: a.context.stats()["disk_skipped"] == 3)
        assert a.retrieve(key(1, 3), IDS) == 3 * TOKENS
        assert a.context.stats()["locked"] == 0


def test_segments_of_another_version_are_the_first_to_go(tmp_path: Path, memory: kvraw.HostPool) -> None:
    tier = DiskTier(tmp_path, 96 << 10, 24 << 10)
    for at in range(4):
        put(tier, memory, at)
    tier.close()
    old, new = sorted(tmp_path.glob("segment-*"))
    data = bytearray(old.read_bytes())
    data[7] = ord("9")
    old.write_bytes(data)
    (tmp_path / "segment-000000007.kvraw").mkdir()
    (tmp_path / "segment-x.kvraw").write_text("not ours")
    os.mkfifo(tmp_path / "segment-000000008.kvraw")
    again = DiskTier(tmp_path, 96 << 10, 24 << 10)
    assert [at for at in range(4) if again.holds(name(at), 5000)] == [2, 3]
    assert again.used == 48 << 10
    for at in range(10, 14):
        assert put(again, memory, at)
    assert old.exists()
    put(again, memory, 14)
    assert not old.exists()
    assert new.exists()
    assert (tmp_path / "segment-000000009.kvraw").exists()  # no number that something else has
    assert all(right(again, memory, at) for at in (2, 3, 14))
    again.close()


def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for bad in ("file", "file/below"):
        with pytest.raises(KvrawError, match="disk folder"):
            DiskTier(tmp_path / bad, 1 << 20)
    monkeypatch.setattr("kvraw.multiprocess.disk.os.access", lambda *_: False)  # root may write everywhere
    with pytest.raises(KvrawError, match="cannot be written"):
        served(tmp_path)


class FullDisk:
    """Takes so many bytes, then says that it is full; of what goes beyond, a page is written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
        self.left, self._write = left, os.pwritev
        monkeypatch.setattr("kvraw.multiprocess.disk.os.pwritev", self)

    def __call__(self, file: int, parts: list[memoryview], offset: int) -> int:
        if len(parts[0]) > self.left:
            self._write(file, [parts[0][:PAGE]], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left -= len(parts[0])
        return self._write(file, parts, offset)


@pytest.mark.parametrize("pages", [2, 6, 8])  # full in the first record, between two, in the chunk or in the header
def test_a_full_disk_keeps_what_it_has_and_is_tried_again(
    tmp_path: Path, memory: kvraw.HostPool, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    tier = DiskTier(tmp_path, 1 << 20, 64 << 10)
    tier.pause, disk = 0.05, FullDisk(monkeypatch, pages * PAGE)
    fit = pages // 3
    for at in range(6):
        if at < fit:
            put(tier, memory, at)
        else:
            with pytest.raises(OSError, match=r"No space left|a moment ago"):
                put(tier, memory, at)
    assert tier.used == sum(path.stat().st_size for path in tmp_path.glob("segment-*")) == fit * 3 * PAGE
    assert all(right(tier, memory, at) for at in range(fit))
    disk.left = 1 << 20
    time.sleep(0.06)
    for at in range(fit, 6):
        assert put(tier, memory, at)
    tier.close()
    again = DiskTier(tmp_path, 1 << 20, 64 << 10)
    assert all(right(again, memory, at) for at in range(6))
    again.close()


def test_a_folder_that_goes_costs_the_disk_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, opened = HostCache(1), os.open

    def refuse(path: object, *rest: int, **more: Any) -> int:
        if "segment-" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("kvraw.multiprocess.disk.os.open", refuse)
    with served(tmp_path) as server, worker(one.cache, server.endpoint) as a:
        assert a.store(key(1, 3), IDS).stored == 3
        until(lambda: a.context.stats()["disk_skipped"] == 3)
        assert a.retrieve(key(1, 3), IDS) == 3 * TOKENS
        assert a.context.stats()["errors"] == 0


def test_a_file_system_without_direct_access(
    tmp_path: Path, memory: kvraw.HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def without(path: object, flags: int, *rest: int, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("kvraw.multiprocess.disk.os.open", without)
    tier = DiskTier(tmp_path, 1 << 20)
    put(tier, memory, 1)
    assert right(tier, memory, 1)
    tier.close()


def test_reads_beside_writes_and_evictions(tmp_path: Path, memory: kvraw.HostPool) -> None:
    tier = DiskTier(tmp_path, 128 << 10, 24 << 10)
    wrong: list[BaseException] = []
    at, ended = 0, threading.Event()

    def read(seed: int) -> None:
        with kvraw.HostPool(64 << 10, pin=False) as pool:
            r = np.random.default_rng(seed)
            try:
                while not ended.is_set():
                    asked = max(at - int(r.integers(0, 14)), 0)
                    right(tier, pool, asked)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for one in threads:
        one.start()
    for at in range(150):
        put(tier, memory, at)
    ended.set()
    for one in threads:
        one.join(10)
    assert not wrong
    assert tier.used <= 128 << 10
    tier.close()


def test_what_a_slow_disk_cannot_take_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, write, gate = HostCache(1), os.pwritev, threading.Event()

    def slow(*args: object) -> int:
        gate.wait(1)
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("kvraw.multiprocess.disk.os.pwritev", slow)
    with served(tmp_path, 64 << 10) as server, worker(one.cache, server.endpoint) as a:
        for at in range(1, 7):
            assert a.store(key(at, 3), IDS).stored == 3
        stats = a.context.stats()
        assert stats["locked"] == 4  # a quarter of the pool
        assert (stats["disk_written"], stats["disk_skipped"]) == (0, 0)
        assert stats["disk_waiting"] == 18
        gate.set()
        until(lambda: a.context.stats()["disk_waiting"] == 0)
        stats = a.context.stats()
        assert stats["disk_written"] + stats["disk_skipped"] == 18
        assert stats["disk_written"] >= 18 - stats["evicted"]


def test_the_end_writes_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, write = HostCache(1), os.pwritev

    def slow(*args: object) -> int:
        time.sleep(0.005)
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("kvraw.multiprocess.disk.os.pwritev", slow)
    with served(tmp_path, 64 << 10) as server, worker(one.cache, server.endpoint) as a:
        for at in range(1, 6):
            a.store(key(at, 3), IDS)
    with served(tmp_path, 64 << 10) as server, worker(one.cache, server.endpoint) as a:
        assert [a.context.lookup(key(at, 3)) for at in range(1, 6)] == [3 * TOKENS] * 5


def test_a_server_that_is_killed_amid_stores(tmp_path: Path) -> None:
    disk, prompts = ("--disk", str(tmp_path / "disk"), "--disk-mib", "64"), [HostCache(at) for at in range(20)]
    cache, written, at = HostCache(0), 0.0, 0
    with Server(tmp_path, *disk, mib=1) as first:
        end = threading.Timer(0.15, first.process.kill)
        with (
            contextlib.suppress(ServerError, ServerTimeoutError),
            worker(cache.cache, first.endpoint, timeout=0.3) as a,
        ):
            end.start()
            for at in range(1, 3000):
                for layer, source in zip(cache.layers, prompts[at % 20].layers, strict=True):
                    layer[:] = source
                a.store(key(at, 3), IDS)
                written = a.context.stats()["disk_written"]
        end.join()
        first.process.communicate(timeout=10)
    found = 0
    with Server(tmp_path, *disk, mib=1) as second, worker(cache.cache, second.endpoint) as b:
        for one in range(1, at + 1):
            for layer in cache.layers:
                layer[:] = 0
            if b.retrieve(key(one, 3), IDS):
                assert cache.blocks(IDS) == prompts[one % 20].blocks(IDS)
            found += b.context.lookup(key(one, 3)) // TOKENS
        assert b.context.stats()["disk_damaged"] == 0
        assert found >= written > 0  # what was said to be on disk is
        second.end(signal.SIGTERM)
    kvraw.sweep_shared_memory()
