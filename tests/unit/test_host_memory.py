"""Host memory without a GPU: kinds, what is really obtained, and a fault at every step."""

from __future__ import annotations

import errno
import gc
import logging
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import kvraw
from kvraw.runtime.host import backing, libc, mapping, populate, shm
from kvraw.runtime.host.mapping import HostOptions
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.failing import failing_advice, fails
from tests.helpers.leaks import nothing_left

MIB = 1 << 20
SIZE = 64 * MIB

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def warned_of_nothing(monkeypatch: Patch) -> None:
    monkeypatch.setattr(mapping, "_warned", set())


@pytest.mark.parametrize("populated", [False, True])
@pytest.mark.parametrize("nbytes", [1, 4097, 2 * MIB, 5 * MIB + 4096])
def test_the_size_is_exact_and_the_memory_zero(nbytes: int, populated: bool) -> None:
    with kvraw.HostBuffer(nbytes, pin=False, options=HostOptions(populate=populated)) as buffer:
        assert buffer.nbytes == -(-nbytes // 4096) * 4096
        assert buffer.address % (2 * MIB if nbytes >= 2 * MIB else 4096) == 0
        assert not buffer.view(buffer.address, buffer.nbytes).any()
        info = buffer.info()
        assert (info["pinned"], info["pinned_bytes"], info["registrations"]) == (False, 0, 0)
        assert info["ready_bytes"] == buffer.nbytes


def test_transparent_huge_pages_are_told_as_they_are(monkeypatch: Patch) -> None:
    with kvraw.HostPool(SIZE, pin=False, options=HostOptions(populate=True)) as pool:
        info = pool.info()
        assert info["huge_pages"] == ("refused" if backing.transparent_setting() in (None, "never") else "transparent")
        if backing.transparent_setting() in ("always", "madvise"):
            assert info["huge_page_bytes"] == SIZE
        nodes = info["nodes"]
        assert nodes is None or sum(nodes.values()) >= SIZE  # type: ignore[attr-defined]
    monkeypatch.setattr(backing, "transparent_setting", lambda: "never")
    with kvraw.HostPool(SIZE, pin=False) as pool:
        assert pool.info()["huge_pages"] == "refused"
    monkeypatch.setattr(libc, "advise", failing_advice(libc.HUGEPAGE, errno.EINVAL))
    with nothing_left(SIZE), kvraw.HostPool(SIZE, pin=False, options=HostOptions(populate=True)) as pool:
        assert pool.info()["huge_pages"] == "refused"
        assert pool.info()["huge_page_bytes"] == 0 or backing.transparent_setting() == "always"


def test_memory_that_cannot_be_mapped(monkeypatch: Patch) -> None:
    for kind in ("anonymous", "shared"):
        with nothing_left(SIZE), monkeypatch.context() as patch:
            patch.setattr(libc, "_map", fails(errno.ENOMEM))
            with pytest.raises(kvraw.HostMemoryError, match=r"cannot map 67108864 bytes.*injected"):
                kvraw.HostPool(SIZE, options=HostOptions(kind=kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["huge-2MiB", "huge-1GiB"])
def test_no_explicit_huge_pages(monkeypatch: Patch, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    real = libc.map_anonymous

    def none_free(nbytes: int, *, align: int = 4096, huge_page: int = 0) -> int:
        if huge_page:
            raise OSError(errno.ENOMEM, "mmap: injected")
        return real(nbytes, align=align)

    monkeypatch.setattr(libc, "map_anonymous", none_free)
    options = HostOptions(kind=kind)  # type: ignore[arg-type]
    with nothing_left(SIZE), caplog.at_level(logging.WARNING, "kvraw"):
        for _ in range(2):
            with kvraw.HostPool(SIZE, options=options) as pool:
                info = pool.info()
                assert info["kind"] == "anonymous"
                assert pool.nbytes == SIZE
                (lost,) = info["degraded"]  # type: ignore[misc]
                assert f"{kind} pages" in lost
                assert "to change: " in lost
    assert len(caplog.records) == 1  # once, not once per pool
    with nothing_left(SIZE), pytest.raises(kvraw.HostMemoryError, match=f"{kind} pages.*to change: "):
        kvraw.HostPool(SIZE, options=HostOptions(kind=kind, strict=True))  # type: ignore[arg-type]


def test_a_refused_node(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    node = (backing.nodes() or [0])[0]
    monkeypatch.setattr(libc, "bind", fails(errno.EPERM))
    with nothing_left(SIZE), caplog.at_level(logging.WARNING, "kvraw"):
        with kvraw.HostPool(SIZE, options=HostOptions(node=node)) as pool:
            assert pool.info()["node"] is None
            assert "CAP_SYS_NICE" in pool.info()["degraded"][0]  # type: ignore[index]
        assert "CAP_SYS_NICE" in caplog.text
        with pytest.raises(kvraw.HostMemoryError, match=r"NUMA binding.*injected.*to change: .*CAP_SYS_NICE"):
            kvraw.HostPool(SIZE, options=HostOptions(node=node, strict=True))


def test_a_node() -> None:
    nodes = backing.nodes()
    if not nodes:
        pytest.skip("the kernel tells of no NUMA nodes")
    try:
        pool = kvraw.HostPool(SIZE, options=HostOptions(node=nodes[0], strict=True, populate=True))
    except kvraw.HostMemoryError as error:
        pytest.skip(str(error))
    with pool:
        assert pool.info()["node"] == nodes[0]
        assert pool.info()["nodes"] in (None, {nodes[0]: SIZE})
    with pytest.raises(kvraw.BoundsError, match=r"node is 1023, must be one of"):
        kvraw.HostPool(SIZE, options=HostOptions(node=1023))


def test_the_node_of_a_gpu_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    with kvraw.HostPool(SIZE, pin=False, options=HostOptions(node="device")) as pool:
        assert "no device is named" in pool.info()["degraded"][0]  # type: ignore[index]
    with pytest.raises(kvraw.HostMemoryError, match="no device is named; to change: name a device"):
        kvraw.HostPool(SIZE, pin=False, options=HostOptions(node="device", strict=True))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "huge"}, ValueError, "kind is 'huge', must be anonymous"),
        ({"name": "x"}, ValueError, "name is 'x', but kind is 'anonymous'"),
        ({"kind": "pinned", "node": 0}, ValueError, "the driver chooses"),
        ({"node": "x"}, TypeError, r"node .if not 'device'. is 'x', must be an integer"),
        ({"threads": 1.5}, TypeError, r"threads is 1\.5, must be an integer"),
        ({"node": -1}, kvraw.BoundsError, r"node is -1, must be in \[0, 1024\)"),
        ({"threads": 0}, kvraw.BoundsError, "threads is 0"),
        ({"step_bytes": -1}, kvraw.BoundsError, "step_bytes is -1"),
        ({"step_bytes": 512 << 30}, kvraw.BoundsError, "step_bytes is 549755813888, must be at most"),
        ({"first_bytes": 0}, kvraw.BoundsError, "first_bytes is 0"),
        ({"kind": "shared", "name": 5}, TypeError, "name is 5, must be a str"),
        ({"progress": 1}, TypeError, "progress is 1, must be callable"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HostOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [kvraw.HostPool, kvraw.HostBuffer])
def test_bad_arguments(fake: FakeDriver, make: type[kvraw.HostBuffer]) -> None:
    bad: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"options": {}}, TypeError, r"options is \{\}, must be HostOptions"),
        ({"options": {"kind": "shared"}}, TypeError, r"options is \{'kind': 'shared'\}, must be HostOptions"),
        ({"options": "shared"}, TypeError, "options is 'shared', must be HostOptions"),
        ({"device": "cuda"}, TypeError, "device is 'cuda', must be an integer"),
        ({"device": "cuda", "pin": False}, TypeError, "device is 'cuda', must be an integer"),
        ({"device": True}, TypeError, "device is True, must be an integer"),
        ({"device": -1}, kvraw.PlacementError, "device is -1, must be >= 0"),
        ({"device": 2}, kvraw.PlacementError, r"device is 2, must be in \[0, 2\)"),
    ]
    for arguments, error, message in bad:
        with nothing_left(SIZE), pytest.raises(error, match=message):
            make(SIZE, **arguments)  # type: ignore[arg-type]
    with make(SIZE, pin=False) as pool:
        for device, error in (("cuda", TypeError), (2, kvraw.PlacementError)):
            with pytest.raises(error, match=f"device is {device!r}, must be"):
                pool.pin(device)  # type: ignore[arg-type]
        for others in ({"device": "cuda"}, {"device": "cuda", "pin": True}):
            with pytest.raises(TypeError, match="device is 'cuda'"):
                make.from_pointer(pool.address, SIZE, **others)  # type: ignore[arg-type]
    assert not fake.live()["blocks"]


@pytest.mark.parametrize("text", ["0", "1000", str(512 << 30), "many"])
def test_a_bad_registration_size(monkeypatch: Patch, text: str) -> None:
    monkeypatch.setenv("KVRAW_REGISTER_BYTES", text)
    with nothing_left(SIZE), pytest.raises(ValueError, match="KVRAW_REGISTER_BYTES="):
        kvraw.HostPool(SIZE, options=HostOptions(populate=True))


def test_growing_in_the_background(monkeypatch: Patch) -> None:
    gate, seen = threading.Event(), []
    real = libc.advise

    def slow(address: int, nbytes: int, advice: int) -> None:
        if advice == libc.POPULATE_WRITE and seen:
            assert gate.wait(60)
        real(address, nbytes, advice)

    def progress(ready: int, total: int) -> None:
        seen.append((ready, total))

    monkeypatch.setattr(populate, "PIECE", 4 * MIB)
    monkeypatch.setattr(libc, "advise", slow)
    options = HostOptions(
        populate=True, grow=True, first_bytes=4 * MIB, step_bytes=8 * MIB, threads=1, progress=progress
    )
    with kvraw.HostPool(SIZE, pin=False, options=options) as pool:
        assert pool.info()["growing"] is True
        assert pool.ready_bytes == 4 * MIB
        chunks = pool.chunks(4, MIB)
        assert max(c.address + c.nbytes for c in chunks) <= pool.address + 4 * MIB
        with pytest.raises(MemoryError, match="4194304 bytes are ready, the pool still grows"):
            pool.chunks(1, MIB)
        with pytest.raises(kvraw.TransferTimeoutError, match="4194304 of 67108864 bytes are ready"):
            pool.wait_ready(0.01)
        gate.set()
        assert len(pool.chunks(60, MIB, timeout=60)) == 60
        pool.wait_ready(60)
        assert (pool.info()["growing"], pool.info()["growth_error"], pool.ready_bytes) == (False, None, SIZE)
    assert seen == [(n * MIB, SIZE) for n in (*range(4, 64, 8), 64)]


def test_the_first_bytes_may_be_several_registrations() -> None:
    options = HostOptions(populate=True, grow=True, first_bytes=20 * MIB, step_bytes=8 * MIB)
    with kvraw.HostPool(SIZE, pin=False, options=options) as pool:
        assert pool.ready_bytes >= 20 * MIB
        assert len(pool.chunks(20, MIB)) == 20
        pool.wait_ready(60)


def test_growing_that_fails_keeps_what_is_ready(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(populate, "PIECE", 4 * MIB)
    monkeypatch.setattr(libc, "advise", failing_advice(libc.POPULATE_WRITE, errno.ENOMEM, 4))
    options = HostOptions(populate=True, grow=True, first_bytes=4 * MIB, step_bytes=4 * MIB, threads=1)
    with nothing_left(SIZE), kvraw.HostPool(SIZE, pin=False, options=options) as pool:
        for _ in range(2):
            with pytest.raises(kvraw.HostMemoryError, match="cannot populate"):
                pool.wait_ready()
        assert pool.ready_bytes == 12 * MIB
        assert "cannot populate" in str(pool.info()["growth_error"])
        pool.chunks(12, MIB)[11].numpy()[:] = 1
        with pytest.raises(MemoryError, match="12582912 bytes are ready, growing ended: cannot populate"):
            pool.chunks(1, MIB)
    assert "stopped growing at 12582912 bytes" in caplog.text


def test_closing_or_dropping_a_pool_ends_its_growth(monkeypatch: Patch) -> None:
    monkeypatch.setattr(populate, "PIECE", MIB)
    options = HostOptions(populate=True, grow=True, first_bytes=MIB, step_bytes=MIB, threads=1)
    slow = failing_advice(libc.POPULATE_WRITE, errno.ENOMEM, 10**9)
    monkeypatch.setattr(libc, "advise", lambda *a: (time.sleep(0.005), slow(*a))[1])
    with nothing_left(SIZE):
        pool = kvraw.HostPool(SIZE, pin=False, options=options)
        pool.close()
        assert pool.ready_bytes < SIZE
        assert not [t for t in threading.enumerate() if t.name.startswith(("kvraw-grow", "kvraw-populate"))]
    with nothing_left(SIZE):
        pool = kvraw.HostPool(SIZE, pin=False, options=options)
        del pool
        deadline = time.monotonic() + 30
        while [t for t in threading.enumerate() if t.name.startswith("kvraw-grow")]:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_progress_may_end_the_preparation() -> None:
    def no(ready: int, total: int) -> None:
        raise RuntimeError("that is enough")

    with nothing_left(SIZE), pytest.raises(RuntimeError, match="that is enough"):
        kvraw.HostPool(SIZE, options=HostOptions(populate=True, step_bytes=SIZE // 4, progress=no))
    with nothing_left(SIZE), pytest.raises(RuntimeError, match="that is enough"):
        kvraw.HostPool(SIZE, options=HostOptions(populate=True, grow=True, first_bytes=MIB, progress=no))


def test_memory_of_somebody_else() -> None:
    array = np.arange(20000, dtype=np.uint8)
    at = int(array.ctypes.data)
    with kvraw.HostPool.from_pointer(at, array.nbytes, owner=array, pin=False) as pool:
        assert (pool.address, pool.nbytes) == (at, 20000)
        (chunk,) = pool.chunks(1, 4096)
        assert chunk.address % 4096 == 0
        assert at <= chunk.address <= at + 20000 - 4096
        chunk.numpy()[:] = 7
        assert pool.info()["kind"] == "borrowed"
        view = pool.view(at, 20000)
    assert (view[chunk.address - at :][:4096] == 7).all()
    for address, nbytes in ((0, 4), (-5, 4), (2**64 - 2, 4), (4096, 0)):
        with pytest.raises(kvraw.BoundsError, match="address is"):
            kvraw.HostBuffer.from_pointer(address, nbytes)


def test_views_keep_the_memory() -> None:
    with nothing_left(SIZE):
        pool = kvraw.HostPool(SIZE, pin=False)
        (chunk,) = pool.chunks(1, SIZE)
        chunk.numpy()[:] = 5
        views = [
            chunk.numpy(np.int32),
            np.asarray(memoryview(chunk.numpy())),
            np.asarray(chunk),
            np.from_dlpack(chunk),  # type: ignore[arg-type]
        ]
        pool.close()
        del pool, chunk
        gc.collect()
        while views:
            assert (views.pop().view(np.uint8) == 5).all()
            gc.collect()


def test_no_pinned_memory_without_a_gpu(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("kvraw.runtime.host.buffer.gpu_at_hand", lambda: False)
    monkeypatch.setattr("kvraw.runtime.context.gpu_at_hand", lambda: False)
    with kvraw.HostPool(SIZE, options=HostOptions(kind="pinned")) as pool:
        assert pool.info()["kind"] == "anonymous"
        assert pool.pinned is False
        assert "no GPU at hand" in pool.info()["degraded"][0]  # type: ignore[index]
    with pytest.raises(kvraw.HostMemoryError, match="no GPU at hand"):
        kvraw.HostPool(SIZE, options=HostOptions(kind="pinned", strict=True))
    with pytest.raises(ValueError, match="pin is False, but kind is 'pinned'"):
        kvraw.HostPool(SIZE, pin=False, options=HostOptions(kind="pinned"))


def test_facts(tmp_path: object) -> None:
    assert backing.nodes("/nowhere") == []
    assert backing.device_node(0) is None or backing.device_node(0) >= 0  # type: ignore[operator]
    assert backing.free_huge_pages(12345 << 10) is None
    assert shm.shared_memory_room() is None or shm.shared_memory_room() > 0  # type: ignore[operator]


@pytest.mark.parametrize(
    "code",
    [
        # the interpreter ends while a pool grows, is open, is viewed by an exit function, or is full of threads' work
        "options = HostOptions(populate=True, grow=True, first_bytes=1 << 20, step_bytes=2 << 20, threads=2)\n"
        "pool = kvraw.HostPool(2 << 30, pin=False, options=options)",
        "import atexit\npool = kvraw.HostPool(1 << 26, pin=False)\nview = pool.chunks(1, 1 << 26)[0].numpy()\n"
        "atexit.register(lambda: view.fill(3))",
        "import threading, time\npool = kvraw.HostPool(1 << 26, pin=False)\nc = pool.chunks(1, 1 << 26)[0]\n"
        "view = c.numpy()\n"
        "def work():\n    while True:\n        view.fill(1)\n"
        "threading.Thread(target=work, daemon=True).start()\ntime.sleep(0.05)",
    ],
    ids=["growing", "exit function", "daemon thread"],
)
def test_the_interpreter_ends(code: str) -> None:
    start = "import kvraw\nfrom kvraw.runtime.host.mapping import HostOptions\n"
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", start + code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - begin < 30


def test_a_forked_child_may_use_unpinned_memory() -> None:
    code = """
import os, sys, warnings
warnings.simplefilter("ignore")
import kvraw
pool = kvraw.HostPool(1 << 22)
(chunk,) = pool.chunks(1, 4096)
chunk.numpy()[:] = 1
pid = os.fork()
if pid == 0:
    ok = (chunk.numpy() == 1).all()
    chunk.numpy()[:] = 2
    chunk.free()
    pool.chunks(1, 1 << 21)
    pool.close()
    os._exit(0 if ok else 1)
_, status = os.waitpid(pid, 0)
assert (chunk.numpy() == 1).all()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
