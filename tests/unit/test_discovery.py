"""Discovery against arrays that are built and read with plain shaped indexing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvraw.errors import LayoutError
from kvraw.layouts.discovery import discover
from kvraw.layouts.engine_shapes import every_shape
from kvraw.layouts.formats import FORMATS, HOST_LAYOUTS
from tests.helpers.handed_in import (
    CASES,
    Built,
    Sizes,
    form_of,
    full_hints,
    orders,
    sizes,
    width_of,
)
from tests.helpers.profile import examples


def test_every_format_has_a_case_and_every_row_is_consistent() -> None:
    single = {number for number, form in FORMATS.items() if not form.several}
    assert {form_of(name) for name in CASES} == {*single, *HOST_LAYOUTS}
    for row in every_shape():
        spelled = row.dims
        for letter, axes in {"S": "BT", "F": "HTD", "1": "", "2": "P", "W": "PD"}.items():
            spelled = spelled.replace(letter, axes)
        known = {row.format.axes, row.format.fused, "P" + row.format.axes if row.format.pointers == "P" else ""}
        assert spelled in known, row


def right_or_refused(built: Built, width: int, **hints: Any) -> bool:
    """Whether the views are read, and then right; a refusal names the axes that settle it."""
    try:
        found = discover(built.views, **hints)
    except LayoutError as error:
        text = str(error)
    else:
        built.check(found, width)
        return True
    assert "cannot be told apart" in text
    assert ", or axes=" in text or "pass axes=" in text
    return False


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=examples(25), deadline=None)
@given(s=sizes(), order=orders(), dtype=st.sampled_from([np.uint16, np.int32, np.uint64]))
def test_asked_for_format(name: str, s: Sizes, order: list[int], dtype: Any) -> None:
    form = form_of(name)
    read = right_or_refused(
        Built(CASES[name], s, order, dtype=dtype), width_of(name, s), format=form, **full_hints(name, s)
    )
    assert read or 1 in (s.L, s.B, s.T, s.H, s.D)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.engine])
@settings(max_examples=examples(25), deadline=None)
@given(s=sizes(), order=orders())
def test_engine_with_all_hints(name: str, s: Sizes, order: list[int]) -> None:
    """Without format=, the bytes are right or the error names what settles it."""
    right_or_refused(Built(CASES[name], s, order), width_of(name, s), engine=CASES[name].engine, **full_hints(name, s))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.engine])
def test_engine_decides_the_format(name: str) -> None:
    case, s = CASES[name], Sizes()
    assert case.engine is not None
    built = Built(case, s, [5, 3, 1, 0, 2, 4])
    found = discover(built.views, engine=case.engine, **full_hints(name, s))
    assert found.layout.format.number == form_of(name)
    built.check(found, width_of(name, s))


@pytest.mark.parametrize("s", [Sizes(B=5, T=4, H=3), Sizes(B=5, T=3, H=4)], ids=str)
@pytest.mark.parametrize("name", ["1", "2", "6", "7", "12", "13"])
@pytest.mark.parametrize("settled_by", ["kv_layout", "block_size", "num_heads"])
def test_one_hint_is_enough(name: str, settled_by: str, s: Sizes) -> None:
    built = Built(CASES[name], s, list(range(6)))
    with pytest.raises(LayoutError, match="cannot be told apart") as caught:
        discover(built.views)
    hint = {settled_by: full_hints(name, s)[settled_by]}
    if (name, settled_by) == ("12", "block_size"):  # blocks or heads may be outermost then
        with pytest.raises(LayoutError, match="pass num_heads=3 or num_heads=5, or axes='BHTD' or axes='HBTD'"):
            discover(Built(CASES[name], Sizes(), [*range(6)]).views, block_size=4)
        return
    if name not in ("12", "13"):
        assert f"{settled_by}={hint[settled_by]!r}" in str(caught.value)
    found = discover(built.views, **hint)
    assert found.layout.format.number == int(name)
    built.check(found)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.lists(Sizes())])
@settings(max_examples=examples(20), deadline=None)
@given(s=sizes(), order=orders(), data=st.data())
def test_size_one_strides_do_not_matter(name: str, s: Sizes, order: list[int], data: st.DataObject) -> None:
    """With counts that leave one reading, any stride may stand at a size-1 dimension: zero, negative, or huge."""
    if form_of(name) in HOST_LAYOUTS:
        s = replace(s, L=2, B=3)
    elif not CASES[name].heads or name.startswith(("4", "5")):
        s = replace(s, B=2)
    built = Built(CASES[name], s, order)
    view = built.views
    while isinstance(view, list):
        view = view[0]
    odd = st.sampled_from([0, -4, 1, 4, 12, 1000, 2**40])
    strides = tuple(data.draw(odd) if n == 1 else x for n, x in zip(view.shape, view.strides, strict=True))

    def spoil(x: Any) -> Any:
        return [spoil(y) for y in x] if isinstance(x, list) else replace(x, strides=strides)

    hints = {"format": form_of(name), **full_hints(name, s), "head_size": width_of(name, s)}
    try:
        expected = discover(built.views, **hints)
    except LayoutError:
        with pytest.raises(LayoutError):
            discover(spoil(built.views), **hints)
    else:
        assert discover(spoil(built.views), **hints) == expected
        built.check(expected, width_of(name, s))
