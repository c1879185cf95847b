"""The block swaps: on the CPU, the emulator and a GPU, whole buffers compared."""

from __future__ import annotations

import numpy as np
import pytest

import kvraw
from kvraw.adapters import vllm
from tests.helpers.torch_like import Tensor, TorchLike

BLOCKS = 20


WAYS = [("device", "pinned"), ("pinned", "device"), ("device", "device"), ("device", "host"), ("host", "device")]


def sides(w: TorchLike, kinds: tuple[str, str], nbytes: int) -> list[tuple[np.ndarray, object]]:
    rng = np.random.default_rng(0)
    kinds = kinds if w.stream is not None else ("host", "host")
    arrays = [rng.integers(0, 256, (BLOCKS, nbytes), dtype=np.uint8) for _ in kinds]
    return [(a, w.put(kind, a)) for kind, a in zip(kinds, arrays, strict=True)]


@pytest.mark.parametrize("nbytes", [1, 48, 4096, 65536])
@pytest.mark.parametrize("kinds", WAYS)
def test_blocks(w: TorchLike, kinds: tuple[str, str], nbytes: int) -> None:
    (a, src), (b, dst) = sides(w, kinds, nbytes)
    mapping = np.array([[3, 0], [4, 1], [19, 7], [0, 19]])
    vllm.swap_blocks(src, dst, nbytes, w.put("host", mapping))
    vllm.swap_blocks(src, dst, nbytes, w.put("host", np.zeros((0, 2), np.int64)))
    b[mapping[:, 1]] = a[mapping[:, 0]]
    for array, tensor in ((a, src), (b, dst)):
        np.testing.assert_array_equal(w.take(tensor), array)  # type: ignore[arg-type]
    with pytest.raises(kvraw.BoundsError, match=r"block_mapping\[:, 1\]\[0\] is 20, must be in \[0, 20\)"):
        vllm.swap_blocks(src, dst, nbytes, w.put("host", np.array([[0, 20]])))
    with pytest.raises(kvraw.LayoutError, match=r"block_mapping has shape \(2,\)"):
        vllm.swap_blocks(src, dst, nbytes, w.put("host", np.array([0, 1])))
    with pytest.raises(TypeError, match="block_mapping holds float64, must hold integers"):
        vllm.swap_blocks(src, dst, nbytes, w.put("host", np.array([[0.5, 1.5]])))
    for array, tensor in ((a, src), (b, dst)):
        np.testing.assert_array_equal(w.take(tensor), array)  # type: ignore[arg-type]


@pytest.mark.parametrize("kinds", WAYS)
@pytest.mark.parametrize("nbytes", [48, 4096])
@pytest.mark.parametrize("padded", ["src", "dst", "both"])
def test_rows_with_padding(w: TorchLike, kinds: tuple[str, str], nbytes: int, padded: str) -> None:
    """The stride of rows is kept to, on both sides, and padding that is not counted stays; counted, it goes along."""
    sides_ = sides(w, kinds, nbytes + 16 * (padded == "both"))
    arrays, views = [], []
    for name, (array, tensor), kind in zip(("src", "dst"), sides_, kinds, strict=True):
        if padded == name:
            array = np.random.default_rng(3).integers(0, 256, (BLOCKS, nbytes + 16), dtype=np.uint8)
            tensor = w.put(kind if w.stream is not None else "host", array)
        arrays.append((array, tensor))
        gap = array.shape[1] != nbytes
        base = tensor.base  # type: ignore[attr-defined]
        views.append(Tensor(base, 0, (BLOCKS, nbytes), (nbytes + 16, 1), "uint8") if gap else tensor)
    mapping = np.array([[3, 0], [4, 1], [19, 7], [0, 19]])
    vllm.swap_blocks(*views, nbytes, w.put("host", mapping))
    arrays[1][0][mapping[:, 1], :nbytes] = arrays[0][0][mapping[:, 0], :nbytes]
    if padded == "both":
        vllm.swap_blocks(*views, nbytes + 16, w.put("host", np.array([[1, 2]])))
        arrays[1][0][2] = arrays[0][0][1]
    bad = r"block_mapping\[:, 1\]\[0\] is 20, must be in \[0, 20\)"
    with pytest.raises(kvraw.BoundsError, match=bad):
        vllm.swap_blocks(*views, nbytes, w.put("host", np.array([[0, 20]])))
    with pytest.raises(kvraw.LayoutError, match=f"block_size_in_bytes is {nbytes // 2}, must be the {nbytes} bytes of"):
        vllm.swap_blocks(*views, nbytes // 2, w.put("host", np.array([[0, 0]])))
    for array, tensor in arrays:
        np.testing.assert_array_equal(w.take(tensor), array)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", ["one", "three", "many"])
@pytest.mark.parametrize("kinds", WAYS)
def test_batch(w: TorchLike, kinds: tuple[str, str], sizes: str) -> None:
    (a, src), (b, dst) = sides(w, kinds, 512)
    rng = np.random.default_rng(1)
    reads, writes = rng.permutation(BLOCKS)[:12], rng.permutation(BLOCKS)[:12]
    length = {"one": np.full(12, 512), "three": np.arange(12) % 3 * 100, "many": np.arange(12) * 37}[sizes]
    address = [t.data_ptr() + 512 * at for t, at in ((src, reads), (dst, writes))]  # type: ignore[attr-defined]
    given = [w.put("host", np.array(x, np.int64)) for x in (*address, length)]
    vllm.swap_blocks_batch(*given, is_src_access_order_any=True)
    for x, y, n in zip(reads, writes, length, strict=True):
        b[y, :n] = a[x, :n]
    for array, tensor in ((a, src), (b, dst)):
        np.testing.assert_array_equal(w.take(tensor), array)  # type: ignore[arg-type]


def test_batch_checks(w: TorchLike) -> None:
    none, one, two = (w.put("host", np.arange(n)) for n in (0, 1, 2))
    vllm.swap_blocks_batch(none, none, none)
    with pytest.raises(kvraw.BoundsError, match="have 1, 2 and 1 entries"):
        vllm.swap_blocks_batch(one, two, one)
    with pytest.raises(kvraw.BoundsError, match=r"sizes\[0\] is -1"):
        vllm.swap_blocks_batch(one, one, w.put("host", np.array([-1])))
    memory = [w.put(kind, np.zeros(64, np.uint8)) for kind in w.kinds]
    at = [t.data_ptr() for t in memory]
    for src, dst, message in [
        ([at[0], 0, 0], [0, 0, at[1]], r"src_ptrs\[2\] is 0, with its size must be an address"),
        ([at[0], 0, at[0]], [at[1], 0, 0], r"dst_ptrs\[2\] is 0, with its size must be an address"),
        ([0, 0, at[0]], [0, 0, 2**64 - 4], r"dst_ptrs\[2\] is 18446744073709551612, with its size must be"),
    ]:
        given = [w.put("host", np.array(x, np.uint64)) for x in (src, dst, [0, 0, 8])]
        with pytest.raises(kvraw.BoundsError, match=message):
            vllm.swap_blocks_batch(*given)
    with pytest.raises(RuntimeError, match="sizes must be an int64 tensor on the CPU"):
        vllm.swap_blocks_batch(one, one, w.put("host", np.zeros(1, np.int32)))


def test_entries_of_no_bytes(w: TorchLike) -> None:
    (a, src), (b, dst) = sides(w, ("device", "pinned"), 64)
    at = [0, src.data_ptr(), 0, src.data_ptr() + 128]  # type: ignore[attr-defined]
    to = [0, dst.data_ptr() + 64, 0, dst.data_ptr()]  # type: ignore[attr-defined]
    for sizes in ([0, 64, 0, 64], [0, 0, 0, 0]):
        vllm.swap_blocks_batch(*(w.put("host", np.array(x, np.int64)) for x in (at, to, sizes)))
    b[[1, 0]] = a[[0, 2]]
    np.testing.assert_array_equal(w.take(dst), b)  # type: ignore[arg-type]


def scattered(w: TorchLike, sizes: list[int]) -> list[object]:
    """Entries of different sizes, 256 bytes apart, the first two after each other; pinned memory goes on."""
    src, dst = w.empty("device", (len(sizes), 256)), w.empty("pinned", (len(sizes) + 1, 256))
    given = []
    for t in (src, dst):
        at = [t.data_ptr() + 256 * k for k in range(len(sizes))]
        at[0] = at[1] - sizes[0]
        given.append(w.put("host", np.array(at)))
    w.kept = src, dst  # type: ignore[attr-defined]
    return [*given, w.put("host", np.array(sizes))]


@pytest.mark.parametrize(("most", "calls"), [("", 1), ("0", 1), ("4", 3), ("1", 9), ("100", 1)])
def test_the_most_descriptors_of_a_call(fake: object, monkeypatch: pytest.MonkeyPatch, most: str, calls: int) -> None:
    w = TorchLike(0).install(monkeypatch)
    given = scattered(w, list(range(1, 11)))
    monkeypatch.setenv("VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS", most)
    before = fake.calls["memcpy_batch_async"]  # type: ignore[attr-defined]
    vllm.swap_blocks_batch(*given)
    assert fake.calls["memcpy_batch_async"] == before + calls  # type: ignore[attr-defined]
    monkeypatch.setenv("VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS", "all")
    with pytest.raises(ValueError, match="VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS='all' must be a number"):
        vllm.swap_blocks_batch(*given)


@pytest.mark.parametrize("most", ["", "3"])
def test_the_entry_that_is_refused(fake: object, monkeypatch: pytest.MonkeyPatch, most: str) -> None:
    """Counted as the caller counts: entries of no bytes, and neighbours that went as one, included."""
    w = TorchLike(0).install(monkeypatch)
    sizes = [16, 8, 0, 24, 40, 0, 56, 72, 300]  # the last goes over the end of the device's memory
    monkeypatch.setenv("VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS", most)
    before = fake.calls["memcpy_batch_async"]  # type: ignore[attr-defined]
    with pytest.raises(kvraw.BoundsError, match=r"src_ptrs\[8\] is 0x.*with 300 bytes it goes over the end"):
        vllm.swap_blocks_batch(*scattered(w, sizes))
    assert fake.calls["memcpy_batch_async"] == before  # type: ignore[attr-defined]
    real, sizes[8] = fake.memcpy_batch_async, 100  # type: ignore[attr-defined]

    def refusing(dst: np.ndarray, src: np.ndarray, n: np.ndarray, stream: int) -> None:
        real(dst, src, n, stream)
        if 100 in n:
            raise kvraw.DriverError("CUDA_ERROR_INVALID_VALUE", 1, "cuMemcpyBatchAsync", index=n.tolist().index(100))

    monkeypatch.setattr(fake, "memcpy_batch_async", refusing)
    with pytest.raises(kvraw.DriverError, match=r"failed at descriptor 8: .*100 bytes at 0x.*device 0") as caught:
        vllm.swap_blocks_batch(*scattered(w, sizes))
    assert caught.value.index == 8


def test_small_blocks_take_the_kernel_and_large_ones_the_copy_engine(
    fake: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = TorchLike(0).install(monkeypatch)
    for nbytes, used in ((4096, "launch"), (32 << 20, "memcpy_batch_async")):
        src, dst = w.empty("device", (2, nbytes)), w.empty("pinned", (2, nbytes))
        given = [[t.data_ptr(), t.data_ptr() + nbytes] for t in (src, dst)]
        before = fake.calls[used]  # type: ignore[attr-defined]
        vllm.swap_blocks_batch(*(w.put("host", np.array(x)) for x in (given[0], given[1][::-1], [nbytes] * 2)))
        assert fake.calls[used] == before + 1  # type: ignore[attr-defined]
        w.synchronize()
