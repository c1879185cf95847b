"""The adapter beside LMCache's own module, byte for byte, on random cases of every transfer.

``python -m benchmarks.lmcache_compare PATH [--cases N] [--seed S]``, where PATH is ``c_ops.*.so`` of LMCache's wheel
for this Python (a GPU), or ``fallback`` for its Python fallback (the CPU). A case lays the same random bytes out twice,
hands one copy to each module, and compares all memory of both sides, with the bytes around every buffer.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import mmap
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import util
from typing import Any

import numpy as np
import torch

import kvraw.adapters.lmcache as ours
from tests.helpers.oracle import PAGED, Shape

LEFT_OUT = """Left out:
more than four objects in a call of theirs: it is called once per four, each with what remains of the skip
one destination twice: which source wins is open; ids out of bounds, or too few for the objects: theirs has no answer
by blocks heads of odd bytes, by one layer heads and by two lists rows of other than 8 bytes: theirs drops the rest
by slots, heads outside the tokens, and halves of fused ones, that its accesses do not divide: theirs rounds down
base addresses and gaps that are not multiples of its accesses: theirs faults, or rounds down
gaps between blocks where a block has two planes: theirs multiplies them by the planes
by slots format 0 with one layer: theirs takes it as format 1; formats 4, 8 and 9: theirs refuses them
more than 1024 threads of heads and accesses; offsets beyond 32 bits; pageable memory; alignment 0: theirs cannot
of the fallback fp8, negative skips, gaps between the blocks of a table of addresses: it takes none
of it by slots all formats but 0, 1, 2, 3, 5, and negative slots of the flash operations: it gets them wrong
of it plans: it has none, other operations in the same order stand in; copies by address: it may ask a CUDA runtime
"""
Case = tuple[dict[str, Any], list[Any], Callable[[int], object]]  # what is told of it, its arenas, the call of a side
NAMES = {int(f): f.name for f in ours.EngineKVFormat}
ROWS, FUSED, HND, SPACED = (3, 5), (10, 11), (6, 7, 10), (3, 9, 10, 11)  # SPACED: gaps are the same to both
BY_SLOTS = {  # formats of the compiled module, and of the fallback
    "multi_layer_kv_transfer": ((0, 1, 2, 3, 5, 6, 7, 10, 11), (0, 1, 2, 3, 5)),
    "multi_layer_kv_transfer_unilateral": ((4, 3, 4, 5), (4, 3, 4, 5)),
    "single_layer_kv_transfer": ((1, 2, 3, 6, 7), (1, 2, 3, 5)),
    "single_layer_kv_transfer_sgl": ((9,), (9,)), "load_and_reshape_flash": ((9,), (9,)),
    "reshape_and_cache_back_flash": ((9,), (9,)),
}  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn)
THEIRS, WAYS, GUARD, MOST = 0, ("H2D", "D2H"), 192, 3 << 20  # MOST: bytes of a paged cache


class World:
    """Both modules, where they work, and the numbers a case is drawn from."""

    def __init__(self, theirs: Any, gpu: bool) -> None:
        self.modules, self.gpu = (theirs, ours), gpu
        self.device = torch.device("cuda", 0) if gpu else torch.device("cpu")
        self.aside = torch.cuda.stream(torch.cuda.Stream(self.device)) if gpu else contextlib.nullcontext()
        self.sync: Callable[[], None] = torch.cuda.synchronize if gpu else lambda: None
        self.rng, self.turn, self.kept = np.random.default_rng(0), 0, list[Any]()  # kept: what a call may still read

    def pick(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def maybe(self) -> bool:
        return bool(self.rng.integers(2))

    def upto(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def ids(self, bound: int, count: int, twice: bool) -> list[int]:
        found = self.rng.integers(0, bound, count) if twice and self.maybe() else self.rng.permutation(bound)[:count]
        return [int(x) for x in found]

    def words(self, side: int, to_host: bool, number: int, s: Shape, dtype: Any, stride: int = 0) -> tuple[Any, ...]:
        """A direction, a format and a descriptor, of the module's own types."""
        m, d, size = self.modules[side], self.modules[side].PageBufferShapeDesc(), dtype.itemsize
        d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size = s.planes, s.nl, s.nb, s.bs, s.nh, s.d // size, size
        d.block_stride_elems = stride
        if side == THEIRS and not self.gpu:
            d.dtype = dtype
        return getattr(m.TransferDirection, WAYS[to_host]), getattr(m.EngineKVFormat, NAMES[number]), d

    def put(self, data: Any, place: str) -> Any:
        """A copy on the device, in pinned, plain ("host") or page-aligned ("mapped") memory."""
        if place == "mapped":
            return torch.frombuffer(mmap.mmap(-1, len(data)), dtype=data.dtype).copy_(data)
        there, pin = self.device if place == "device" else "cpu", place == "pinned" and self.gpu
        return torch.empty(data.shape, dtype=data.dtype, device=there, pin_memory=pin).copy_(data)

    def numbers(self, values: Any, place: str, dtype: Any = torch.int64) -> Any:
        self.kept.append(self.put(torch.tensor(values, dtype=dtype), place))
        return self.kept[-1]


class Arena:
    """Pieces of random bytes with random bytes around them, once per module, at multiples of `step` bytes."""

    def __init__(self, w: World, name: str, sizes: Sequence[int], place: str, step: int = 1) -> None:
        self.name, self.sizes, self.offsets, at = f"{name} ({place})", sizes, list[int](), GUARD
        for size in sizes:
            self.offsets.append(-(-at // 256) * 256 + step * w.upto(0, 15))
            at = self.offsets[-1] + size + GUARD
        self.first = torch.frombuffer(bytearray(w.rng.bytes(at)), dtype=torch.uint8)
        self.copies = [w.put(self.first, place) for _ in w.modules]

    def addresses(self, side: int) -> list[int]:
        return [self.copies[side].data_ptr() + at for at in self.offsets]

    def compare(self) -> tuple[int, str]:
        a, b = (c.cpu() for c in self.copies)
        wrong, written = torch.nonzero(a != b)[:, 0].tolist(), int((a != self.first).sum())
        if not wrong:
            return written, ""
        piece = max(sum(o <= wrong[0] for o in self.offsets) - 1, 0)
        values = [int(x[wrong[0]]) for x in (self.first, a, b)]
        where = f"byte {wrong[0] - self.offsets[piece]} of piece {piece}, {self.sizes[piece]} bytes long"
        return written, f"{self.name}: {len(wrong)} bytes, the first {where}: before, theirs, ours are {values}"


class Views:
    """Tensors of one shape laid into an arena; `gaps`: bytes behind each entry of the first axes."""

    def __init__(self, w: World, name: str, shape: Any, dtype: Any, n: int, at: str, step: int, gaps: Any = ()) -> None:
        self.shape, self.dtype, self.strides = tuple(shape), dtype, [1] * len(shape)
        for k in reversed(range(len(shape) - 1)):
            gap = gaps[k] // dtype.itemsize if k < len(gaps) else 0
            self.strides[k] = self.strides[k + 1] * shape[k + 1] + gap
        self.arena = Arena(w, name, [self.strides[0] * shape[0] * dtype.itemsize] * n, at, step)

    def tensors(self, side: int) -> list[Any]:
        a, size = self.arena, self.dtype.itemsize
        whole = a.copies[side][: len(a.first) // size * size].view(self.dtype)
        return [whole.as_strided(self.shape, self.strides, at // size) for at in a.offsets]


def paged(w: World, number: int, s: Shape, dtype: Any, step: int, gaps: Sequence[int] = ()) -> Views:
    form = PAGED[(number, s.planes)]
    *outer, last = form.shape(s)
    return Views(w, "paged", (*outer, last // dtype.itemsize), dtype, form.tensors(s), "device", step, gaps)


def shape_of(w: World, number: int, blocks: int, fits: Any = None) -> tuple[Shape, Any]:
    planes, halves = 1 if number in ROWS + FUSED else 2, 2 if number in FUSED else 1
    while True:
        dtype = w.pick(*DTYPES[: 5 if w.gpu else 4])
        nh, hs = w.pick(1, 2, 3, 4, 5, 8, 16, 32, 40), w.pick(128, 128, 64, 96, 40, 33, 20, 16, 8, 6, 3, 1)
        if number in ROWS:
            nh, hs = 1, w.pick(576, 512, 132, 66, 64, 36, 10, 7)
        nl, nb, bs = w.upto(1, 4), blocks + w.upto(0, 8), w.pick(1, 2, 4, 8, 16, 32)
        s = Shape(nl=nl, nb=nb, bs=bs, nh=nh, d=hs * dtype.itemsize * halves, planes=planes)
        fine = fits(s) if fits else s.d % 2 == 0 and nh * min(s.d // (2 if s.d % 16 else 16), 32) <= 1024
        if fine and planes * nl * nb * bs * nh * s.d <= MOST:
            return s, dtype


def blocks(w: World) -> Case:
    number, to_host, count, per = w.turn % 12, w.maybe(), w.upto(1, 9), w.upto(1, 4)
    s, dtype = shape_of(w, number, count * per)
    unit, tokens = math.gcd(s.d, 16), per * s.bs
    gap = w.pick(0, unit * w.upto(1, 9)) if number in SPACED else 0
    cache = paged(w, number, s, dtype, unit, [gap])
    shape = (2, s.nl, tokens, s.nh * s.d // dtype.itemsize)[2 - s.planes :]
    places = w.pick(["pinned"], ["device"], ["pinned", "device"])
    objects = [Views(w, "objects", shape, dtype, count, place, unit) for place in places]
    ids = w.ids(s.nb, count * per, to_host)
    skip = w.pick(0, w.upto(0, len(ids)), w.upto(0, len(ids)), len(ids) + 2, -1 if w.gpu else 0)
    kinds = [("table", "list", "tensors"), ("addresses", "tensors"), ("int64", "int32", "host", "list")]
    forms = [tuple(w.pick(*kind) for kind in kinds) for _ in w.modules]
    by_address = w.gpu or not (gap or w.maybe())
    forms[THEIRS] = ("table", "addresses", "int64") if by_address else ("tensors", "tensors", "list")

    def run(side: int) -> None:
        (form, kind, place), step = forms[side], 4 if side == THEIRS and w.gpu else count
        addresses, tensors = cache.arena.addresses(side), cache.tensors(side)
        table: Any = addresses if form == "list" else w.numbers(addresses, "device")
        if form == "tensors":
            table = tensors[0] if number in (0, 8) else [tensors[: s.nl], tensors[s.nl :]] if number == 9 else tensors
        row = [objects[k % len(places)].tensors(side)[k] for k in range(count)]
        row = [o.data_ptr() for o in row] if kind == "addresses" else row
        there: Any = ids
        if place != "list":
            there = w.numbers(ids, "host" if place == "host" else "device", getattr(torch, place, torch.int64))
        way, format, d = w.words(side, to_host, number, s, dtype, cache.strides[0] if gap else 0)
        for at in range(0, count, step):
            left, some = skip if skip < 0 else max(skip - at * per, 0), there[at * per : (at + step) * per]
            call = partial(w.modules[side].multi_layer_block_kv_transfer, table, row[at : at + step], some, w.device)
            call(way, d, tokens, format, left)

    return locals(), [cache.arena, *(o.arena for o in objects)], run


def slots(w: World, op: str) -> Case:
    formats, multi, flash = BY_SLOTS[op][not w.gpu], op.startswith("multi"), "flash" in op
    number, to_host = formats[w.turn % len(formats)], op.startswith("load") if flash else w.maybe()
    halves = 2 if number in FUSED else 1

    def fits(s: Shape) -> bool:
        odd = number in HND + FUSED and s.d // halves % math.gcd(s.nh * s.d, 8)
        fine = not odd and (number != 0 or s.nl > 1)
        return fine if op == "multi_layer_kv_transfer" else (s.nh * s.d if multi else s.d) % 8 == 0

    drawn, dtype = shape_of(w, number, w.upto(1, 24), fits)
    s = drawn if multi else replace(drawn, nl=1)
    unit, count, hidden = math.gcd(s.nh * s.d, 8), min(w.upto(1, 80), s.nb * s.bs), s.nh * s.d // dtype.itemsize
    gaps = [0, 0, 0] if multi else [8 * w.pick(0, w.upto(1, 9)) for _ in range(3)]
    cache = paged(w, number or 1, s, dtype, unit, gaps[: 0 if number == 5 else 1 if number in (3, 9) else 2])
    place, layer, token_major, tensors = w.pick("pinned", "device"), w.upto(0, drawn.nl - 1), w.maybe(), w.maybe()
    shape: Any = (s.planes, drawn.nl, count, hidden)
    if not (multi or flash):
        shape = (count, hidden) if s.planes == 1 else (count, 2, hidden) if token_major else (2, count, hidden)
    rows = Views(w, "rows", shape, dtype, 1, place, unit, [0] * (len(shape) - 2) + gaps[2:] * (s.planes - 1))
    ids, skip = w.ids(s.nb * s.bs, count, to_host), w.pick(0, w.upto(0, count - 1))
    share = w.rng.random() if w.maybe() and (w.gpu or not flash) else 0
    ids = [-w.upto(1, 99) if w.rng.random() < share else x for x in ids]
    sizes = 0 if number in ROWS and w.maybe() else s.bs, s.d // dtype.itemsize // halves
    where = [(w.pick("device", "pinned"), w.pick("device", "pinned")) for _ in w.modules]

    def run(side: int) -> None:
        row, there, layers = rows.tensors(side)[0], w.numbers(ids, where[side][0]), cache.tensors(side)
        way, format, _ = w.words(side, to_host, number, s, dtype)
        table: Any = layers
        if side == THEIRS or not (tensors and number):
            table = w.numbers(cache.arena.addresses(side), where[side][1])
        common = row, table, there, w.device, s.nb * s.bs, way, format
        args: dict[str, Any] = {
            "multi_layer_kv_transfer": (*common, *sizes, skip),
            "multi_layer_kv_transfer_unilateral": common,
            "single_layer_kv_transfer": (row, *layers, there, way, format, token_major),
            "single_layer_kv_transfer_sgl": (row, *layers, there, way, token_major),
        }
        getattr(w.modules[side], op)(*args.get(op, (row, *layers, there, layer)))

    return locals(), [cache.arena, rows.arena], run


def one_copy(w: World) -> Case:
    """A copy from or to memory that is pinned as a whole, or registered in pieces side by side."""
    registered, to_host = w.gpu and w.maybe(), w.maybe()
    nbytes = w.pick(0, w.upto(1, 300), w.upto(1, 1 << 16), w.upto(1, 1 << 20))
    alignment = 4096 << w.upto(0, 3) if registered else 1 << w.upto(4, 26)
    host = Arena(w, "host", [nbytes + 9000], "mapped" if registered else "pinned")
    there = Arena(w, "device", [nbytes + 300], "device")
    offset, behind = host.offsets[0] + w.upto(0, 8999), there.offsets[0] + w.upto(0, 299)

    def run(side: int) -> None:
        m, base, size = w.modules[side], host.copies[side].data_ptr(), -(-len(host.first) // 4096) * 4096
        ends: list[Any] = [base + offset, there.copies[side].data_ptr() + behind]
        if side == THEIRS and not w.gpu:
            ends = [host.copies[side][offset:], there.copies[side][behind:]]
        with contextlib.ExitStack() as stack:
            for at in range(0, size, alignment) if registered else ():
                code = int(torch.cuda.cudart().cudaHostRegister(base + at, min(alignment, size - at), 0))
                assert code == 0, f"cudaHostRegister: {code}"
                stack.callback(torch.cuda.cudart().cudaHostUnregister, base + at)
            stack.callback(w.sync)
            (dest, src), way = ends if to_host else ends[::-1], getattr(m.TransferDirection, WAYS[to_host])
            m.lmcache_memcpy_async(dest, src, nbytes, way, offset, alignment)

    return locals(), [host, there], run


def many_copies(w: World) -> Case:
    count, most = w.pick(1, 3, 4, 50, 600), w.pick(9, 200, 5000, 90000)
    size = most + w.pick(100, 3000, 1 << 20)
    arenas = [Arena(w, name, [size], "host") for name in w.pick(("from", "to"), ("both",))]
    sizes = [w.pick(0, most, w.upto(0, most), w.upto(0, most)) for _ in range(count)]
    places = [[w.upto(0, size - n) for n in sizes] for _ in range(2)]

    def run(side: int) -> None:
        src, dst = ([arenas[-k].addresses(side)[0] + at for at in places[k]] for k in range(2))
        w.modules[side].batched_memcpy(src, dst, sizes)

    return locals(), arenas, run


def plan(w: World) -> Case:
    """Objects by way of staging buffers that batches take in turn, for one or two kernel groups."""
    to_host, count, batch, size = w.maybe(), w.upto(1, 9), w.upto(1, 4), 0
    batches = [min(batch, count - k) for k in range(0, count, batch)]
    groups: list[Any] = []
    for k in range(w.upto(1, 2)):
        number, per = (w.turn + 5 * k) % 12, w.upto(1, 3)
        s, dtype = shape_of(w, number, batch * per)
        ids = [x for n in batches for x in w.ids(s.nb, n * per, to_host)]
        skips = [w.pick(0, 0, w.upto(0, n * per)) for n in batches]
        groups.append((number, s, dtype, per, ids, skips, size, paged(w, number, s, dtype, math.gcd(s.d, 16))))
        size += -(-s.planes * s.nl * per * s.bs * s.nh * s.d // 64) * 64
    host, staging = Arena(w, "objects", [size] * count, "pinned"), Arena(w, "staging", [size] * batch, "device", 16)
    alignment, on_error = w.pick(4096, 1 << 16, 1 << 26), [g[:7] for g in groups]

    def run(side: int) -> None:
        m, specs, steps, far = w.modules[side], [], [], host.addresses(side)
        for number, s, dtype, per, ids, _, begin, cache in groups:
            table, there = w.numbers(cache.arena.addresses(side), "device"), w.numbers(ids, "device")
            way, format, d = w.words(side, to_host, number, s, dtype)
            temp = [a + begin for a in staging.addresses(side)]
            specs.append((table, temp, d, per * s.bs, format, there))
        for k, n in enumerate(batches):
            ends = list(zip(far[k * batch :][:n], staging.addresses(side), strict=False))
            copies = [(*(e if to_host else e[::-1]), size, host.offsets[k * batch + j]) for j, e in enumerate(ends)]
            steps.append((copies, [(i, k * batch * g[3], n * g[3], n, g[5][k]) for i, g in enumerate(groups)]))
        if w.gpu or side != THEIRS:
            made = [m.KernelGroupSpec(t.data_ptr(), *more, i.data_ptr(), len(i)) for t, *more, i in specs]
            todo = [m.BatchStep([m.StagingCopy(*c) for c in cs], [m.LaunchVar(*x) for x in xs]) for cs, xs in steps]
            m.execute_object_group_transfer(way, w.device, alignment, made, todo)
            return
        for copies, launches in steps:
            for launched in (to_host, not to_host):
                for i, at, k, n, skip in launches if launched else ():
                    g = specs[i]
                    m.multi_layer_block_kv_transfer(g[0], g[1][:n], g[5][at : at + k], w.device, way, *g[2:5], skip)
                for dest, src, nbytes, _ in () if launched else copies:
                    m.batched_memcpy([src], [dest], [nbytes])

    return locals(), [*(g[7].arena for g in groups), host, staging], run


DRAW: dict[str, tuple[int, Callable[[World], Case]]] = {  # how often in a round, and how
    "multi_layer_block_kv_transfer": (5, blocks),
    **{op: (4 if op == "multi_layer_kv_transfer" else 2, partial(slots, op=op)) for op in BY_SLOTS},
    "lmcache_memcpy_async": (2, one_copy), "batched_memcpy": (1, many_copies),
    "execute_object_group_transfer": (3, plan),
}  # fmt: skip


def try_case(w: World, op: str, label: str, c: Counter[str]) -> None:
    simple, who = list[str](), "drawing"
    try:
        about, arenas, run = DRAW[op][1](w)
        simple, aside = [f"{k} = {str(v)[:900]}" for k, v in about.items() if " at 0x" not in repr(v)], w.maybe()
        for side in range(2):
            who = ("theirs", "ours")[side]
            w.sync()
            with w.aside if aside else contextlib.nullcontext():
                run(side)
            w.sync()
            w.kept.clear()
        found = [a.compare() for a in arenas]
    except Exception as error:
        c[f"raised, {who}"] += 1
        if c[f"raised, {who}"] == 1:
            print(f"{op}, {label}: {who} raised {type(error).__name__}: {str(error)[:400]}", *simple, sep="\n    ")
        return
    wrong = [f[1] for f in found if f[1]]
    c.update(bytes=sum(2 * len(a.first) for a in arenas), written=sum(f[0] for f in found), differing=bool(wrong))
    if wrong and c["differing"] == 1:
        print(f"{op}, {label}: differs", *wrong, *simple, sep="\n    ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    gpu, name = args.path != "fallback", "lmcache.python_ops_fallback"
    spec: Any = util.spec_from_file_location("lmcache.c_ops", args.path) if gpu else util.find_spec(name)
    w = World(util.module_from_spec(spec), gpu)
    spec.loader.exec_module(w.modules[THEIRS])
    print(f"{args.path}, {args.cases} cases, seed {args.seed}, torch {torch.__version__}, {w.device}", flush=True)
    order = [op for k in range(5) for op, (often, _) in DRAW.items() if often > k]
    counts: dict[str, Counter[str]] = {op: Counter() for op in DRAW}
    for at, op in enumerate((order * args.cases)[: args.cases]):
        w.rng, w.turn = np.random.default_rng([args.seed, at]), counts[op]["cases"]
        counts[op]["cases"] += 1
        try_case(w, op, f"case {at}", counts[op])
    columns = ("cases", "bytes", "written", "differing", "raised, theirs", "raised, ours", "raised, drawing")
    print()
    for row, cells in (("operation", columns), *((op, [c[name] for name in columns]) for op, c in counts.items())):
        print(f"{row:35s}" + "".join(f" | {cell:>15}" for cell in cells))
    print(f"\n{LEFT_OUT}", end="")
    return int(any(c[name] for c in counts.values() for name in columns[3:]))


if __name__ == "__main__":
    sys.exit(main())
