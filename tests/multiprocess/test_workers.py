"""Workers and a server in one process: store and retrieve by shared memory and by message, at once and behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.errors import BoundsError, ClosedError, LayoutError, PlacementError, TransferTimeoutError
from kvraw.multiprocess import (
    CacheClient,
    CacheServer,
    EngineWorker,
    Limits,
    MessageContext,
    ServerError,
    ServerTimeoutError,
    SharedMemoryContext,
    compute_kv_layout,
    contexts,
    create_engine_driven_context,
    gather_paged_kv_to_cpu,
    scatter_cpu_to_paged_kv,
)
from kvraw.multiprocess import messages as m
from kvraw.runtime.host import registration, shm
from tests.helpers.cli import python
from tests.helpers.leaks import segments
from tests.helpers.serving import BLOCK, CHUNK, METADATA, TOKENS, HostCache, key, until, worker
from tests.helpers.world import World

PER = TOKENS // BLOCK
IDS = [5, 1, 20, 9, 7, 8]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    before = segments()
    with CacheServer(1 << 20, f"ipc://{tmp_path}/s.sock", limits=Limits(drain=2.0)).start() as made:
        yield made
    assert segments() == before
    assert [path.name for path in tmp_path.iterdir()] == ["s.sock.lock"]
    assert not contexts._attached


def client_of(server: CacheServer, **options: Any) -> CacheClient:
    return CacheClient(server.endpoint, **options)


@pytest.mark.parametrize("by", ["memory to memory", "memory to message", "message to memory", "message to message"])
def test_what_one_stores_the_other_loads(server: CacheServer, by: str) -> None:
    one, other = HostCache(1), HostCache(2)
    messages = [word == "message" for word in by.split(" to ")]
    with (
        worker(one.cache, server.endpoint, use_messages=messages[0]) as a,
        worker(other.cache, server.endpoint, use_messages=messages[1]) as b,
    ):
        kinds = {False: SharedMemoryContext, True: MessageContext}
        assert [type(a.context), type(b.context)] == [kinds[one] for one in messages]
        assert b.retrieve(key(1, 3), [0, 1, 2, 3, 4, 5]) == 0
        assert a.store(key(1, 2), IDS[:4]) == (2, 0, 0)
        assert a.store(key(1, 3), IDS) == (1, 2, 0)
        assert (b.context.lookup(key(1, 5)), b.context.lookup(key(2, 5))) == (3 * TOKENS, 0)
        before = other.blocks([0, 1])
        assert b.retrieve(key(1, 3), [0, 1, 2, 3, 4, 6], skip_first_n_tokens=2 * BLOCK + 1) == 3 * TOKENS
        assert other.blocks([2, 3, 4, 6]) == one.blocks(IDS[2:])
        assert other.blocks([0, 1]) == before
        assert b.retrieve(key(1, 3, start=1), [10, 11, 12, 13]) == 2 * TOKENS
        assert other.blocks([10, 11, 12, 13]) == one.blocks(IDS[2:])
        assert (a.store(key(1, 0), []), b.retrieve(key(1, 0), [])) == ((0, 0, 0), 0)
        stats = a.context.stats()
        assert (stats["objects"], stats["tickets"], stats["locked"], stats["clients"]) == (3, 0, 0, 2)
    assert server.service.stats()["clients"] == 0


def test_many_chunks_by_message_go_in_several_messages(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "_BATCH", 2 * CHUNK)
    one = HostCache(1)
    with worker(one.cache, server.endpoint, use_messages=True) as a:
        ids = list(range(22))
        assert a.store(key(1, 11), ids).stored == 11
        before = one.blocks(ids)
        for layer in one.layers:
            layer[:] = 0
        assert a.retrieve(key(1, 11), ids) == 11 * TOKENS
        assert one.blocks(ids) == before
    assert server.service.requests["put", "ok"] == server.service.requests["get", "ok"] == 6


@pytest.mark.parametrize("use_messages", [False, True])
def test_on_a_gpu(server: CacheServer, device: int, use_messages: bool) -> None:
    w = World(device)
    try:
        before, count = w.now(), len(registration._book(kvraw.runtime.driver.driver()).entries)
        with (
            worker(w.cache, server.endpoint, use_messages=use_messages) as a,
            EngineWorker.connect(w.cache, server.endpoint, chunk_tokens=TOKENS) as b,
        ):
            entries = len(registration._book(kvraw.runtime.driver.driver()).entries)
            assert entries - count == 1  # the pool, once for both of them
            assert a.store(key(1, 2), [5, 1, 30, 9], stream=w.stream).stored == 2
            future = a.submit_store(key(2, 1), [7, 8], stream=w.stream)
            a.flush_inflight_stores(10)
            assert future.result(0).stored == 1
            assert b.submit_retrieve(key(1, 2), [0, 2, 3, 4], stream=w.stream).result(10) == 2 * TOKENS
            assert a.retrieve(key(2, 1), [10, 11], skip_first_n_tokens=BLOCK, stream=w.stream) == TOKENS
            w.stream.synchronize()  # what follows on it waits for the loads
        after = before.copy()
        after[:, :, [0, 2, 3, 4]] = before[:, :, [5, 1, 30, 9]]
        after[:, :, 11] = before[:, :, 8]
        assert (w.now() == after).all()
    finally:
        w.close()


def test_in_the_background(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    one, gate = HostCache(1), threading.Event()
    a = worker(one.cache, server.endpoint)
    real = a.context.prepare_store
    monkeypatch.setattr(a.context, "prepare_store", lambda key: gate.wait(10) and real(key))
    futures = [a.submit_store(key(at, 2), IDS[:4]) for at in (1, 2)]
    with pytest.raises(TransferTimeoutError, match="2 stores are under way"):
        a.flush_inflight_stores(0.05)
    with pytest.raises(TransferTimeoutError, match="2 transfers are under way"):
        a.close(0.05)
    with pytest.raises(ClosedError):
        a.submit_store(key(3, 1), IDS[:2])
    with pytest.raises(ClosedError):
        a.retrieve(key(3, 1), IDS[:2])
    gate.set()
    a.close()
    a.close()
    assert [one.result(0).stored for one in futures] == [2, 2]
    assert server.service.stats()["stored"] == 4


def test_close_waits_for_other_threads(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    one, gate, results = HostCache(1), threading.Event(), []
    a = worker(one.cache, server.endpoint)
    real = a.context.commit_store
    monkeypatch.setattr(a.context, "commit_store", lambda slots: gate.wait(10) and real(slots))
    thread = threading.Thread(target=lambda: results.append(a.store(key(1, 1), IDS[:2])))
    thread.start()
    until(lambda: server.service.stats()["writing"] == 1)
    with pytest.raises(TransferTimeoutError):
        a.close(0.05)
    gate.set()
    a.close(10)
    thread.join(10)
    assert results == [(1, 0, 0)]


def test_a_copy_that_fails_leaves_nothing(server: CacheServer) -> None:
    one = HostCache(1)
    with worker(one.cache, server.endpoint) as a:
        for ids, error in (([5, 1, 99, 2], BoundsError), ([5, 1], BoundsError), ([5, 1, -1, 2], BoundsError)):
            with pytest.raises(error):
                a.store(key(1, 2), ids)
        assert a.context.stats()["writing"] == a.context.stats()["objects"] == 0
        a.store(key(1, 2), IDS[:4])
        for ids in ([5, 1, 99, 2], [5, 1, 5, 2], [1]):
            with pytest.raises(BoundsError):
                a.retrieve(key(1, 2), ids)
            with pytest.raises(BoundsError):
                a.submit_retrieve(key(1, 2), ids).result(10)
        assert a.context.stats()["locked"] == 0
        for layer in one.layers:
            layer.flags.writeable = False
        with worker(kvraw.PagedCache.from_tensors(one.layers, axes="PBTHD"), server.endpoint) as b:
            assert b.store(key(1, 2), IDS[:4]).present == 2
            with pytest.raises(PlacementError, match="read-only"):
                b.retrieve(key(1, 2), IDS[:4])
        assert a.context.stats()["locked"] == 0


def test_prefetch_holds_what_it_found(server: CacheServer) -> None:
    one = HostCache(1)
    with worker(one.cache, server.endpoint) as a:
        a.store(key(1, 2), IDS[:4])
        assert (a.context.prefetch(key(1, 3)), a.context.prefetch(key(1, 3)), a.context.prefetch(key(2, 1))) == (
            16,
            16,
            0,
        )
        a.context.client.request(m.Clear())
        assert a.retrieve(key(1, 2), IDS[:4]) == 16
        a.context.free_lookup_locks(key(1, 3))
        a.context.free_lookup_locks(key(1, 3))
        assert a.context.client.request(m.Clear()).count == 2
        assert a.context.stats()["tickets"] == 0


def test_without_shared_memory_it_goes_by_message(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    one = HostCache(1)
    with worker(one.cache, server.endpoint) as a:
        a.store(key(1, 2), IDS[:4])
        for failing in ("not there", "another one"):
            with monkeypatch.context() as patch:
                patch.setattr(contexts, "_attached", {})
                if failing == "not there":
                    patch.setattr(shm, "FOLDER", "/nonexistent")
                else:  # the same name in another container, or of a server that was restarted
                    server.pool.view(server.pool.address, 1)[0] ^= 255
                with worker(one.cache, server.endpoint) as b:
                    assert type(b.context) is MessageContext
                    assert b.retrieve(key(1, 2), IDS[:4]) == 16
                    assert b.store(key(2 + len(failing), 1), IDS[:2]).stored == 1
        assert server.service.stats()["clients"] == 1


def test_a_lost_reply_leaves_no_ticket(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    one = HostCache(1)
    with worker(one.cache, server.endpoint) as a:
        client, lost = a.context.client, []
        real = client._receive

        def receive(number: int) -> Any:
            found = real(number)
            if not lost and type(found[0]) is m.Slots:
                lost.append(found)
                raise ServerTimeoutError("lost")
            return found

        monkeypatch.setattr(client, "_receive", receive)
        with pytest.raises(ServerTimeoutError):
            a.store(key(1, 2), IDS[:4])
        assert a.context.stats()["writing"] == 0
        assert a.store(key(1, 2), IDS[:4]).stored == 2


@pytest.mark.parametrize("bad", [1 << 40, (1 << 20) - 1, (1 << 62)])
def test_offsets_of_a_server_are_checked(server: CacheServer, monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    one = HostCache(1)
    with worker(one.cache, server.endpoint) as a:
        monkeypatch.setattr(server.service, "_offsets", lambda objects: [bad for _ in objects])
        with pytest.raises(BoundsError):
            a.store(key(1, 1), IDS[:2])
        monkeypatch.setattr(server.service, "_offsets", lambda objects: [])
        with pytest.raises(BoundsError, match="offsets"):
            a.store(key(1, 1), IDS[:2])
        assert a.context.stats()["tickets"] == 0


def test_no_server(tmp_path: Path) -> None:
    client = CacheClient(f"ipc://{tmp_path}/none", timeout=0.1)
    with pytest.raises(ServerTimeoutError, match="did not answer within"):
        create_engine_driven_context(METADATA, client)
    client.close()
    client.close()
    with pytest.raises(ClosedError):
        client.request(m.Stats())
    with pytest.raises(kvraw.KvrawError, match="endpoint"):
        CacheClient("nonsense://")


def test_a_server_that_ends_refuses_and_a_new_one_is_not_mistaken_for_it(tmp_path: Path) -> None:
    one, endpoint = HostCache(1), f"ipc://{tmp_path}/s.sock"
    with CacheServer(1 << 20, endpoint).start() as server:
        a = worker(one.cache, endpoint, timeout=2.0)
        a.store(key(1, 1), IDS[:2])
        slots = a.context.prepare_retrieve(key(1, 1))
        assert slots is not None
        server.stop()
        until(lambda: server.service.draining)
        with pytest.raises(ServerError, match="draining"):
            a.store(key(2, 1), IDS[:2])
        a.context.commit_retrieve(slots)
        server._thread.join(5)  # type: ignore[union-attr]
        assert not server._thread.is_alive()  # type: ignore[union-attr]
    with CacheServer(1 << 20, endpoint).start():
        with pytest.raises(ServerError, match="unregistered"):
            a.store(key(1, 1), IDS[:2])
        a.close()
        with worker(one.cache, endpoint) as b:
            assert b.retrieve(key(1, 1), IDS[:2]) == 0


def test_signs_of_life(tmp_path: Path) -> None:
    one, endpoint = HostCache(1), f"ipc://{tmp_path}/s.sock"
    with (
        CacheServer(1 << 20, endpoint, limits=Limits(liveness=0.4)).start() as server,
        worker(one.cache, endpoint) as a,
    ):
        until(lambda: server.service.requests["heartbeat", "ok"] >= 6)
        assert a.store(key(1, 1), IDS[:2]).stored == 1
        a.context.client._silence.set()
        until(lambda: server.service.stats()["dead"] == 1)
        with pytest.raises(ServerError, match="unregistered"):
            a.store(key(1, 1), IDS[:2])


def test_without_its_packages_it_says_what_to_install() -> None:
    code = """
import sys
sys.modules["msgspec"] = None
import kvraw, kvraw.cli.main as main
print(main.main(["serve"]))
import kvraw.multiprocess
"""
    done = python("-c", code)
    assert done.stdout == "1\n"
    assert done.stderr.count("pip install 'kvraw[serve]'") == 2


def test_torch_numba_and_cuda_are_not_needed_to_serve() -> None:
    code = "import sys, kvraw.multiprocess; print([m for m in ('torch', 'numba', 'cuda') if m in sys.modules])"
    assert python("-c", code).stdout.strip() == "[]"


def test_a_forked_child_has_nothing_of_its_parents_connection(server: CacheServer) -> None:
    one = HostCache(1)
    with worker(one.cache, server.endpoint, engine="reference") as a:
        a.store(key(1, 1), IDS[:2])
        read, write = os.pipe()
        if not os.fork():
            found = ""
            try:
                a.store(key(2, 1), IDS[:2])
            except BaseException as error:
                found = type(error).__name__
            try:
                a.close()
                with worker(one.cache, server.endpoint, engine="reference") as b:
                    found += f" {b.retrieve(key(1, 1), IDS[:2])}"
            except BaseException as error:
                found += repr(error)
            os.write(write, found.encode())
            os._exit(0)
        os.wait()
        os.close(write)
        with os.fdopen(read) as end:
            assert end.read() == "ForkError 8"
        assert a.retrieve(key(1, 1), IDS[:2]) == 8


def test_gather_and_scatter() -> None:
    one, other = HostCache(1), HostCache(2)
    chunks = gather_paged_kv_to_cpu(one.cache, [*IDS, 3], PER)
    assert len(chunks) == 3
    out = [np.zeros(CHUNK, np.uint8) for _ in range(3)]
    made = gather_paged_kv_to_cpu(one.cache, IDS, PER, out, [2, 0])
    assert (made[0] == chunks[2]).all()
    assert (made[1] == chunks[0]).all()
    assert not out[2].any()
    before = other.blocks([0, 1, 2, 3, 4])
    scatter_cpu_to_paged_kv(other.cache, [0, 1, 2, 3, 4, 6, 23], chunks, PER, 5 * BLOCK)  # beyond two chunks
    assert other.blocks([6]) == one.blocks(IDS[5:])
    assert other.blocks([0, 1, 2, 3, 4]) == before
    scatter_cpu_to_paged_kv(other.cache, [0, 1, 2, 3, 4, 6], chunks, PER, 1000)
    assert other.blocks([0, 1, 2, 3, 4]) == before
    for bad in (lambda: gather_paged_kv_to_cpu(one.cache, IDS, PER, out[:2]),
                lambda: gather_paged_kv_to_cpu(one.cache, IDS, PER, out, [3]),
                lambda: gather_paged_kv_to_cpu(one.cache, IDS, 0),
                lambda: scatter_cpu_to_paged_kv(one.cache, IDS[:5], chunks, PER)):  # fmt: skip
        with pytest.raises(BoundsError):
            bad()


def test_layouts() -> None:
    one = HostCache(1)
    assert compute_kv_layout(one.cache, TOKENS) == METADATA
    assert compute_kv_layout(one.cache, TOKENS, "torch.bfloat16").layout_desc.dtypes == ("bfloat16",)
    with pytest.raises(BoundsError, match="elements have 2 bytes"):
        compute_kv_layout(one.cache, TOKENS, "float32")
    with pytest.raises(BoundsError, match="multiple of block_size"):
        compute_kv_layout(one.cache, TOKENS + 1)


def test_a_context_of_another_cache(server: CacheServer) -> None:
    small = HostCache(1)
    half = kvraw.PagedCache.from_tensors(small.layers[:1], axes="PBTHD")
    with (
        create_engine_driven_context(METADATA, client_of(server)) as context,
        pytest.raises(LayoutError, match="bytes"),
    ):
        EngineWorker(context, half)
