"""Repeated calls of SGLang's and vLLM's operations: functions that they enter, and that the bound way is taken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import kvraw
from kvraw.adapters import sglang, vllm
from kvraw.copying import copy_engine, given
from kvraw.copying.device_state import device_state
from kvraw.copying.indexed import IndexedLaunch
from kvraw.copying.kernel import KernelPlan
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.program import Program
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.sglang_case import BY_NAME, DST, LAYERS, PAGE, SRC, TOKENS, Case, bytes_of, ids, tokens_of
from tests.helpers.torch_like import Tensor, TorchLike

ROOT = str(Path(kvraw.__file__).parent)


def entered(work: Callable[[], None]) -> list[str]:
    """Functions of kvraw that a call enters; what a program does counts as one."""
    names: list[str] = []
    inside = 0

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal inside
        if event == "call" and not inside and frame.f_code.co_filename.startswith(ROOT):
            names.append(frame.f_code.co_name)
        if frame.f_code is Program.run.__code__:  # the compiled function, on a machine's driver
            inside += {"call": 1, "return": -1}.get(event, 0)

    sys.setprofile(trace)
    try:
        work()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize("name", list(BY_NAME))
def test_functions_of_a_kernel_operation(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    w = TorchLike(0).install(monkeypatch)
    case = Case(w, BY_NAME[name], w.kinds)
    table, made = w.table, dict[int, Tensor]()
    if BY_NAME[name].all_layers:  # the tables of an engine live on

        def lasting(kind: str, layers: list[Tensor]) -> Tensor:
            at = layers[0].data_ptr()
            return made.get(at) or made.setdefault(at, table(kind, layers))

        monkeypatch.setattr(w, "table", lasting)
    put, index = w.put, {tuple(x): w.put("device", np.array(x)) for x in (SRC, DST)}
    monkeypatch.setattr(w, "put", lambda kind, array: index.get(tuple(array.tolist())) or put(kind, array))
    with DeviceScope(0):  # an engine's thread has its context current
        for _ in range(4):
            case.call(SRC, DST)
            w.synchronize()
        names = [n for n in entered(lambda: case.call(SRC, DST)) if n]
    monkeypatch.setattr(w, "put", put)
    case.expect(SRC, DST)
    assert "_launch_anew" not in names
    assert IndexedLaunch.enqueue.__name__ in names
    assert len(names) <= 23, names


Call = Callable[[], None]


def _hicache(planes: int) -> Callable[[TorchLike], Call]:
    def make(w: TorchLike) -> Call:
        name = "transfer_hicache_one_layer" + ("_mla" if planes == 1 else "")
        flat = [w.put("device", bytes_of(TOKENS, 32, seed=k)) for k in range(planes)]
        views = [w.put("pinned", bytes_of(TOKENS, LAYERS, 32)).select(1, 1) for _ in range(planes)]
        at, to = ids(w, SRC, True), ids(w, DST, True)
        return lambda: getattr(sglang, name)(*flat, to, *views, at, block_quota=2)

    return make


def _hicache_all(w: TorchLike) -> Call:
    layers = [w.put(kind, bytes_of(TOKENS, 32)) for kind in ("device", "pinned")]
    w.kept = layers  # type: ignore[attr-defined]
    tables = [w.table("device", [t] * LAYERS) for t in layers]
    at, to = ids(w, SRC, True), ids(w, DST, True)
    strides = {"cache_src_stride_bytes": 32, "cache_dst_stride_bytes": 32}
    return lambda: sglang.transfer_hicache_all_layer_mla(tables[1], to, tables[0], at, **strides, block_quota=2)


def _staged(w: TorchLike) -> Call:
    layers = [w.put("device", bytes_of(TOKENS, 16)) for _ in range(LAYERS)]
    w.kept, table = layers, w.table("device", layers)  # type: ignore[attr-defined]
    staging, dst = w.empty("device", (TOKENS, LAYERS, 16)), w.empty("pinned", (TOKENS, LAYERS, 16))
    at, to = ids(w, tokens_of([4, 0]), True), ids(w, tokens_of([1, 2]), False)
    work = sglang.transfer_hicache_all_layer_mla_staged_lf_pf
    return lambda: work(table, at, to, staging, dst, page_size=PAGE, block_quota=2)


def _direct(layers: int) -> Callable[[TorchLike], Call]:
    def make(w: TorchLike) -> Call:
        src, dst = ([w.put(kind, bytes_of(TOKENS, 8)) for _ in range(layers)] for kind in w.kinds)
        at, to = ids(w, tokens_of([3, 1]), False), ids(w, tokens_of([0, 4]), False)
        return lambda: sglang.transfer_kv_direct(src, dst, at, to, PAGE)

    return make


def _to_pages(w: TorchLike) -> Call:
    paged = [w.put("pinned", bytes_of(6, LAYERS, PAGE, 8)) for _ in "kv"]
    layers = [w.put("device", bytes_of(TOKENS, 8)) for _ in range(2 * LAYERS)]
    at, to = ids(w, tokens_of([3, 1]), False), ids(w, tokens_of([0, 4]), False)
    return lambda: sglang.transfer_kv_all_layer_direct_lf_pf(layers, paged, at, to, PAGE)


def _ranges(w: TorchLike) -> Call:
    src, dst = w.put("device", bytes_of(TOKENS, 16)), w.put("pinned", bytes_of(TOKENS, 16))
    return lambda: sglang.transfer_embedding_ranges_direct(src, dst, [0, 5], [9, 2], [3, 4])


def _swap(nbytes: int) -> Callable[[TorchLike], Call]:
    def make(w: TorchLike) -> Call:
        src, dst = w.empty("device", (4, nbytes)), w.empty("pinned", (4, nbytes))
        mapping = w.put("host", np.array([[3, 0], [1, 2]]))
        return lambda: vllm.swap_blocks(src, dst, nbytes, mapping)

    return make


def _swap_batch(w: TorchLike) -> Call:
    ends = w.empty("device", (4, 64)), w.empty("pinned", (4, 64))
    given = [w.put("host", np.array([t.data_ptr() + 64 * k for k in (3, 1)])) for t in ends]
    sizes = w.put("host", np.array([64, 64]))
    w.kept = ends  # type: ignore[attr-defined]
    return lambda: vllm.swap_blocks_batch(*given, sizes)


REPEATED: dict[str, tuple[Callable[[TorchLike], Call], int]] = {
    "hicache one layer": (_hicache(2), 27),
    "hicache one layer, MLA": (_hicache(1), 24),
    "hicache all layers": (_hicache_all, 21),
    "staged": (_staged, 37),
    "direct, few": (_direct(1), 29),
    "direct, many": (_direct(8), 30),
    "direct to pages": (_to_pages, 29),
    "embedding ranges": (_ranges, 35),
    "swap_blocks by kernel": (_swap(64), 45),
    "swap_blocks by the copy engine": (_swap(32 << 20), 44),
    "swap_blocks_batch": (_swap_batch, 90),
}


@pytest.mark.parametrize("name", list(REPEATED))
def test_functions_of_a_repeated_call(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given.COMPILED.compile()
    copy_engine.COMPILED.compile()
    make, most = REPEATED[name]
    w = TorchLike(0).install(monkeypatch)
    work = make(w)
    with DeviceScope(0):
        for _ in range(8):
            work()
            device_state(0).completions.drain()
        names = entered(work)
        device_state(0).completions.drain()
    assert len(names) <= most, (len(names), names)


def test_functions_where_the_context_is_not_current(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a thread that used no GPU yet: the bound way is the one taken all the same."""
    w = TorchLike(0).install(monkeypatch)
    case = Case(w, BY_NAME["transfer_kv_per_layer_mla"], w.kinds)
    with DeviceScope(0):
        args = case.tensors[0][0][1], case.tensors[1][0][1], ids(w, SRC, True), ids(w, DST, True), case.item
    assert fake.context_device() != 0
    for _ in range(4):
        sglang.transfer_kv_per_layer_mla(*args)
        w.synchronize()
    names = entered(lambda: sglang.transfer_kv_per_layer_mla(*args))
    case.expect(SRC, DST, layer=1)
    assert "_launch_anew" not in names
    assert len(names) <= 34, names


def test_layers_share_what_is_made_ready(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first load by layer makes one kernel plan for all layers."""
    made: list[KernelPlan] = []
    init = KernelPlan.__init__

    def counted(self: KernelPlan, *args: object, **more: object) -> None:
        made.append(self)
        init(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(KernelPlan, "__init__", counted)
    w = TorchLike(0).install(monkeypatch)
    case = Case(w, BY_NAME["transfer_kv_per_layer_pf_lf"], w.kinds[::-1])
    for layer in range(LAYERS):
        case.call(SRC, DST, layer)
        case.expect(SRC, DST, layer)
    assert len(made) == 1


def test_functions_of_a_page_operation(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    given.COMPILED.compile()
    copy_engine.COMPILED.compile()
    w = TorchLike(0).install(monkeypatch)
    paged, layer = w.put("pinned", bytes_of(6, LAYERS, PAGE, 8)), w.put("device", bytes_of(TOKENS, 8))
    at, to = ids(w, tokens_of([3, 1]), False), ids(w, tokens_of([0, 4]), False)
    with DeviceScope(0):
        for _ in range(3):
            sglang.transfer_kv_per_layer_direct_pf_lf([paged], [layer], at, to, 1, PAGE)
        names = entered(lambda: sglang.transfer_kv_per_layer_direct_pf_lf([paged], [layer], at, to, 1, PAGE))
    w.synchronize()
    assert "describe" not in names
    assert "submit_short" in names
    assert len(names) <= 31, names
    np.testing.assert_array_equal(w.take(layer)[:PAGE], w.take(paged)[3, 1])
