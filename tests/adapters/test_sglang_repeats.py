"""Repeated calls of SGLang's operations: how many functions they enter, and that the bound way is the one taken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import kvraw
from kvraw.adapters import sglang
from kvraw.copying import copy_engine, given
from kvraw.copying.indexed import IndexedLaunch
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


@pytest.mark.parametrize("name", ["transfer_kv_per_layer", "transfer_kv_per_layer_mla_pf_lf", "transfer_kv_all_layer"])
def test_functions_of_a_kernel_operation(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    w = TorchLike(0).install(monkeypatch)
    case = Case(w, BY_NAME[name], w.kinds)
    table, made = w.table, dict[int, Tensor]()
    if name == "transfer_kv_all_layer":  # the tables of an engine live on

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
    assert len(names) <= 26, names


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
    assert len(names) <= 48, names
    np.testing.assert_array_equal(w.take(layer)[:PAGE], w.take(paged)[3, 1])
