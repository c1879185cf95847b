"""Pinned host memory when the driver refuses, at every step: nothing leaks, nothing unpinned is given out as pinned."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import kvraw
from kvraw.errors import DriverError
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.host import backing, libc, populate, registration
from kvraw.runtime.host.mapping import HostOptions
from kvraw.runtime.memory import locate
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.leaks import nothing_left, registered_bytes

MIB = 1 << 20
SIZE = 64 * MIB
STEP = 2 * MIB
RESULT = "CUDA_ERROR_OUT_OF_MEMORY"
KINDS = ["anonymous", "shared"]


def options(kind: str = "anonymous", **others: object) -> HostOptions:
    return HostOptions(kind=kind, step_bytes=STEP, threads=2, **others)  # type: ignore[arg-type]


def blocks(fake: FakeDriver) -> int:
    return fake.live()["blocks"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["host_register", "host_device_address"])
@pytest.mark.parametrize("nth", range(1, 9))
def test_the_kth_registration_fails(fake: FakeDriver, kind: str, call: str, nth: int) -> None:
    with nothing_left(SIZE):
        fake.fail(call, nth, RESULT)
        with pytest.raises(DriverError, match=f"{call} failed: {RESULT}"):
            kvraw.HostPool(SIZE, device=0, options=options(kind))
        assert blocks(fake) == 0
        with kvraw.HostPool(SIZE, device=0, options=options(kind)) as pool:
            assert pool.info()["registrations"] == SIZE // STEP == blocks(fake)
            assert pool.info()["pinned_bytes"] == SIZE
        assert blocks(fake) == 0


@pytest.mark.parametrize("call", ["primary_retain", "context_push", "context_pop"])
def test_the_context_fails(fake: FakeDriver, call: str) -> None:
    with nothing_left(SIZE):
        fake.fail(call, 1, RESULT)
        with pytest.raises(DriverError, match=f"{call} failed"):
            kvraw.HostPool(SIZE, device=0, options=options())
        assert blocks(fake) == 0


def test_registrations_are_rolled_back_in_reverse(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    real = FakeDriver.host_unregister
    monkeypatch.setattr(FakeDriver, "host_unregister", lambda self, a: (order.append(a), real(self, a))[1])
    fake.fail("host_register", 6, RESULT)
    with pytest.raises(DriverError):
        kvraw.HostPool(SIZE, device=0, options=options())
    assert len(order) == 5
    assert order == sorted(order, reverse=True)


def test_population_fails_while_registering(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = libc.advise, [5]

    def advise(address: int, nbytes: int, advice: int) -> None:
        if advice == libc.POPULATE_WRITE:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOMEM, "injected")
        real(address, nbytes, advice)

    monkeypatch.setattr(populate, "PIECE", STEP)
    monkeypatch.setattr(libc, "advise", advise)
    with nothing_left(SIZE), pytest.raises(kvraw.HostMemoryError, match="injected"):
        kvraw.HostPool(SIZE, device=0, options=options())
    assert blocks(fake) == 0


def test_a_pool_that_cannot_be_pinned_later_stays_as_it_was(fake: FakeDriver) -> None:
    with nothing_left(SIZE), kvraw.HostPool(SIZE, pin=False, options=options()) as pool:
        (chunk,) = pool.chunks(1, SIZE)
        chunk.numpy()[:] = 3
        fake.fail("host_register", 4, RESULT)
        with pytest.raises(DriverError):
            pool.pin(0)
        assert not pool.pinned
        assert pool.info()["pinned_bytes"] == blocks(fake) == 0
        with pytest.raises(kvraw.ClosedError, match="not pinned"):
            _ = pool.device_shift
        pool.pin(0)
        assert pool.pinned
        assert (chunk.numpy() == 3).all()


def test_growing_stops_where_the_driver_refuses(fake: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    fake.fail("host_register", 4, RESULT)
    with nothing_left(SIZE):
        with kvraw.HostPool(SIZE, device=0, options=options(grow=True, first_bytes=MIB)) as pool:
            with pytest.raises(DriverError, match="host_register failed"):
                pool.wait_ready(60)
            ready = MIB + 2 * STEP
            assert (pool.ready_bytes, pool.info()["pinned_bytes"], blocks(fake)) == (ready, ready, 3)
            assert pool.pinned  # what it hands out is
            chunks = pool.chunks(ready // MIB, MIB)
            assert all(locate(c.address, 1).device_address for c in chunks)
            with pytest.raises(MemoryError, match="5242880 bytes are ready, growing ended: host_register failed"):
                pool.chunks(1, MIB)
            pool.pin(0)
        assert blocks(fake) == 0
    assert "stopped growing" in caplog.text


def test_growing_that_fails_at_the_first_step(fake: FakeDriver) -> None:
    fake.fail("host_register", 1, RESULT)
    with nothing_left(SIZE), pytest.raises(DriverError):
        kvraw.HostPool(SIZE, device=0, options=options(grow=True, first_bytes=MIB))
    assert blocks(fake) == 0


def test_growing_to_the_end(fake: FakeDriver) -> None:
    with nothing_left(SIZE):
        with kvraw.HostPool(SIZE, device=0, options=options(grow=True, first_bytes=MIB)) as pool:
            pool.wait_ready(60)
            assert pool.info()["pinned_bytes"] == SIZE
            assert pool.chunks(1, SIZE)[0].address == pool.address
        for _ in range(20):  # closed at any moment
            kvraw.HostPool(SIZE, device=0, options=options(grow=True, first_bytes=MIB)).close()
        for _ in range(5):
            kvraw.HostPool(SIZE, device=0, options=options(grow=True, first_bytes=MIB))  # and dropped at any
        for thread in [t for t in threading.enumerate() if t.name == "kvraw-grow"]:
            thread.join(60)
    assert blocks(fake) == 0


def aligned(nbytes: int) -> tuple[np.ndarray, int]:
    array = np.zeros(nbytes + 4096, np.uint8)
    return array, int(array.ctypes.data) + -int(array.ctypes.data) % 4096


def test_the_same_range_counts_its_users(fake: FakeDriver) -> None:
    array, start = aligned(8 * 4096)
    one = kvraw.Registration(start, 4 * 4096, 0, step=4096, owner=array)
    two = kvraw.Registration(start, 4 * 4096, 1)
    assert fake.calls["host_register"] == 4
    assert one.device_address == two.device_address
    for begin, pages in ((0, 2), (1, 3), (3, 2), (0, 5)):
        with pytest.raises(kvraw.BoundsError, match="overlaps the registration"):
            kvraw.Registration(start + begin * 4096, pages * 4096, 0)
    with kvraw.Registration(start + 4 * 4096, 4096, 0):
        one.close()
        one.close()
        assert (blocks(fake), registered_bytes()) == (5, (5, 5 * 4096))
    two.close()
    assert (blocks(fake), registered_bytes()) == (0, (0, 0))
    with pytest.raises(kvraw.BoundsError, match="step is 0"):
        kvraw.Registration(start, 4096, 0, step=0)


def test_ranges_that_touch_and_ranges_that_overlap_by_a_byte(fake: FakeDriver) -> None:
    array, start = aligned(8 * 4096)
    with kvraw.Registration(start + 4096, 4096, 0, owner=array):
        for begin, end in ((4095, 4097), (4096 - 64, 4097), (8191, 8193), (0, 12288)):
            with pytest.raises(kvraw.BoundsError, match="overlaps the registration"):
                kvraw.Registration(start + begin, end - begin, 0)
        with kvraw.Registration(start, 4096, 0), kvraw.Registration(start + 8192, 64, 0):
            assert registered_bytes() == (3, 2 * 4096 + 64)
            for address, nbytes, known in ((start + 8255, 1, True), (start + 8256, 1, False), (start - 1, 1, False)):
                assert registration.is_registered(address, nbytes) == known
            assert registration.is_registered(start - 1, 2)


def test_threads_register_one_range(fake: FakeDriver) -> None:
    array, start = aligned(4096)
    for _ in range(50):
        made: list[kvraw.Registration] = []
        gate = threading.Barrier(4)

        def work(gate: threading.Barrier = gate, made: list[kvraw.Registration] = made) -> None:
            gate.wait()
            made.append(kvraw.Registration(start, 4096, 0, owner=array))
            made.pop().close()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert not made
        assert blocks(fake) == 0


def test_where_copies_are_cut(fake: FakeDriver) -> None:
    array, start = aligned(64 * 4096)
    rng = np.random.default_rng(3)
    none = registration.boundaries(np.array([start], np.uint64), np.array([10**6], np.uint64))
    assert [len(v) for v in none] == [0, 0]
    with (
        kvraw.Registration(start + 4096, 10 * 4096, 0, step=3 * 4096, owner=array),
        kvraw.Registration(start + 20 * 4096, 4096, 0),
        kvraw.Registration(start + 21 * 4096, 5 * 4096, 0),
    ):
        ends = [4096 * page for page in (1, 4, 7, 10, 11, 20, 21, 26)]
        at = np.sort(rng.integers(0, 40 * 4096, 500))
        sizes = rng.integers(0, 12 * 4096, 500)
        at[:8], sizes[:8] = ends, 4096
        want = [(i, start + e) for i in range(500) for e in ends if at[i] < e < at[i] + sizes[i]]
        rows, cuts = registration.boundaries((at + start).astype(np.uint64), sizes.astype(np.uint64))
        assert list(zip(rows.tolist(), cuts.tolist(), strict=True)) == want
        assert len(want) > 100
        assert [len(v) for v in registration.boundaries(np.empty(0, np.uint64), np.empty(0, np.uint64))] == [0, 0]
    assert not len(registration.boundaries(np.array([start], np.uint64), np.array([10**6], np.uint64))[0])
    with kvraw.HostBuffer(8192, device=0, options=HostOptions(kind="pinned")) as buffer:
        span = np.array([buffer.address - 4], np.uint64), np.array([8200], np.uint64)
        assert registration.boundaries(*span)[1].tolist() == [buffer.address, buffer.address + 8192]
    assert not len(registration.boundaries(*span)[0])


def test_no_context_appears_because_a_pool_was_made(fake: FakeDriver) -> None:
    for kind in KINDS:
        with kvraw.HostPool(SIZE, options=HostOptions(kind=kind, populate=True)) as pool:  # type: ignore[arg-type]
            assert not pool.pinned
    with kvraw.HostPool(SIZE, pin=False, device=1, options=HostOptions(node="device")):
        pass
    with pytest.raises(kvraw.PlacementError, match="no device is named and no CUDA context exists"):
        kvraw.HostPool(SIZE, pin=True)
    with pytest.raises(kvraw.PlacementError, match="kind is 'pinned', but no device is named"):
        kvraw.HostPool(SIZE, options=HostOptions(kind="pinned"))
    with pytest.raises(kvraw.PlacementError, match="device is -1"):
        kvraw.HostPool(SIZE, device=-1)
    assert not any(fake.primary_active(k) for k in range(2))
    with DeviceScope(1):
        assert kvraw.HostPool(MIB).pinned
    with kvraw.HostPool(MIB, pin=True) as pool:  # in the context that is there
        assert pool.pinned
    assert [fake.primary_active(k) for k in range(2)] == [False, True]


def test_the_node_of_a_gpu(fake: FakeDriver, tmp_path: Path) -> None:
    for device, node in ((0, "1"), (1, "-1")):
        at = tmp_path / f"0000:0{device}:00.0"
        at.mkdir()
        (at / "numa_node").write_text(node + "\n")
    assert [backing.device_node(k, str(tmp_path)) for k in range(3)] == [1, None, None]
    fake.fail("device_pci_address", 1, RESULT)
    assert backing.device_node(0, str(tmp_path)) is None
    (tmp_path / "has_memory").write_text("0-2,5\n")
    assert backing.nodes(str(tmp_path)) == [0, 1, 2, 5]


def test_close_is_bounded_and_names_what_it_waits_for(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.helpers.world import World

    world = World(0)
    pool = kvraw.HostPool(MIB, device=0)
    chunks = pool.chunks(2, world.cache.chunk_bytes(16))
    view = chunks[0].numpy()
    kvraw.store(world.cache, chunks, [1, 2, 3], stream=world.stream)
    with monkeypatch.context() as patch:
        patch.setattr(FakeDriver, "event_done", lambda self, event: False)
        with pytest.raises(
            kvraw.TransferTimeoutError,
            match=rf"the pool at {pool.address:#x} is still used after 0.01 s by transfer on stream "
            rf"{world.stream.handle:#x}",
        ):
            pool.close(timeout=0.01)
        assert pool.pinned
        assert pool.info()["in_flight"] == 1
        with pytest.raises(kvraw.ClosedError):
            pool.chunks(1, 1)
        with pytest.raises(kvraw.ClosedError):
            kvraw.store(world.cache, chunks, [1], stream=world.stream)
    pool.close()
    np.testing.assert_array_equal(view.reshape(world.chunk(0).shape)[:, :, 0], world.paged[:, :, 1].swapaxes(0, 1))
    assert not pool.pinned
    world.close()


def test_a_freed_chunk_waits_for_its_transfer(fake: FakeDriver) -> None:
    from tests.helpers.world import World

    world = World(0)
    with kvraw.HostPool(8192, device=0) as pool:
        nbytes = world.cache.chunk_bytes(4)
        for _ in range(20):
            (chunk,) = pool.chunks(1, nbytes, timeout=60)
            transfer = kvraw.store(world.cache, [chunk], [7], stream=world.stream)
            chunk.free()
            found: list[kvraw.HostChunk] = []
            while not found:
                try:
                    found = pool.chunks(2, 4096)
                except MemoryError:
                    assert pool.info()["waiting"] in (0, 4096)
            assert transfer.done()
            for c in found:
                c.numpy()[:] = 1
            world.stream.synchronize()
            assert all((c.numpy() == 1).all() for c in found)
            pool.free(found)
    world.close()


def test_a_driver_that_does_not_answer_gives_nothing_back(fake: FakeDriver) -> None:
    from tests.helpers.world import World

    world = World(0)
    pool = kvraw.HostPool(4096, device=0)
    (chunk,) = pool.chunks(1, world.cache.chunk_bytes(4))
    kvraw.store(world.cache, [chunk], [7], stream=world.stream)
    fake.fail("event_done", 1, RESULT)
    chunk.free()
    fake.fail("event_done", 1, RESULT)
    with pytest.raises(MemoryError, match="freed but 1 transfers may still use them"):
        pool.chunks(1, 1)
    fake.fail("event_done", 1, RESULT)
    with pytest.raises(DriverError, match="event_done failed"):
        pool.close()
    assert pool.pinned
    pool.close()
    assert not pool.pinned
    world.close()


def test_a_forked_child_keeps_its_hands_off() -> None:
    code = """
import os, sys, warnings
warnings.simplefilter("ignore")
import kvraw
from kvraw.runtime import driver
from kvraw.runtime.host.mapping import HostOptions
from tests.emulator.fake_driver import FakeDriver
driver.install(FakeDriver())
pools = [kvraw.HostPool(1 << 22, device=0, options=HostOptions(kind=k)) for k in ("anonymous", "shared", "pinned")]
chunks = [p.chunks(1, 4096)[0] for p in pools]
for c in chunks:
    c.numpy()[:] = 1
hidden = pools[0].address
pid = os.fork()
if pid == 0:
    with open("/proc/self/maps") as file:
        spans = [[int(x, 16) for x in line.split()[0].split("-")] for line in file]
    assert not any(begin <= hidden < end for begin, end in spans)
    ok = 0
    for p, c in zip(pools, chunks):
        for use in (lambda: p.chunks(1, 8), c.numpy, c.free, lambda: p.pin(0)):
            try:
                use()
            except kvraw.ForkError:
                ok += 1
        p.info(); p.close(); p.close()
    with kvraw.HostPool(1 << 22) as mine:
        mine.chunks(1, 4096)[0].numpy()[:] = 5
    del pools, p, chunks, c
    print(ok, file=sys.stderr)
    os._exit(0 if ok == 12 else 1)
_, status = os.waitpid(pid, 0)
assert all((c.numpy() == 1).all() for c in chunks)
for p in pools:
    p.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
