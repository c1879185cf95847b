"""Real processes: a server, workers of it, and what becomes of them by SIGKILL, SIGTERM and senseless messages.

KVRAW_TEST_MALFORMED is the number of malformed messages, 2,000 where it is not set; KVRAW_TEST_SERVE_SECONDS the length
of the run with killed workers, 3 where it is not set.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
import zmq
import zmq.auth

import kvraw
from kvraw.cli.main import main
from kvraw.multiprocess import (
    CacheClient,
    CacheServer,
    EndpointError,
    Keys,
    Limits,
    ServerTimeoutError,
    default_endpoint,
)
from kvraw.multiprocess import messages as m
from kvraw.multiprocess.endpoints import require_endpoint
from tests.fuzz import serve
from tests.helpers.serving import CHUNK, Child, HostCache, Server, key, stats, until, worker

MALFORMED = int(os.environ.get("KVRAW_TEST_MALFORMED", "2000"))
SECONDS = float(os.environ.get("KVRAW_TEST_SERVE_SECONDS", "3"))
IDS = [5, 1, 20, 9, 7, 8]

WORKER = """
cache = HostCache(int(sys.argv[2]))
w = worker(cache.cache, sys.argv[1], engine="reference", use_messages=sys.argv[3] == "message")
print("ready", flush=True)
for line in sys.stdin:
    what, *ids = line.split()
    ids = list(map(int, ids))
    if what == "store":
        print(*w.store(key(1, 3), ids), cache.blocks(ids).hex(), flush=True)
    elif what == "load":
        print(w.retrieve(key(1, 3), ids), cache.blocks(ids).hex(), flush=True)
    elif what == "prepare":
        slots = w.context.prepare_store(key(1, 3))
        slots.chunks[0][:100] = 9
        read = w.context.prepare_retrieve(key(2, 1))
        print(len(slots.chunks), read is not None, flush=True)
    elif what == "commit":
        w.context.commit_store(slots)
        print("committed", flush=True)
w.close()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, "--liveness", "1") as made:
        yield made
        if made.process.poll() is None:
            code, out, err = made.end()
            assert code == 0, err
            assert json.loads(out)["ok"]
    kvraw.sweep_shared_memory()
    assert made.segments() == []


@pytest.mark.parametrize("by", ["memory", "message"])
def test_one_process_stores_and_the_other_loads(server: Server, by: str) -> None:
    with Child(WORKER, server.endpoint, "1", by) as one, Child(WORKER, server.endpoint, "2", "memory") as other:
        assert [one.line(), other.line()] == ["ready", "ready"]
        assert other.tell("load 0 1 2 3 4 6").split()[0] == "0"
        stored, loaded = one.tell("store 5 1 20 9 7 8").split(), other.tell("load 0 1 2 3 4 6").split()
        assert (stored[:3], loaded[0]) == (["3", "0", "0"], "24")
        assert stored[3] == loaded[1] == HostCache(1).blocks(IDS).hex()
    assert len(server.segments()) == 1  # which workers that end leave alone


def test_a_worker_that_is_killed_before_it_commits(server: Server) -> None:
    with worker(HostCache(3).cache, server.endpoint) as third, Child(WORKER, server.endpoint, "1", "memory") as one:
        third.store(key(2, 1), IDS[:2])
        assert one.line() == "ready"
        assert one.tell("prepare") == "3 True"
        before = third.context.stats()
        assert (before["writing"], before["locked"]) == (3, 1)
        assert third.context.lookup(key(1, 3)) == 0
        one.kill()
        until(lambda: third.context.stats()["dead"] == 1, 5)
        after = third.context.stats()
        assert [after[name] for name in ("writing", "locked", "tickets", "objects")] == [0, 0, 0, 1]
        assert after["object_bytes"] == CHUNK
        assert third.context.lookup(key(1, 3)) == 0
        assert third.store(key(1, 3), IDS).stored == 3


def test_sigterm_lets_open_stores_end(server: Server) -> None:
    with Child(WORKER, server.endpoint, "1", "memory") as one, CacheClient(server.endpoint) as client:
        assert one.line() == "ready"
        one.tell("prepare")
        server.process.send_signal(signal.SIGTERM)

        def drains() -> bool:
            with contextlib.suppress(kvraw.KvrawError):
                client.register(16, shared=False)
                return False
            return True

        until(drains)
        assert server.process.poll() is None
        assert one.tell("commit") == "committed"
        out, _ = server.process.communicate(timeout=10)
        assert (server.process.returncode, json.loads(out)["stored"]) == (0, 3)
        assert server.segments() == []


def test_a_drain_has_an_end(tmp_path: Path) -> None:
    with Server(tmp_path, "--drain", "0.3") as server, Child(WORKER, server.endpoint, "1", "memory") as one:
        assert one.line() == "ready"
        one.tell("prepare")
        code, out, _ = server.end()
        assert (code, json.loads(out)["stored"], server.segments()) == (0, 0, [])


def test_a_server_that_was_killed_is_followed_by_another(tmp_path: Path) -> None:
    with Server(tmp_path) as first:
        with pytest.raises(EndpointError, match="another server's that lives"):
            CacheServer(1 << 20, first.endpoint)
        assert main(["serve", "--mib", "1", "--endpoint", first.endpoint]) == 1
        first.end(signal.SIGKILL)
        assert len(first.segments()) == 1
        with Server(tmp_path) as other:
            assert first.segments() == []
            with worker(HostCache(1).cache, other.endpoint) as w:
                assert w.store(key(1, 1), IDS[:2]).stored == 1
            assert other.end()[0] == 0


def _malformed(r: Random, number: int) -> list[bytes]:
    """Frames of a message that is none, or that does not fit; its number where it has one."""
    keys = [r.randbytes(32) for _ in range(r.randint(0, 3))]
    good = r.choice([
        m.PrepareStore(keys=keys), m.PrepareRetrieve(keys=keys), m.Lookup(keys=keys, lock=True), m.Heartbeat(),
        m.Commit(ticket=r.getrandbits(62)), m.Put(ticket=1, first=r.getrandbits(61)), m.Abort(ticket=9),
        m.Get(ticket=1, first=0, count=r.getrandbits(61)), m.Register(name="x", chunk_bytes=1 << 61, shared=True),
    ])  # fmt: skip
    good.id = number
    data, act = bytearray(m.encode(good)), r.random()
    if act < 0.3:
        data[r.randrange(len(data))] = r.randrange(256)
    elif act < 0.5:
        del data[r.randrange(len(data)) :]
    elif act < 0.6:
        data = bytearray(r.randbytes(r.randint(0, 300)))
    elif act < 0.7:
        fields = msgspec.msgpack.decode(bytes(data))
        fields[r.choice(["v", "op", "id", "keys", "new"])] = r.choice([-1, "", [], None, 1 << 63])
        data = bytearray(msgspec.msgpack.encode(fields))
    return [bytes(data), *(r.randbytes(r.choice([0, 1, 1024])) for _ in range(r.choice([0, 0, 1, 3])))]


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_malformed_messages_are_answered_each(server: Server) -> None:
    r, context = Random(1), zmq.Context()
    sender = context.socket(zmq.DEALER)
    sender.setsockopt(zmq.LINGER, 0)
    sender.connect(server.endpoint)
    codes: dict[str, int] = {}
    try:
        sent = answered = before = 0
        while answered < MALFORMED:
            while sent < MALFORMED and sent - answered < 40:
                sender.send_multipart(_malformed(r, sent + 1) if sent % 100 else [b""])
                sent += 1
            assert sender.poll(5000), f"no answer to one of {sent} messages"
            reply = m.decode_reply(sender.recv_multipart()[0])
            codes[reply.code] = codes.get(reply.code, 0) + 1
            answered += 1
            if answered == MALFORMED // 2:
                before = _resident(server.process.pid)
        assert not sender.poll(50)
    finally:
        context.destroy(linger=0)
    assert {"malformed", "version", "unregistered", "payload", "bounds"} <= set(codes) <= set(m.CODES) - {"internal"}
    assert _resident(server.process.pid) - before < 8 << 20
    with worker(HostCache(1).cache, server.endpoint) as w:
        assert w.store(key(1, 1), IDS[:2]).stored == 1
        assert w.retrieve(key(1, 1), IDS[:2]) == 8


def test_what_is_no_message_at_all_ends_its_connection_alone(tmp_path: Path) -> None:
    r = Random(2)
    with Server(tmp_path, "--message-mib", "1") as server:
        for _ in range(100):
            with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(OSError):
                raw.connect(server.endpoint.removeprefix("ipc://"))
                raw.sendall(r.randbytes(r.randint(1, 2000)))
        with CacheClient(server.endpoint, timeout=0.5) as client:
            client.register(2 << 20, shared=False)
            slots = client.request(m.PrepareStore(id=client.number(), keys=[bytes(32)]))
            with pytest.raises(ServerTimeoutError):  # a frame beyond what the server takes
                client.request(m.Put(ticket=slots.ticket, first=0), [bytes(2 << 20)])
        with worker(HostCache(1).cache, server.endpoint) as w:
            assert w.store(key(1, 1), IDS[:2]).stored == 1
        assert server.end()[0] == 0


def test_random_workers_that_are_killed() -> None:
    for seconds in (SECONDS, 4 * SECONDS):  # a machine that is busy with other tests gets less done
        found = serve.run(seconds)
        if found["killed"] > 3 and found["retrieved"] > 50 and found["server evicted"] > 0:
            break
    assert found["killed"] > 3
    assert found["retrieved"] > 50
    assert found["server evicted"] > 0


# where it listens


def test_keys_are_needed_beyond_this_machine(tmp_path: Path) -> None:
    keys = Keys("a", "b")
    for good in ("tcp://127.0.0.1:5555", "tcp://[::1]:*", "tcp://127.1.2.3:1", "ipc:///run/x"):
        require_endpoint(good, None)
    for beyond in ("tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.1:5555", "tcp://[::]:1", "tcp://localhost:1"):
        with pytest.raises(EndpointError, match="needs CURVE keys"):
            require_endpoint(beyond, None)
        require_endpoint(beyond, keys)
    for bad in ("", "ipc://relative", "ipc:///" + "x" * 101, "ipc://@abstract", "tcp://127.0.0.1", "inproc://x", "udp://1.2.3.4:5",
                "tcp://1.2.3.4;5.6.7.8:1"):  # fmt: skip
        with pytest.raises(EndpointError, match="must be"):
            require_endpoint(bad, keys)
    assert default_endpoint().startswith("ipc:///")


def test_curve_lets_in_who_is_known(tmp_path: Path) -> None:
    for folder in ("server", "known", "stranger", "clients"):
        (tmp_path / folder).mkdir()
    made = {name: zmq.auth.create_certificates(tmp_path / name, name) for name in ("server", "known", "stranger")}
    (public, secret) = made["server"]
    os.link(made["known"][0], tmp_path / "clients" / "known.key")
    os.chmod(secret, 0o644)
    with pytest.raises(EndpointError, match="must be for its owner alone"):
        CacheServer(1 << 20, "tcp://127.0.0.1:*", keys=Keys(secret, tmp_path / "clients"))
    for name in made:
        os.chmod(made[name][1], 0o600)
    with pytest.raises(EndpointError, match="holds no public key"):
        CacheServer(1 << 20, "tcp://127.0.0.1:*", keys=Keys(secret, tmp_path / "stranger" / "none"))
    os.chmod(public, 0o600)
    with pytest.raises(EndpointError, match="holds no secret key"):
        CacheServer(1 << 20, "tcp://127.0.0.1:*", keys=Keys(public, tmp_path / "clients"))
    with CacheServer(1 << 20, "tcp://127.0.0.1:*", keys=Keys(secret, tmp_path / "clients")).start() as server:
        one = HostCache(1)
        with worker(one.cache, server.endpoint, keys=Keys(made["known"][1], public), use_messages=True) as w:
            assert w.store(key(1, 1), IDS[:2]).stored == 1
            assert w.retrieve(key(1, 1), IDS[:2]) == 8
        for options in ({"keys": Keys(made["stranger"][1], public)}, {}):
            with CacheClient(server.endpoint, timeout=0.3, **options) as client, pytest.raises(ServerTimeoutError):
                client.request(m.Stats())


def test_the_socket_is_its_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "s.sock"
    with CacheServer(1 << 20, f"ipc://{path}", limits=Limits(drain=0)).start():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.write_text("mine")
    with pytest.raises(EndpointError, match="no socket"):
        CacheServer(1 << 20, f"ipc://{path}")
    assert path.read_text() == "mine"
    path.parent.chmod(0o777)
    with pytest.raises(EndpointError, match="others may write to it"):
        CacheServer(1 << 20, f"ipc://{path}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_endpoint() == f"ipc://{tmp_path}/kvraw/serve.sock"


def test_metrics(tmp_path: Path) -> None:
    from urllib.request import urlopen

    one = HostCache(1)
    with (
        CacheServer(1 << 20, f"ipc://{tmp_path}/s.sock", metrics="127.0.0.1:0").start() as server,
        worker(one.cache, server.endpoint) as w,
    ):
        w.store(key(1, 2), IDS[:4])
        w.retrieve(key(1, 2), IDS[:4])
        with urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as page:
            text = page.read().decode()
    expected = {"stored_total": 2, "hits_total": 2, "clients": 1, "stored_bytes_total": 2 * CHUNK, "objects": 2}
    for name, value in expected.items():
        assert f"\nkvraw_serve_{name} {float(value)}\n" in text
    assert 'kvraw_serve_requests_total{operation="commit",outcome="ok"} 2.0' in text
    for bad in ("nonsense", "127.0.0.1:99999", ":1"):
        with pytest.raises(kvraw.KvrawError, match="metrics"):
            CacheServer(1 << 20, f"ipc://{tmp_path}/s.sock", metrics=bad)


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--mib", "0"], 2, "must be a positive integer"),
        (["--liveness", "0"], 2, "must be a number above 0"),
        (["--drain", "-1"], 2, "must be a number >= 0"),
        (["--endpoint", "tcp://0.0.0.0:5"], 1, "needs CURVE keys"),
        (["--curve-key", "x"], 1, "go together"),
        (["--endpoint", "tcp://0.0.0.0:5", "--curve-key", "/nonexistent", "--curve-clients", "/"], 1, "No such file"),
    ],
)
def test_arguments(argv: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *argv]) == code
    assert says in capsys.readouterr().err


def test_stats_without_registration(server: Server) -> None:
    assert stats(server.endpoint)["clients"] == 0
