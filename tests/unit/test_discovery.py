"""Discovery against arrays that are built and read with plain shaped indexing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvraw.discovery import discover
from kvraw.errors import LayoutError
from kvraw.formats import FORMATS, HOST_LAYOUTS
from kvraw.handed_in import ROWS
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


def test_every_format_has_a_case_and_every_row_is_consistent() -> None:
    assert {form_of(name) for name in CASES} == {*FORMATS, *HOST_LAYOUTS}
    for row in ROWS:
        spelled = row.dims
        for letter, axes in {"S": "BT", "F": "HTD", "1": "", "2": "P", "W": "PD"}.items():
            spelled = spelled.replace(letter, axes)
        known = {row.format.axes, row.format.fused, "P" + row.format.axes if row.format.pointers == "P" else ""}
        assert spelled in known, row


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40, deadline=None)
@given(s=sizes(), order=orders(), dtype=st.sampled_from([np.uint16, np.int32, np.uint64]))
def test_asked_for_format(name: str, s: Sizes, order: list[int], dtype: Any) -> None:
    case = CASES[name]
    form = form_of(name)
    if s.D == 1 and 1 in (s.L, s.B):
        order = sorted(order)  # see test_one_element_per_head
    built = Built(case, s, order, dtype=dtype)
    found = discover(built.views, format=form, **full_hints(name, s))
    assert found.layout.format == (FORMATS[form] if isinstance(form, int) else HOST_LAYOUTS[form])
    built.check(found, width_of(name, s))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.engine])
@settings(max_examples=40, deadline=None)
@given(s=sizes(), order=orders())
def test_engine_with_all_hints(name: str, s: Sizes, order: list[int]) -> None:
    """Without format=, the bytes are right or the error names format=."""
    case = CASES[name]
    assert case.engine is not None
    built = Built(case, s, order)
    rare = form_of(name) in (10, 11)  # the deprecated shape with a 2 elsewhere is taken for a common one, by rule
    try:
        found = discover(built.views, engine=case.engine, **full_hints(name, s))
    except LayoutError as error:
        text = str(error)
    else:
        text = ""
    if text:
        assert "cannot be told apart" in text
        assert f"format={form_of(name)!r}" in text or rare
        return
    if rare and found.layout.format.number not in (10, 11):
        return
    built.check(found, width_of(name, s))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.engine])
def test_engine_decides_the_format(name: str) -> None:
    case, s = CASES[name], Sizes()
    assert case.engine is not None
    built = Built(case, s, [5, 3, 1, 0, 2, 4])
    found = discover(built.views, engine=case.engine, **full_hints(name, s))
    assert found.layout.format.number == form_of(name)
    built.check(found, width_of(name, s))


@pytest.mark.parametrize("name", ["1", "2", "6", "7", "12", "13"])
@settings(max_examples=40, deadline=None)
@given(order=orders(), s=sizes(2).filter(lambda s: s.B > 2 and s.T != s.H))
@pytest.mark.parametrize("settled_by", ["kv_layout", "block_size", "num_heads"])
def test_one_hint_is_enough(name: str, settled_by: str, order: list[int], s: Sizes) -> None:
    built = Built(CASES[name], s, order)
    with pytest.raises(LayoutError, match="cannot be told apart") as caught:
        discover(built.views)
    assert f"{settled_by}={full_hints(name, s)[settled_by]!r}" in str(caught.value)
    found = discover(built.views, **{settled_by: full_hints(name, s)[settled_by]})
    assert found.layout.format.number == int(name)
    built.check(found)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.lists(Sizes())])
@settings(max_examples=30, deadline=None)
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

    hints = full_hints(name, s) | {"head_size": width_of(name, s)}
    built.check(discover(spoil(built.views), format=form_of(name), **hints), width_of(name, s))
