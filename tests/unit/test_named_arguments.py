"""Errors about ids, chunks, caches and pools say which argument they are about."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvraw
from kvraw.codec import Compressed, Encoded


def cache_of(**hints: Any) -> kvraw.PagedCache:
    return kvraw.PagedCache.from_tensors([np.zeros((2, 16, 4, 2, 16), np.int16)], axes="PBTHD", **hints)


CACHE = cache_of()
CHUNKS = [np.zeros(CACHE.chunk_bytes(64), np.uint8)]
ON_DEVICE = SimpleNamespace(
    __cuda_array_interface__={"shape": (2,), "typestr": "<f8", "data": (1 << 20, False), "version": 3}
)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1], [2, 3]], "block_ids holds rows of different lengths"),
        (np.array([1, 2], object), "block_ids holds object, must have an integer dtype"),
        ([1, None], "block_ids holds a NoneType, must hold integers"),
        ([1, "2"], "block_ids holds <U21, must hold integers"),
        (np.ma.array([1, 2], mask=[0, 1]), "block_ids is a masked array"),
        ({1: 2}, "block_ids is a dict, must be a sequence"),
        ({1, 2}, "block_ids is a set, must be a sequence"),
        ("12", "block_ids is a str, must be a sequence"),
        (ON_DEVICE, "block_ids holds float64 on a device, must hold int64 or int32"),
    ],
)
def test_ids(ids: Any, message: str) -> None:
    with pytest.raises((TypeError, kvraw.BoundsError), match=message):
        kvraw.store(CACHE, CHUNKS, ids)


ROWS: list[Any] = [
    CHUNKS[0], CHUNKS[0].view(np.int64), CHUNKS[0].reshape(2, -1), bytearray(CHUNKS[0]), bytes(CHUNKS[0]),
    memoryview(CHUNKS[0]), np.array([CHUNKS[0].ctypes.data], np.uint64), "text", {0: CHUNKS[0]}, {5000}, 5000, None,
]  # fmt: skip


@pytest.mark.parametrize("tokens", [None, 64])
@pytest.mark.parametrize("row", ROWS, ids=[f"{k}-{type(r).__name__}" for k, r in enumerate(ROWS)])
@pytest.mark.parametrize("call", [kvraw.store, kvraw.load, kvraw.store_slots, kvraw.load_slots])
def test_one_array_is_no_row_of_chunks(call: Callable[..., Any], row: Any, tokens: int | None) -> None:
    """Its values would be taken for addresses, or its rows for chunks of another shape."""
    with pytest.raises(TypeError, match=f"chunks is a {type(row).__name__}, must be a sequence of chunks"):
        call(CACHE, row, [0], chunk_tokens=tokens)


@given(st.one_of(st.integers(0, 4095), st.integers(2**63, 2**64 - 1), st.integers(-(2**64), -1)), st.booleans())
def test_addresses_that_no_process_has(address: int, to_host: bool) -> None:
    call = kvraw.store if to_host else kvraw.load
    with pytest.raises(kvraw.BoundsError, match=r"chunks\[1\] is (-?\d|0x)"):
        call(CACHE, [CHUNKS[0].ctypes.data, address], [0], chunk_tokens=64)
    with pytest.raises(kvraw.BoundsError, match=r"pointers\[0\] is"):
        kvraw.PagedCache.from_pointers([address], 1, CACHE.geometry)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kvraw.HostPool(1 << 20, pin=False, options={"kind": "shared"}), r"options is \{"),
        (lambda: kvraw.HostBuffer(1 << 20, pin=False, options={}), r"options is \{"),
        (lambda: kvraw.HostOptions(kind="shared", name=5), "name is 5, must be a str"),  # type: ignore[arg-type]
        (lambda: kvraw.HostPool.attach(5), "name is 5, must be a str"),  # type: ignore[arg-type]
        (lambda: kvraw.HostPool(1 << 20, device="cuda"), "device is 'cuda', must be an integer"),
        (lambda: kvraw.HostPool(1 << 20, device=0.0), "device is 0.0, must be an integer"),
        (lambda: Compressed.from_bytes(None), "data is a NoneType, must be dense bytes"),  # type: ignore[arg-type]
        (lambda: Encoded.from_bytes([1]), "data is a list, must be dense bytes"),  # type: ignore[arg-type]
        (lambda: kvraw.PagedCache.from_tensors([np.ma.zeros((2, 4, 4, 2, 16))]), r"tensors\[0\] is a masked array"),
    ],
)
def test_pools_and_caches(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="this test is about torch's tensors, and torch is not installed")
    for ids, message in [
        (torch.tensor([1.0], dtype=torch.bfloat16), "block_ids holds bfloat16"),
        (torch.tensor([1.0], requires_grad=True), "block_ids holds float32"),
        (torch.tensor([1], device="meta"), "block_ids lies on meta, which has no memory"),
        (torch.tensor([1]).to_sparse(), "block_ids is a tensor of layout sparse_coo"),
    ]:
        with pytest.raises(TypeError, match=message):
            kvraw.store(CACHE, CHUNKS, ids)
    shape = (2, 4, 4, 2, 16)
    for tensor, message in [
        (torch.zeros(shape).to_sparse(), "is a tensor of layout sparse_coo"),
        (torch.zeros(shape, device="meta"), "lies on meta, which has no memory"),
        (torch.zeros(shape, dtype=torch.complex64).conj(), "is a conjugate or negative view"),
        (torch._neg_view(torch.zeros(shape)), "is a conjugate or negative view"),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "is a nested tensor"),
    ]:
        with pytest.raises(TypeError, match=rf"tensors\[0\] {message}"):
            kvraw.PagedCache.from_tensors([tensor], axes="PBTHD")
        with pytest.raises(TypeError, match=rf"chunks\[0\] {message}"):
            kvraw.store(CACHE, [tensor], [0])
    with pytest.raises(TypeError, match="chunks is a Tensor, must be a sequence of chunks"):
        kvraw.store(CACHE, torch.from_numpy(CHUNKS[0]), [0], chunk_tokens=64)
    assert (
        CACHE.geometry == kvraw.PagedCache.from_tensors([torch.zeros((2, 16, 4, 2, 16)).half()], axes="PBTHD").geometry
    )
