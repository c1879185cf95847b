"""Tensors that operations of the adapters take: gaps are followed or refused, what has no memory is an error.

On host memory, where a wrong address would be a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="these tests are about torch's tensors, and torch is not installed")

import kvraw  # noqa: E402
from tests.helpers.profile import examples  # noqa: E402
from tests.helpers.tensor_calls import ADDRESSES, CALLS  # noqa: E402

REFUSED = (kvraw.KvrawError, RuntimeError, TypeError)


def with_gaps(values: torch.Tensor, pads: tuple[int, ...], order: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of these values whose axes lie in another order, and `pads` more elements behind each; and its memory."""
    shape = [values.shape[k] + pads[k] for k in order]
    whole = torch.full(shape, 0xEE, dtype=values.dtype)
    view = whole.permute(*[order.index(k) for k in range(values.dim())])
    for axis, n in enumerate(values.shape):
        view = view.narrow(axis, 0, n)
    view.copy_(values)
    return view, whole


# By their contract the order in memory says which axis is which, and the shape does not.
BY_STRIDES = ("lmcache.gather_paged_kv_to_cpu", "lmcache.scatter_cpu_to_paged_kv")


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_gaps_are_followed_or_refused(name: str, data: Any) -> None:
    """The bytes of the call without gaps, and nothing of what lies between; or an error, and nothing at all."""
    shapes, call = CALLS[name]
    plain = {k: torch.randint(0, 200, shape, dtype=torch.uint8) for k, shape in shapes.items()}
    before = {k: t.clone() for k, t in plain.items()}
    call(**plain)
    changed = data.draw(st.sets(st.sampled_from([k for k in shapes if k[0] != "x"]), min_size=1), label="with gaps")
    given_, memory = {k: t.clone() for k, t in before.items()}, {}
    for k in changed:
        axes = len(shapes[k])
        pads = data.draw(st.tuples(*[st.sampled_from([0, 0, 0, 1, 8, 16])] * axes), label=f"pads of {k}")
        orders = [tuple(range(axes)), *([] if name in BY_STRIDES else map(tuple, _swaps(axes)))]
        order = data.draw(st.sampled_from(orders), label=f"order of {k}")
        given_[k], memory[k] = with_gaps(before[k], pads, order)
    untouched = {k: t.clone() for k, t in memory.items()}
    try:
        call(**given_)
    except REFUSED:
        want = before
    else:
        want = plain
    for k, t in given_.items():
        assert torch.equal(t, want[k]), k
    for k, whole in memory.items():
        given_[k].copy_(before[k])
        assert torch.equal(whole, untouched[k]), f"between the elements of {k}"


def _swaps(axes: int) -> list[list[int]]:
    out = []
    for at in range(axes - 2):
        order = list(range(axes))
        order[at], order[at + 1] = order[at + 1], order[at]
        out.append(order)
    return out


def _faulty(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    if kind == "meta":
        return torch.zeros(shape, dtype=torch.uint8, device="meta")
    if kind == "sparse":
        return torch.zeros(shape, dtype=torch.uint8).to_sparse()
    if kind == "quantized":
        return torch.quantize_per_tensor(torch.zeros(shape), 1.0, 0, torch.quint8)
    if kind == "conjugate":
        return torch.zeros(shape, dtype=torch.complex64).conj()
    return torch._neg_view(torch.zeros(shape))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["meta", "sparse", "quantized", "conjugate", "negative"])
@pytest.mark.parametrize("name", CALLS)
def test_tensors_whose_memory_is_not_what_they_are(name: str, kind: str) -> None:
    shapes, call = CALLS[name]
    plain = {k: torch.zeros(shape, dtype=torch.uint8) for k, shape in shapes.items()}
    call(**plain)
    for k, shape in shapes.items():
        if k[0] != "x":
            with pytest.raises(REFUSED):
                call(**plain | {k: _faulty(shape, kind)})


@pytest.mark.parametrize("address", [0, 8, 0x80, 4095, 1 << 63, (1 << 63) + (1 << 20), (1 << 64) - 4096])
@pytest.mark.parametrize("name", ADDRESSES)
def test_addresses_that_no_process_has(name: str, address: int) -> None:
    call: Callable[[int], None] = ADDRESSES[name]
    with pytest.raises(
        (kvraw.BoundsError, TypeError, ValueError, RuntimeError), match=r"0x|null|address|holds a number"
    ):
        call(address)
