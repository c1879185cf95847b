"""Stores past the caches are ordered by nothing but a fence: in the compiled kernels one stands behind all of them."""

from __future__ import annotations

import platform
import re
from typing import Any

import numba
import pytest
from numba.core import types

from kvraw.copying import cpu_kernels

U64, I64 = types.Array(types.uint64, 1, "C"), types.int64
VECTOR, TABLE = types.Array(I64, 1, "C"), types.Array(I64, 2, "C")
KERNELS = {
    "copy_batch": (cpu_kernels._copy_batch_source, (U64, U64, U64, I64, I64, types.boolean)),
    "copy_items": (
        cpu_kernels._copy_items_source,
        (TABLE, TABLE, U64, U64, VECTOR, VECTOR, I64, I64, I64, I64, types.boolean),
    ),
}
FENCE = {"x86_64": r"\b(mfence|sfence|lock\s+or[lq]\s+\$0, -?\d*\(%rsp\))", "aarch64": r"\bdmb\s+ish\b"}


def functions(ir: str) -> dict[str, str]:
    """The bodies of a module by name."""
    return {m[1]: m[2] for m in re.finditer(r"^define [^\n]*@([\w.$\"]+)\([^\n]*\{\n(.*?)^\}", ir, re.M | re.S)}


def blocks(body: str) -> dict[str, tuple[str, set[str]]]:
    """Each block's text, and where it may go on."""
    parts = re.split(
        r"^([\w.$\"-]+):[^\n]*\n", "entry:\n" + body if not re.match(r"[\w.]+:", body) else body, flags=re.M
    )
    return {
        name: (text, set(re.findall(r"label %([\w.$\"-]+)", text)))
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def reachable(graph: dict[str, tuple[str, set[str]]], begin: str) -> set[str]:
    """Blocks that may run after one."""
    seen: set[str] = set()
    left = list(graph[begin][1])
    while left:
        at = left.pop()
        if at not in seen:
            seen.add(at)
            left += graph[at][1]
    return seen


@pytest.mark.parametrize("name", KERNELS)
def test_a_fence_stands_behind_every_streaming_store(name: str) -> None:
    source, signature = KERNELS[name]
    compiled: Any = numba.njit(nogil=True)(source)
    compiled.compile(signature)
    (made,) = compiled.signatures
    bodies = functions(compiled.inspect_llvm(made))
    streaming = {n for n, body in bodies.items() if "!nontemporal" in body}
    assert streaming
    kernel = next(n for n in bodies if source.__name__ in n and not n.startswith(("cfunc", "_ZN7cpython")))
    calls = "|".join(re.escape(n) for n in streaming - {kernel}) or "(?!)"
    graph = blocks(bodies[kernel])
    stores = {
        at for at, (text, _) in graph.items() if "!nontemporal" in text or re.search(rf"call .*@({calls})\(", text)
    }
    fences = {at for at, (text, _) in graph.items() if "fence seq_cst" in text}
    assert stores
    assert fences
    for at in stores:
        assert fences & reachable(graph, at), "no fence behind a streaming store"
    for at in fences:
        assert not stores & reachable(graph, at), "a streaming store behind the last fence"
    pattern = FENCE.get(platform.machine())
    if pattern is not None:
        assembly = compiled.inspect_asm(made)
        begin = assembly.index(f"\n{kernel}:")
        assert re.search(pattern, assembly[begin : assembly.index(".size", begin)])
