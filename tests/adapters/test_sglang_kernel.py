"""The kernel operations, every layout pair: on the CPU, on the emulator and on a GPU, whole buffers compared."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest

import kvraw
from kvraw.adapters import sglang, tensors
from kvraw.copying import pointer_tables
from tests.helpers.sglang_case import BY_NAME, DST, LAYERS, OPS, SRC, TOKENS, Case, Op
from tests.helpers.torch_like import Tensor, TorchLike


@pytest.mark.parametrize("way", ["load", "store", "on one side", "through the host"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_pair_of_layouts(w: TorchLike, op: Op, way: str) -> None:
    on, off = w.kinds
    kinds = {"load": (off, on), "store": (on, off), "on one side": (on, on), "through the host": (off, off)}[way]
    case = Case(w, op, kinds)
    for layer, src in ((1, SRC), (2, SRC[::-1])):
        case.call(src, DST, layer)
        case.expect(src, DST, layer)


@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (8, 3), (2, 12), (4, 2), (3, 40), (2, 576)])
@pytest.mark.parametrize("page", [1, 3, 24])
@pytest.mark.parametrize("op", [op for op in OPS if op.paged], ids=lambda op: op.name)
def test_heads_of_any_bytes_and_pages_of_any_size(w: TorchLike, op: Op, page: int, heads: int, dim: int) -> None:
    case = Case(w, op, w.kinds if op.all_layers else w.kinds[::-1], page, heads, dim)
    case.call(SRC, DST, 1)
    case.expect(SRC, DST, 1)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_no_items(w: TorchLike, op: Op) -> None:
    case = Case(w, op, w.kinds)
    case.call([], [], 0)
    case.compare()


@pytest.mark.parametrize("quota", [1, 2, 5])
@pytest.mark.parametrize("warps", [1, 7, 32])
def test_quota_and_warps(fake: object, monkeypatch: pytest.MonkeyPatch, quota: int, warps: int) -> None:
    w = TorchLike(0).install(monkeypatch)
    shapes = []
    launch = fake.launch  # type: ignore[attr-defined]
    monkeypatch.setattr(
        fake, "launch", lambda k, ctas, threads, s, p: (shapes.append((ctas, threads)), launch(k, ctas, threads, s, p))
    )
    case = Case(w, BY_NAME["transfer_kv_all_layer_lf_ph"], w.kinds, heads=8, dim=64)
    ids = list(range(TOKENS))
    case.call(ids, ids[::-1], block_quota=quota, num_warps_per_block=warps)
    case.expect(ids, ids[::-1])
    ((ctas, threads),) = shapes
    assert ctas == quota
    assert threads <= warps * 32


def test_the_quota_of_the_environment(fake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    w = TorchLike(0).install(monkeypatch)
    case = Case(w, BY_NAME["transfer_kv_per_layer_mla"], w.kinds[::-1])
    monkeypatch.setenv("SGLANG_HICACHE_BLOCK_QUOTA", "many")
    with pytest.raises(ValueError, match="SGLANG_HICACHE_BLOCK_QUOTA='many'"):
        case.call(SRC, DST)
    monkeypatch.setenv("SGLANG_HICACHE_BLOCK_QUOTA", "0")
    with pytest.raises(kvraw.BoundsError, match="block_quota is 0"):
        case.call(SRC, DST)
    case.call(SRC, DST, block_quota=1)
    case.expect(SRC, DST)


def test_tables_anywhere_and_with_any_alignment(w: TorchLike) -> None:
    """K before V and V before K, tables learnt between calls, bases that are 8-byte aligned only."""
    op = BY_NAME["transfer_kv_all_layer"]
    case = Case(w, op, w.kinds, heads=2, dim=32)
    for _ in range(3):
        case.call(SRC, DST)
        case.expect(SRC, DST)
    for side in (0, 1):
        case.arrays[side].reverse()
        case.tensors[side].reverse()
    case.call(SRC, DST)
    case.expect(SRC, DST)
    rng = np.random.default_rng(1)
    flat = [rng.integers(0, 256, LAYERS * TOKENS * 64 + 64, dtype=np.uint8) for _ in range(2)]
    memory = [w.put(kind, a) for kind, a in zip(w.kinds, flat, strict=True)]
    tables = []
    for t in memory:
        rows = [Tensor(t.base, 8 + k * TOKENS * 64, (TOKENS, 64), (64, 1), "uint8") for k in range(LAYERS)]
        tables.append(w.table(w.kinds[0], rows))
    ids = [w.put(w.kinds[0], np.array(x, np.int64)) for x in (SRC, DST)]
    for _ in range(3):  # the alignment is known from the second call on
        sglang.transfer_kv_all_layer_mla(*tables, *ids, item_size=64, num_layers=LAYERS)
        w.synchronize()
    views = [a[8 : 8 + LAYERS * TOKENS * 64].reshape(LAYERS, TOKENS, 64) for a in flat]
    views[1][:, DST] = views[0][:, SRC]
    for t, a in zip(memory, flat, strict=True):
        np.testing.assert_array_equal(w.take(t), a)


def test_a_known_table_is_not_asked_again(fake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    w = TorchLike(0).install(monkeypatch)
    memory = w.put(
        "device", np.arange(LAYERS * TOKENS * 64, dtype=np.int64).astype(np.uint8).reshape(LAYERS, TOKENS, 64)
    )
    host = w.put("pinned", np.zeros((LAYERS, TOKENS, 64), np.uint8))
    table = w.table("device", [memory[k] for k in range(LAYERS)])
    to = w.table("device", [host[k] for k in range(LAYERS)])
    ids = w.put("device", np.arange(4))
    names = []
    launch = fake.launch  # type: ignore[attr-defined]
    kernels = fake._kernels  # type: ignore[attr-defined]
    monkeypatch.setattr(fake, "launch", lambda k, *a: (names.append(kernels[k][1]), launch(k, *a)))
    copies = []
    for _ in range(3):
        before = fake.calls["memcpy_async"]  # type: ignore[attr-defined]
        sglang.transfer_kv_all_layer_mla(table, to, ids, ids, item_size=64, num_layers=LAYERS)
        copies.append(fake.calls["memcpy_async"] - before)  # type: ignore[attr-defined]
        w.synchronize()
    assert copies == [2, 0, 0]
    assert names[0].endswith("_v8")
    assert names[-1].endswith("_v16")
    table._version += 1
    sglang.transfer_kv_all_layer_mla(table, to, ids, ids, item_size=64, num_layers=LAYERS)
    w.synchronize()
    assert names[-1].endswith("_v8")
    known = len(pointer_tables._tables)
    tensors.device_state(0).completions.drain()
    del table
    gc.collect()
    assert len(pointer_tables._tables) < known


def test_a_table_made_in_inference_mode(fake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells when such a table is changed: its alignment is not learnt."""

    class Untold(Tensor):
        @property
        def _version(self) -> int:
            raise RuntimeError("Inference tensors do not track version counter.")

        @_version.setter
        def _version(self, value: int) -> None: ...

    w = TorchLike(0).install(monkeypatch)
    case = Case(w, BY_NAME["transfer_kv_all_layer"], w.kinds)
    table = w.table

    def untold(kind: str, layers: list[Tensor]) -> Tensor:
        t = table(kind, layers)
        return Untold(t.base, 0, t.shape, t.stride(), "uint64")

    monkeypatch.setattr(w, "table", untold)
    before = fake.calls["memcpy_async"]  # type: ignore[attr-defined]
    for _ in range(2):
        case.call(SRC, DST)
    assert fake.calls["memcpy_async"] - before == 2 * 6  # type: ignore[attr-defined]  # the test's own
    case.expect(SRC, DST)


def test_tables_on_the_host_with_a_gpu(fake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    w = TorchLike(0).install(monkeypatch)
    op = BY_NAME["transfer_kv_all_layer"]
    case = Case(w, op, w.kinds)
    table = w.table
    monkeypatch.setattr(w, "table", lambda kind, layers: table("host", layers))
    case.call(SRC, DST)
    case.expect(SRC, DST)


@pytest.mark.parametrize("op", [op for op in OPS if not op.all_layers], ids=lambda op: op.name)
def test_a_bad_index_is_left_out_and_raised_later(w: TorchLike, op: Op, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(w, op, w.kinds[::-1])
    bad = [5, TOKENS, 23]
    message = rf"src_indices\[1\] is {TOKENS}, must be in \[0, {TOKENS}\)"
    if w.stream is None:
        with pytest.raises(kvraw.BoundsError, match=message):
            case.call(bad, DST[:3])
        case.compare()
        return
    with caplog.at_level(logging.ERROR, "kvraw"):
        case.call(bad, DST[:3])
        case.expect([5, 23], [DST[0], DST[2]])
        with pytest.raises(kvraw.BoundsError, match=message):
            case.call(SRC, DST)
    assert any("src_indices[1]" in r.getMessage() for r in caplog.records)
    case.compare()
    case.call(SRC, DST)
    case.expect(SRC, DST)


def test_a_negative_index_behind_a_table(w: TorchLike) -> None:
    case = Case(w, BY_NAME["transfer_kv_all_layer"], w.kinds)
    if w.stream is None:
        with pytest.raises(kvraw.BoundsError, match=r"dst_indices\[0\] is -1"):
            case.call([3], [-1])
        return
    case.call([3], [-1])
    w.synchronize()
    with pytest.raises(kvraw.BoundsError, match=r"dst_indices\[0\] is -1"):
        case.call([3], [1])
    case.compare()


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"item_size": 44}, RuntimeError, "Item byte size must be divisible by 8"),
        ({"item_size": 0}, kvraw.BoundsError, "item_size is 0"),
        ({"head_num": 5}, kvraw.LayoutError, "item_size is 48, must be a multiple of head_num, 5"),
        ({"head_num": 0}, kvraw.BoundsError, "head_num 0"),
        ({"page_size": 0}, kvraw.BoundsError, "page_size 0"),
        ({"layer_id": LAYERS}, kvraw.BoundsError, "src_layout_dim is 144, must be .* holds layers 3 to 4"),
        ({"layer_id": -1}, kvraw.BoundsError, "layers -1 to 0"),
        ({"src_layout_dim": 100}, kvraw.BoundsError, "src_layout_dim is 100"),
        ({"block_quota": 0}, kvraw.BoundsError, "block_quota is 0"),
        ({"num_warps_per_block": 33}, kvraw.BoundsError, "num_warps_per_block 33"),
    ],
)
def test_bad_numbers(w: TorchLike, more: dict[str, object], error: type[Exception], message: str) -> None:
    case = Case(w, BY_NAME["transfer_kv_per_layer_ph_lf"], w.kinds[::-1])
    with pytest.raises(error, match=message):
        case.call(SRC, DST, **more)
    case.compare()


def test_the_checks_that_the_peer_has(fake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    w = TorchLike(0).install(monkeypatch)
    memory, ids = w.put("device", np.zeros((8, 16), np.uint8)), w.put("device", np.arange(3))
    host_ids, short = w.put("host", np.arange(3)), w.put("device", np.arange(2))
    ints = w.put("device", np.arange(3, dtype=np.int32))
    table = w.table("device", [memory, memory])
    one = sglang.transfer_kv_per_layer_mla
    for src, dst, message in [
        (host_ids, ids, "Source indices must be a CUDA tensor"),
        (ids, host_ids, "Destination indices must be a CUDA tensor"),
        (ints, ids, "Source indices must be of type long"),
        (ids, ints, "Destination indices must be of type long"),
        (ids, short, "Source and destination indices must have the same length"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            one(memory, memory, src, dst, 16)
    with pytest.raises(RuntimeError, match="Number of layers in source tensor does not match num_layers"):
        sglang.transfer_kv_all_layer_mla(table, table, ids, ids, 16, 3)
    with pytest.raises(RuntimeError, match="Number of layers in source k tensor does not match num_layers"):
        sglang.transfer_kv_all_layer(table, table, table, table, ids, ids, 16, 1)
    longer = w.table("device", [memory, memory, memory])
    with pytest.raises(kvraw.BoundsError, match="the dst k table has 2 addresses, must have 3"):
        sglang.transfer_kv_all_layer_mla(longer, table, ids, ids, 16, 3)
    with pytest.raises(TypeError, match="the src k table holds uint8"):
        sglang.transfer_kv_all_layer_mla(memory, table, ids, ids, 16, 8)
    pageable = w.put("host", np.zeros((8, 16), np.uint8))
    with pytest.raises(kvraw.PlacementError, match=r"dst at 0x\w+ is pageable host memory"):
        one(memory, pageable, ids, ids, 16)


def test_a_capture(fake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """No event is asked about, nothing is copied to the host, and what the graph uses is kept."""
    w = TorchLike(0).install(monkeypatch)
    case = Case(w, BY_NAME["transfer_kv_all_layer_lf_pf"], w.kinds)
    case.call(SRC, DST)
    case.expect(SRC, DST)
    tables = [case.argument(0, plane, 0) for plane in (0, 1)]
    ids = [w.put("device", np.array(x)) for x in (SRC, DST)]
    numbers = {"item_size": case.item, "dst_layout_dim": case.item * LAYERS, "num_layers": LAYERS}
    calls, kept = fake.calls, len(tensors.device_state(0).completions.captured)  # type: ignore[attr-defined]
    before = calls["event_done"], calls["memcpy_async"]
    assert w.stream is not None
    fake.capture(w.stream.handle, True)  # type: ignore[attr-defined]
    pages = case.tensors[1]
    sglang.transfer_kv_all_layer_lf_pf(tables[0], pages[0], tables[1], pages[1], *ids, **numbers)
    fake.capture(w.stream.handle, False)  # type: ignore[attr-defined]
    assert (calls["event_done"], calls["memcpy_async"]) == before
    assert len(tensors.device_state(0).completions.captured) == kept + 1
    case.compare()
