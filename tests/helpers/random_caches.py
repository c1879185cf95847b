"""Random caches, and what lies where in them by plain indexing of the arrays: nothing of kvraw's layouts is used."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
GUARD = 64

# What engines hand in: engine, axes of the list levels, axes of a tensor in the order of memory, names of kv_layout
# that are true of it, its number (None: it has none), and hints without which it means something else.
#   S blocks*block_size, 2 K and V of a head side by side
SHAPES: tuple[tuple[str, str, str, str, int | None, dict[str, Any]], ...] = (
    ("vllm", "L", "PBTHD", "NHD", 1, {}),
    ("vllm", "L", "BPTHD", "NHD", 2, {}),
    ("vllm", "L", "PBHTD", "HND", 6, {}),
    ("vllm", "L", "BPHTD", "HND", 7, {}),
    ("vllm", "L", "PBH1TD", "HND", 15, {}),
    ("vllm", "L", "BTHD", "NHD LBNHC BLNHC", 13, {}),
    ("vllm", "L", "BHTD", "HND LBHNC BLHNC BHLNC", 12, {}),
    ("vllm", "L", "HBTD", "LHBNC", None, {}),
    ("vllm", "L", "BTH2D", "NHD", 11, {}),
    ("vllm", "L", "BHT2D", "HND", 10, {}),
    ("vllm", "L", "BTH2D", "NHD", 11, {"planes": 2}),
    ("vllm", "L", "BHT2D", "HND", 10, {"planes": 2}),
    ("vllm", "L", "BTD", "NHD HND", 3, {}),
    ("vllm", "", "BLPTHD", "NHD", 0, {}),
    ("vllm", "", "BLPHTD", "HND", 8, {}),
    ("vllm", "", "LBTHD", "LBNHC", None, {"kv_layout": "LBNHC"}),
    ("vllm", "", "LBHTD", "LBHNC", None, {"kv_layout": "LBHNC"}),
    ("vllm", "", "LHBTD", "LHBNC", None, {"kv_layout": "LHBNC"}),
    ("vllm", "", "BLHTD", "BLHNC", None, {"kv_layout": "BLHNC"}),
    ("vllm", "", "BLTHD", "BLNHC", None, {"kv_layout": "BLNHC"}),
    ("vllm", "", "BHLTD", "BHLNC", None, {"kv_layout": "BHLNC"}),
    ("vllm", "P,L", "BTHD", "NHD", 9, {}),
    ("vllm", "P,L", "BHTD", "HND", None, {}),
    ("vllm", "L,P", "BTHD", "NHD", 16, {}),
    ("vllm", "L,P", "BHTD", "HND", None, {}),
    ("sglang", "L", "BTHD", "NHD", 18, {}),
    ("sglang", "L", "BTD", "NHD", 3, {}),
    ("sglang", "L", "S1D", "NHD", 5, {}),
    ("sglang", "P,L", "SHD", "NHD", 4, {}),
    ("sglang", "P,L", "BTHD", "NHD", 9, {}),
    ("sglang", "PL", "BTHD", "NHD", 9, {}),
    ("sglang", "PL", "SHD", "NHD", 4, {}),
    ("trtllm", "", "BLPHTD", "HND", 8, {}),
)


@dataclass
class RandomCache:
    """Tensors, what they are called, and the truth.

    Attributes
    ----------
    tensors, hints : object, dict
        For `PagedCache.from_tensors`.
    buffers : list of arrays
        All memory that the tensors lie in, gaps and guards too.
    planes : dict
        The array [blocks, tokens, heads, elements] of a layer and a plane, by plain indexing.
    """

    tensors: Any
    hints: dict[str, Any]
    buffers: list[Array]
    planes: dict[tuple[int, int], Array]
    sizes: dict[str, int] = field(default_factory=dict)

    def stored(self, blocks: list[int], tokens: list[int]) -> Array:
        """[planes, layers, tokens, heads, elements] of tokens, each by its block and its place there."""
        s = self.sizes
        out = np.empty((s["P"], s["L"], len(blocks), s["H"], s["D"]), self.buffers[0].dtype)
        for (layer, plane), array in self.planes.items():
            out[plane, layer] = array[blocks, tokens].reshape(out.shape[2:])
        return out

    def put(self, blocks: list[int], tokens: list[int], chunk: Array) -> None:
        """The other way."""
        for (layer, plane), array in self.planes.items():
            array[blocks, tokens] = chunk[plane, layer].reshape(-1, *array.shape[2:])


def _odd_ones(array: Array, r: Random) -> Array:
    """The same elements with any stride at axes of size 1."""
    odd = (0, 1, 3, 8, 1000)
    strides = [r.choice(odd) * array.itemsize if n == 1 else s for n, s in zip(array.shape, array.strides, strict=True)]
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


def _memory(r: Random, dtype: Any, order: str, sizes: dict[str, int], dense: str) -> tuple[Array, Array]:
    """A buffer, and an array in it with these axes in the order of memory, at an offset, with gaps but in `dense`."""
    pads = {a: 0 if a in dense else r.choice((0, 0, 0, 1, 2)) for a in order}
    shape = [sizes[a] + pads[a] for a in order]
    n, offset = int(np.prod(shape)), GUARD + r.randrange(4)
    buffer = np.arange(n + offset + GUARD).astype(dtype)
    begin = {a: r.randint(0, pads[a]) for a in order}
    array = buffer[offset : offset + n].reshape(shape)
    return buffer, array[tuple(slice(begin[a], begin[a] + sizes[a]) for a in order)]


def _sizes(r: Random) -> dict[str, int]:
    sizes = {a: r.choice((1, 1, 2, 2, 3, 4)) for a in "BTH"}
    sizes |= {"L": r.randint(1, 3), "P": 2, "D": r.choice((1, 2, 2, 4, 5, 8)), "1": 1, "2": 2}
    return sizes | ({"B": r.randint(1, 6)} if r.random() < 0.5 else {})


def _build(r: Random, flat: str, order: str, dims: str, sizes: dict[str, int]) -> tuple[list[Array], Any, Any]:
    """Buffers; tensors by their place in the lists, shaped as `dims`; and the same as arrays with the axes `order`."""
    dtype = r.choice((np.int16, np.int32, np.int8, np.float32))
    inner = order.replace("S", "BT")
    dense = inner if "S" in order or r.random() < 0.5 else "2D" if "2" in order and sizes["P"] == 1 else ""
    counts = [sizes[a] for a in flat]
    if r.random() < 0.5:  # all in one allocation: outermost lists, or layers, K and V beside each other
        whole = list(inner)
        for a in reversed(flat):
            whole.insert(0 if "S" in order else r.randint(0, inner.index("2" if "2" in inner else "D")), a)
        buffer, array = _memory(r, dtype, "".join(whole), sizes, dense)
        array = array.transpose([whole.index(a) for a in flat + inner])
        buffers, parts = [buffer], {at: array[at] for at in np.ndindex(*counts)}
    else:
        buffers, parts, state = [], {}, r.getstate()
        for at in np.ndindex(*counts):
            r.setstate(state)  # the same gaps
            buffer, parts[at] = _memory(r, dtype, inner, sizes, dense)
            buffers.append(buffer)
    tensors, state = {}, r.getstate()
    for at, part in parts.items():
        r.setstate(state)
        shaped = part.reshape([sizes["B"] * sizes["T"] if a == "S" else sizes[a] for a in order]) if dense else part
        tensors[at] = _odd_ones((shaped if "S" in order else part).transpose([order.index(a) for a in dims]), r)
    return buffers, tensors, parts


def _truth(parts: dict[Any, Array], flat: str, inner: str, sizes: dict[str, int]) -> dict[tuple[int, int], Array]:
    """The array [B, T, H, D] (or [B, T, H, 2, D]) of every layer and plane."""
    out = {}
    for at, part in parts.items():
        place = dict(zip(flat, at, strict=True))
        for layer in [place["L"]] if "L" in flat else range(sizes["L"]):
            for plane in [place["P"]] if "P" in flat else range(sizes["P"]):
                pick = {"L": layer, "P": plane, "1": 0} | ({"2": plane} if sizes["P"] == 2 else {})
                array = part[tuple(pick.get(a, slice(None)) for a in inner)]
                left = [a for a in inner if a not in pick]
                array = array.transpose([left.index(a) for a in "BTH2D" if a in left])
                out[layer, plane] = array if "H" in left else array[:, :, None]
    return out


def _nest(r: Random, tensors: dict[Any, Any], lists: str, sizes: dict[str, int]) -> Any:
    flat = lists.replace(",", "")
    if not flat:
        return tensors[()]
    if len(flat) == 1 or "," not in lists:
        entries = list(tensors.values())
        if flat == "L" and r.random() < 0.5:
            return {f"model.layers.{k}.attn": x for k, x in enumerate(entries)}
        return tuple(entries) if r.random() < 0.3 else entries
    a, b = (range(sizes[x]) for x in flat)
    nested = [tuple(tensors[i, j] for j in b) for i in a]
    return {f"layer {k}": x for k, x in enumerate(nested)} if flat[0] == "L" and r.random() < 0.5 else nested


def axes_named(r: Random) -> RandomCache:
    """Any axes in any order, in memory and as they are shaped, with their names."""
    sizes = _sizes(r)
    inner = ["B", "T", *(["H"] if r.random() < 0.8 else []), *(["1"] if r.random() < 0.1 else [])]
    lists = r.choice(("", "L", "L", "L", "P", "P,L", "L,P", "PL", "LP"))
    if "L" not in lists and r.random() < 0.7:
        inner.append("L")
    if "P" not in lists and r.random() < 0.6:
        inner.append("P")
        sizes["P"] = r.choice((1, 2, 2))
    named = lists + "".join(inner)
    sizes |= {a: 1 for a in "HLP" if a not in named}
    r.shuffle(inner)
    order = "".join(inner) + "D"
    dims = "".join(r.sample(order, len(order)))
    flat = lists.replace(",", "")
    buffers, tensors, parts = _build(r, flat, order, dims, sizes)
    # What the lists are is said too where it could be something else.
    prefix = f"{flat}/" if lists in ("P", "PL", "LP") or ("," in lists and sizes["L"] == 2) or r.random() < 0.2 else ""
    hints: dict[str, Any] = {"axes": prefix + dims}
    planes = _truth(parts, flat, order, sizes)
    return RandomCache(_nest(r, tensors, lists, sizes), hints, buffers, planes, sizes)


def engine_shape(r: Random, hinted: bool) -> RandomCache:
    """A shape that an engine hands in, permuted or not, with some of the hints that are true of it, or none."""
    engine, lists, order, layouts, number, needs = r.choice(SHAPES)
    sizes = _sizes(r)
    flat = lists.replace(",", "")
    sizes |= {a: 1 for a in "HP" if a not in flat + order}
    if "2" in order and needs:
        sizes["P"] = 2
    dims = order
    if r.random() < 0.4:
        dims = "".join(r.sample(order, len(order)))
    elif set(order) <= set("LBHTD") and r.random() < 0.5:
        dims = "".join(a for a in "LBHTD" if a in order)  # vLLM's views
    buffers, tensors, parts = _build(r, flat, order, dims, sizes)
    planes = _truth(parts, flat, order.replace("S", "BT"), sizes)
    if "2" in order and not needs:
        sizes["D"] *= 2
    hints: dict[str, Any] = {"engine": engine, **needs}
    if lists == "PL" and hinted:
        hints["kv_list_layout"] = "k_v"
    true = {
        "kv_layout": r.choice(layouts.split()),
        "block_size": sizes["T"],
        "num_heads": sizes["H"],
        "head_size": sizes["D"],
        "planes": sizes["P"],
    }
    if engine == "sglang" and lists == "L":
        true["kv_list_layout"] = "unified"
    if hinted:
        hints = {k: v for k, v in true.items() if r.random() < 0.6} | hints
        if number is not None and r.random() < 0.2:
            hints["format"] = number
    return RandomCache(_nest(r, tensors, lists, sizes), hints, buffers, planes, sizes)
