"""Bad input: a clear error that names the argument, the value and the bound, and nothing moved."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest

import kvraw
from kvraw.layouts.geometry import Geometry

G = Geometry(layers=2, blocks=6, block_size=4, heads=2, head_size=8, element_size=2)


class World:
    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.paged = rng.integers(0, 255, (2, 2, 6, 4, 2, 16), dtype=np.uint8)
        self.cache = kvraw.PagedCache.from_pointers([int(t.ctypes.data) for t in self.paged], 1, G)
        self.chunks = [rng.integers(0, 255, self.cache.chunk_bytes(8), dtype=np.uint8) for _ in range(2)]
        self.before = self.paged.copy(), [c.copy() for c in self.chunks]

    def assert_untouched(self) -> None:
        np.testing.assert_array_equal(self.paged, self.before[0])
        for now, then in zip(self.chunks, self.before[1], strict=True):
            np.testing.assert_array_equal(now, then)


@pytest.fixture
def world() -> World:
    return World()


BAD_IDS = [
    ([0, 6], r"block_ids\[1\] is 6, must be in \[0, 6\)"),
    ([-1, 2], r"block_ids\[0\] is -1, must be in \[0, 6\)"),
    ([2**62], r"block_ids\[0\] is 4611686018427387904"),
    ([0, 1, 2, 3, 4], r"chunks has 2 chunks of 2 blocks each, too few for 5 block_ids"),
]


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("verb", ["store", "load"])
@pytest.mark.parametrize(("ids", "message"), BAD_IDS)
def test_bad_block_ids(world: World, verb: str, engine: str, ids: list[int], message: str) -> None:
    for error in (kvraw.BoundsError, ValueError, IndexError):
        with pytest.raises(error, match=message):
            getattr(kvraw, verb)(world.cache, world.chunks, ids, engine=engine)
    world.assert_untouched()


@pytest.mark.parametrize("skip", [2, np.int8(2)])
def test_bad_ids_behind_the_skip_do_not_matter(world: World, skip: int) -> None:
    kvraw.store(world.cache, world.chunks, [99, -5, 3], skip_blocks=skip)
    np.testing.assert_array_equal(world.chunks[0], world.before[1][0])  # both of its blocks are left out
    half = world.chunks[1].reshape(2, 2, 2, 4, 2, 16)  # plane, layer, block
    np.testing.assert_array_equal(half[:, :, 0], world.paged[:, :, 3].swapaxes(0, 1))
    np.testing.assert_array_equal(half[:, :, 1], world.before[1][1].reshape(half.shape)[:, :, 1])


@pytest.mark.parametrize("verb", ["store", "load"])
def test_bad_skips(world: World, verb: str) -> None:
    for skip, error, said in (
        (-1, kvraw.BoundsError, "is -1, must be >= 0"),
        (0.5, TypeError, "is 0.5, must be an int"),
    ):
        for name, call in (("blocks", getattr(kvraw, verb)), ("tokens", getattr(kvraw, f"{verb}_slots"))):
            with pytest.raises(error, match=rf"skip_{name} \(of a plan: skip\) {said}"):
                call(world.cache, world.chunks, [1], **{f"skip_{name}": skip})
    world.assert_untouched()


def test_bad_slots(world: World) -> None:
    with pytest.raises(kvraw.BoundsError, match=r"slots\[2\] is 24, must be in \[0, 24\) \(or negative: left out\)"):
        kvraw.load_slots(world.cache, world.chunks, [-1, 0, 24])
    world.assert_untouched()


def test_duplicate_ids_are_an_error_in_a_load_only(world: World) -> None:
    with pytest.raises(kvraw.BoundsError, match="block_ids has 3 more than once"):
        kvraw.load(world.cache, world.chunks, [3, 1, 3])
    world.assert_untouched()
    kvraw.store(world.cache, world.chunks, [3, 1, 3])
    kvraw.load_slots(world.cache, world.chunks, [-1, -1, 2])


def test_checks_can_be_turned_off(world: World) -> None:
    kvraw.load(world.cache, world.chunks, [3, 1, 3], check=False)
    first, last = (chunk.reshape(2, 2, 2, 4, 2, 16).swapaxes(0, 1) for chunk in world.chunks)
    np.testing.assert_array_equal(world.paged[:, :, 1], first[:, :, 1])
    twice = world.paged[:, :, 3]  # which of its two writers wins is left open
    assert ((twice == first[:, :, 0]) | (twice == last[:, :, 0])).all()


def test_objects_of_the_wrong_size(world: World) -> None:
    with pytest.raises(kvraw.BoundsError, match=r"chunks\[1\] has 1023 bytes, must have 1024"):
        kvraw.store(world.cache, [world.chunks[0], world.chunks[1][1:]], [0, 1, 2])
    with pytest.raises(kvraw.BoundsError, match=r"chunks\[0\] has 1023 bytes, must be a multiple of 128"):
        kvraw.store(world.cache, [world.chunks[0][1:]], [0])
    with pytest.raises(kvraw.LayoutError, match="must be a positive multiple of the block size 4"):
        kvraw.store(world.cache, [world.chunks[0][: 128 * 6]], [0])
    world.assert_untouched()


def test_chunks_with_gaps(world: World) -> None:
    with pytest.raises(kvraw.LayoutError, match=r"chunks\[0\] has shape .* must have no gaps"):
        kvraw.store(world.cache, [np.zeros((2048, 2), np.uint8)[:, 0]], [0], chunk_tokens=8)


def test_addresses_need_a_size(world: World) -> None:
    where = [int(c.ctypes.data) for c in world.chunks]
    with pytest.raises(kvraw.LayoutError, match="pass chunk_tokens="):
        kvraw.store(world.cache, where, [0])
    kvraw.store(world.cache, where, [0], chunk_tokens=8)
    with pytest.raises(kvraw.BoundsError, match=r"chunks\[0\] is 0"):
        kvraw.store(world.cache, [0], [0], chunk_tokens=8)


def test_a_closed_pool(world: World) -> None:
    pool = kvraw.HostPool(1 << 16)
    chunks = pool.chunks(2, world.cache.chunk_bytes(8))
    kvraw.store(world.cache, chunks, [0, 1])
    pool.close()
    pool.close()
    for use in (
        lambda: kvraw.store(world.cache, chunks, [0, 1]),
        lambda: pool.chunks(1, 8),
        lambda: chunks[0].numpy(),
        lambda: chunks[0].free(),
    ):
        with pytest.raises(kvraw.ClosedError, match="the pool is closed"):
            use()


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([0.5], TypeError, "block_ids holds float64"),
        ([True], TypeError, "block_ids holds bool"),
        ([[0]], kvraw.BoundsError, "block_ids has 2 axes"),
        (np.array([2**63], np.uint64), kvraw.BoundsError, "block_ids holds 9223372036854775808"),
        ([2**70], kvraw.BoundsError, rf"block_ids\[0\] is {2**70}, must be in \[-2\*\*63, 2\*\*63\)"),
        ([1, 2**64], kvraw.BoundsError, rf"block_ids\[1\] is {2**64}, must be in"),
        ([-(2**70)], kvraw.BoundsError, rf"block_ids\[0\] is -{2**70}, must be in"),
        (np.array([1, None]), TypeError, "block_ids holds object"),
    ],
)
def test_what_is_no_index(world: World, ids: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kvraw.store(world.cache, world.chunks, ids)
    world.assert_untouched()


@pytest.mark.parametrize("ids", [np.array([3, 5], np.int32), [3, 5], (3, 5), np.array([3, 0, 5], np.int64)[::2]])
def test_what_is_an_index(world: World, ids: object) -> None:
    kvraw.store(world.cache, world.chunks, ids)
    got = world.chunks[0].reshape(2, 2, 8, 32)
    want = world.paged[:, :, [3, 5]].transpose(1, 0, 2, 3, 4, 5).reshape(2, 2, 8, 32)
    np.testing.assert_array_equal(got, want)


def test_pointers_must_fit_the_format() -> None:
    with pytest.raises(kvraw.BoundsError, match="pointers has 3 addresses"):
        kvraw.PagedCache.from_pointers([1, 2, 3], 1, G)
    with pytest.raises(kvraw.BoundsError, match=r"pointers\[1\] is null"):
        kvraw.PagedCache.from_pointers([64, 0], 1, G)
    with pytest.raises(kvraw.LayoutError, match="format 99 is unknown"):
        kvraw.PagedCache.from_pointers([1, 2], 99, G)
    with pytest.raises(kvraw.LayoutError, match="blocks are not the outermost axis"):
        kvraw.PagedCache.from_pointers([1, 2], 1, Geometry(2, 6, 4, 2, 8, 2, block_stride=4096))
    with pytest.raises(kvraw.LayoutError, match="block_stride is 8 bytes, a block takes 256"):
        kvraw.PagedCache.from_pointers([1, 2], 2, Geometry(2, 6, 4, 2, 8, 2, block_stride=8))


@pytest.mark.parametrize("options", [{"engine": "gpu"}, {"chunk_layout": "TD"}])
def test_unknown_names_list_the_known(world: World, options: dict[str, str]) -> None:
    with pytest.raises(kvraw.LayoutError, match=r"gpu.*reference|TD.*2LTD"):
        kvraw.store(world.cache, world.chunks, [0], **options)


def test_the_kernel_engine_wants_a_cache_on_a_gpu(world: World) -> None:
    with pytest.raises(kvraw.PlacementError, match="the cache is in host memory"):
        kvraw.store(world.cache, world.chunks, [0], engine="kernel", stream=1)


def test_the_cpu_engine_wants_a_cache_on_the_host() -> None:
    cache = kvraw.PagedCache.from_pointers([4096, 8192], 1, G, device=0)
    for engine in ("cpu", "reference"):
        with pytest.raises(kvraw.PlacementError, match="memory of device 0"):
            kvraw.store(cache, [4096], [0], chunk_tokens=8, engine=engine)


def test_no_ids_is_a_no_op(world: World) -> None:
    for chunks in ([], world.chunks):
        kvraw.store(world.cache, chunks, []).wait()
        kvraw.load(world.cache, chunks, np.zeros(0, np.int64)).wait()
        kvraw.load_slots(world.cache, chunks, []).wait()
    kvraw.store(world.cache, world.chunks, [1, 2], skip_blocks=7).wait()
    world.assert_untouched()


@pytest.mark.parametrize("dtype", [object, [("what", object), ("size", np.int64)]])
def test_arrays_of_python_objects_are_refused(world: World, dtype: object) -> None:
    size = world.cache.chunk_bytes(8) // np.dtype(dtype).itemsize
    objects = np.empty(size, dtype)
    before = objects.copy()
    for tokens in (None, 8):
        for verb in ("store", "load"):
            with pytest.raises(TypeError, match=r"chunks\[0\] holds Python objects"):
                getattr(kvraw, verb)(world.cache, [objects], [0], chunk_tokens=tokens)
    with pytest.raises(TypeError, match=r"tensors\[1\] holds Python objects"):
        kvraw.PagedCache.from_tensors([world.paged[0], np.empty((2, 6, 4, 2, 16), dtype)])
    assert (objects == before).all()
    world.assert_untouched()


def test_an_array_of_chunks_is_not_their_memory(world: World) -> None:
    with kvraw.HostPool(1 << 16) as pool:
        chunks = pool.chunks(2, world.cache.chunk_bytes(8))
        with pytest.raises(TypeError, match="chunks is a ndarray, must be a sequence of chunks"):
            kvraw.store(world.cache, np.array(chunks, object), [0])
        with pytest.raises(TypeError, match=r"chunks\[0\] holds Python objects"):
            kvraw.store(world.cache, [np.array([chunks], object)], [0])


@pytest.mark.parametrize("kind", ["bytes", "view", "array"])
def test_read_only_memory_is_a_source_only(world: World, kind: str) -> None:
    held = world.chunks[0].tobytes()
    chunk: object = {"bytes": held, "view": memoryview(held), "array": np.frombuffer(held, np.uint8)}[kind]
    with pytest.raises(kvraw.PlacementError, match=r"chunks\[1\] is read-only memory, must be writable"):
        kvraw.store(world.cache, [world.chunks[1], chunk], [0, 1, 2])
    world.assert_untouched()
    assert held == world.chunks[0].tobytes()
    kvraw.load(world.cache, [chunk], [3])
    want = world.before[0]
    want[:, :, 3] = world.chunks[0].reshape(2, 2, 8, 2, 16)[:, :, :4].transpose(1, 0, 2, 3, 4)
    world.assert_untouched()


def test_a_read_only_cache_is_a_source_only(world: World) -> None:
    tensors = [world.paged[0], world.paged[1].view()]
    tensors[1].flags.writeable = False
    cache = kvraw.PagedCache.from_tensors([t.view(np.int16) for t in tensors], axes="PBTHD")
    with pytest.raises(kvraw.PlacementError, match="cache holds a read-only tensor"):
        kvraw.load(cache, world.chunks, [0])
    host = kvraw.HostKVPool.like(cache, 8, layout="page_first")
    slots = host.alloc(8)
    host.backup(cache, np.arange(8), slots).wait()
    for load in (host.load, host.load_layers):
        with pytest.raises(kvraw.PlacementError, match="cache holds a read-only tensor"):
            load(cache, slots, np.arange(8))
    host.close()
    world.assert_untouched()
    kvraw.store(cache, world.chunks, [1])
    got = world.chunks[0].reshape(2, 2, 8, 2, 16)[:, :, :4]
    np.testing.assert_array_equal(got, world.paged[:, :, 1].transpose(1, 0, 2, 3, 4))


def test_what_stands_for_memory_is_neither_copied_nor_pickled(world: World) -> None:
    with kvraw.HostPool(1 << 16) as pool, kvraw.HostBuffer(4096) as buffer:
        (chunk,) = pool.chunks(1, world.cache.chunk_bytes(8))
        plan = kvraw.TransferPlan(world.cache, "store", chunk_tokens=8)
        host = kvraw.HostKVPool.like(world.cache, 8, layout="layer_first")
        for one in (world.cache, plan, plan([chunk], [0]), pool, buffer, chunk, host):
            for way in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"a {type(one).__name__} stands for memory of this process"):
                    way(one)
    assert copy.deepcopy(G) == pickle.loads(pickle.dumps(G)) == G


def test_an_empty_call_does_not_tell_the_size_of_addresses(world: World) -> None:
    kvraw.store(world.cache, [], [])
    with pytest.raises(kvraw.LayoutError, match="pass chunk_tokens="):
        kvraw.store(world.cache, [int(world.chunks[0].ctypes.data)], [0])
    world.assert_untouched()


def test_tensors_end_with_the_last_reference_to_their_cache() -> None:
    class Held(np.ndarray):
        """An array that can be watched."""

    gc.collect()
    gc.disable()
    try:
        for by_plan in (False, True):
            tensors = [np.zeros((2, 6, 4, 2, 8), np.int16).view(Held) for _ in range(2)]
            seen = weakref.ref(tensors[1])
            cache = kvraw.PagedCache.from_tensors(tensors, axes="PBTHD")
            chunk = np.zeros(cache.chunk_bytes(8), np.uint8)
            kvraw.store(cache, [chunk], [1, 2])
            transfer = kvraw.load(cache, [chunk], [1])
            plan = kvraw.TransferPlan(cache, "store", chunk_tokens=8) if by_plan else None
            del tensors, cache
            assert seen() is not None  # the transfer, or the plan, is the user's
            del transfer
            if plan is not None:
                plan([chunk], [1])
                assert plan.cache.device is None
                del plan
            assert seen() is None
    finally:
        gc.enable()


def test_a_chunk_is_stored_to_once(world: World) -> None:
    first = world.chunks[0]
    where = int(first.ctypes.data)
    with kvraw.HostPool(1 << 16) as pool:
        a, b = pool.chunks(2, world.cache.chunk_bytes(8))
        a.numpy()[:] = 3
        for row, ids in (
            ([first, first], [0, 1, 2]),
            ([first, where], [0, 1, 2]),
            ([a, a], [0, 1, 2]),
            ([a, first, a], range(5)),
        ):
            with pytest.raises(kvraw.BoundsError, match=rf"chunks\[{len(row) - 1}\] and chunks\[0\] both begin at 0x"):
                kvraw.store(world.cache, row, ids, chunk_tokens=8)
            world.assert_untouched()
        assert (a.numpy() == 3).all()
        # What a store does not write may stand anywhere, and so may what a load reads.
        kvraw.store(world.cache, [a, a, b], [0, 1, 2, 3, 4], skip_blocks=2)
        kvraw.store(world.cache, [a, a], [0, 1])
        kvraw.store(world.cache, [a, a], [0, 1, 2], check=False)
        kvraw.load(world.cache, [a, a], [0, 1, 2])
        np.testing.assert_array_equal(world.paged[:, :, 0], world.paged[:, :, 2])


def test_a_tensor_is_one_layer(world: World) -> None:
    tensors = [t.view(np.int16) for t in world.paged]
    with pytest.raises(kvraw.BoundsError, match=r"tensors: addresses 1 and 2 are both 0x"):
        kvraw.PagedCache.from_tensors([*tensors, tensors[1]], axes="PBTHD")
    with pytest.raises(kvraw.BoundsError, match=r"pointers: addresses 0 and 1 are both 0x40"):
        kvraw.PagedCache.from_pointers([64, 64], 1, G)


@pytest.mark.parametrize(
    "error",
    [
        kvraw.DriverError("CUDA_ERROR_OUT_OF_MEMORY", 2, "cuMemAlloc"),
        kvraw.DriverError("CUDA_ERROR_INVALID_VALUE", 1, "cuMemcpyBatchAsync", "invalid argument", 7),
        kvraw.BoundsError("x is 3"),
        kvraw.HostMemoryError("none left"),
    ],
)
def test_errors_come_back_from_another_process(error: Exception) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        if isinstance(error, kvraw.DriverError):
            on_error = (error.name, error.code, error.call, error.index)
            assert (other.name, other.code, other.call, other.index) == on_error


def test_one_chunk_is_no_row(world: World) -> None:
    with kvraw.HostPool(1 << 16) as pool:
        (chunk,) = pool.chunks(1, world.cache.chunk_bytes(8))
        for tokens in (None, 8):
            with pytest.raises(TypeError, match="chunks is a HostChunk, must be a sequence of chunks"):
                kvraw.store(world.cache, chunk, [0], chunk_tokens=tokens)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="chunks is a NoneType, must be a sequence of chunks"):
                kvraw.load(world.cache, None, [0], chunk_tokens=tokens)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="chunks is a HostChunk, must be a sequence of chunks"):
            pool.free(chunk)  # type: ignore[arg-type]
        assert pool.info()["chunks"] == 1


def test_the_engine_is_that_of_the_time_when_a_plan_is_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kvraw.store(world.cache, world.chunks, [0]).engine == "cpu"
    monkeypatch.setenv("KVRAW_ENGINE", "reference")
    assert kvraw.store(world.cache, world.chunks, [0]).engine == "cpu"
    assert kvraw.load(world.cache, world.chunks, [0]).engine == "reference"
    assert kvraw.TransferPlan(world.cache, "store", chunk_tokens=8)(world.chunks, [0]).engine == "reference"
