"""Every engine moves the same bytes: whole arenas, guards included, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.backends import on_device, on_host
from tests.helpers.cases import Case, all_cases, lay
from tests.helpers.classes import VIEWS, one_of_each

CASES = all_cases()
CHOSEN = {engine: one_of_each(engine, CASES) for engine in VIEWS}


def name(case: Case) -> str:
    return "-".join(
        str(x) for x in (case.format, case.planes, case.direction, case.by, f"e{case.element}", f"s{case.seed}")
    )


def check(case: Case, backend: object) -> None:
    laid = lay(case)
    paged, chunks = backend(laid)  # type: ignore[operator]
    np.testing.assert_array_equal(paged, laid.paged_after)
    np.testing.assert_array_equal(chunks, laid.chunks_after)


def runs(*hows: str) -> list[object]:
    """Parameters (case, how): one case of each class that the engine can tell apart, the others marked exhaustive."""
    return [
        pytest.param(case, how, id=f"{name(case)}-{how}", marks=() if chosen else pytest.mark.exhaustive)
        for how in hows
        for case in CASES
        for chosen in [case in CHOSEN[how.partition(",")[0]]]
    ]


def how_of(case: Case, how: str) -> tuple[str, bool]:
    """The engine, and whether ids lie on the device: a staged store takes no ids that are, or may be, negative."""
    engine, *ids = how.split(", ")
    negative = case.by == "slot" if ids else min(case.ids, default=0) < 0
    if engine == "staged" and case.direction == "store" and negative:
        engine = "auto"
    return engine, bool(ids)


@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_host(case: Case, engine: str) -> None:
    check(case, on_host(engine))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "how"),
    runs(
        "kernel",
        "kernel, ids on the device",
        "paced",
        "paced, ids on the device",
        "copy",
        "staged",
        "staged, ids on the device",
    ),
)
def test_gpu(case: Case, how: str, gpu: int) -> None:
    engine, ids_on_device = how_of(case, how)
    check(case, lambda laid: on_device(laid, gpu, ids_on_device, engine))


def test_the_cases_move_something() -> None:
    moved = 0
    for case in CASES:
        laid = lay(case)
        before = (laid.paged if case.direction == "load" else laid.chunks).data
        after = laid.paged_after if case.direction == "load" else laid.chunks_after
        moved += bool((before != after).any())
    assert moved >= len(CASES) - 8


@pytest.mark.parametrize("engine", VIEWS)
def test_classes_hold_every_value_of_a_case(engine: str) -> None:
    """What is left out by default differs from a case that runs in nothing that the engine branches on."""
    chosen, view = CHOSEN[engine], VIEWS[engine]
    views = {view(case) for case in chosen}
    assert len(views) == len(chosen) < len(CASES) / 3
    assert all(view(case) in views for case in CASES)
    for field in ("format", "planes", "direction", "by", "layout", "element", "pad", "bs"):
        assert {getattr(case, field) for case in chosen} == {getattr(case, field) for case in CASES}, field
