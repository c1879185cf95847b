"""Loads, stores and atomics: what moves, and which accesses are refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.emulator.ptx_check import HEADER, Covered, edges, evaluate, interpret, kernel, storage
from tests.emulator.ptx_frame import PtxFaultError
from tests.emulator.ptx_memory import Memory
from tests.emulator.ptx_run import Module
from tests.emulator.ptx_text import SIZES

TESTED = Covered()
KINDS = [f"{k}{bits}" for k in "bus" for bits in (8, 16, 32, 64)] + ["f32", "f64"]
LOAD_CACHES = ("", ".ca", ".cg", ".cs", ".lu", ".L1::no_allocate")
STORE_CACHES = ("", ".wb", ".cg", ".cs", ".wt", ".L1::no_allocate")


def vectors():
    for (suffix, count), kind in itertools.product((("", 1), (".v2", 2), (".v4", 4)), KINDS):
        if SIZES[kind] * count <= 128:
            yield suffix, count, kind


LOADS = [(f"ld.global{c}{s}.{k}", n, k) for c in LOAD_CACHES for s, n, k in vectors()]
STORES = [(f"st.global{c}{s}.{k}", n, k) for c in STORE_CACHES for s, n, k in vectors()]
PARAM_LOADS = [(f"ld.param{s}.{k}", n, k) for s, n, k in vectors()]
SHARED = [(s, n, k) for s, n, k in vectors()]
TESTED.update(form for form, _, _ in (*LOADS, *STORES, *PARAM_LOADS))
TESTED.update(f"{verb}.shared{s}.{k}" for verb in ("ld", "st") for s, _, k in SHARED)


def braces(names):
    return names[0] if len(names) == 1 else "{{" + ", ".join(names) + "}}"


def extended(value, kind, bits):
    """What a register of `bits` holds after a load: extended by the sign of the type."""
    return interpret(value, kind) % (1 << bits)


def aligned(nbytes, fill=0):
    room = np.full(nbytes + 64, fill, np.uint8)
    return room[-room.ctypes.data % 16 :][:nbytes]


def payload(kind, count, lanes):
    values = [v % (1 << SIZES[kind]) for v in edges(kind)]
    flat = [values[(i * 7 + i // 5) % len(values)] for i in range(count * lanes)]
    return np.array(flat, f"u{SIZES[kind] // 8}")


def addressed(array_bytes, address="{a0}"):
    return f"mul.wide.u32 %d45, %r40, {array_bytes}; add.s64 %d45, {address}, %d45;"


def launch_memory(**arrays):
    memory = Memory()
    for name, array in arrays.items():
        memory.add_array(array, name)
    return memory


def run_with(text_code, results, columns, memory_array):
    """Run code whose {a0} holds the address of an array, registered through a second module memory."""
    lanes = len(columns[0])
    outputs = [np.zeros(lanes, f"u{storage(k) // 8}") for k in results]
    memory = launch_memory(array=memory_array, **{f"out{i}": o for i, o in enumerate(outputs)})
    inputs = [np.array(c, np.uint64) for c in columns]
    for i, array in enumerate(inputs):
        memory.add_array(array, f"in{i}")
    text = kernel(text_code, results, ("u64",) * len(columns))
    params = np.array([a.ctypes.data for a in (*inputs, *outputs)], np.uint64).tobytes()
    Module(text).run("k", 1, lanes, params, memory)
    return [o.tolist() for o in outputs]


@pytest.mark.parametrize(("form", "count", "kind"), LOADS, ids=[form for form, _, _ in LOADS])
def test_load(form, count, kind):
    data = aligned(count * 64 * SIZES[kind] // 8).view(f"u{SIZES[kind] // 8}")
    data[:] = payload(kind, count, 64)
    wide = "b64" if kind[0] in "us" else f"b{storage(kind)}"
    names = [f"{{z{i}}}" for i in range(count)]
    code = addressed(data.itemsize * count) + f"{form} {braces(names)}, [%d45+0];"
    found = run_with(code, (wide,) * count, [[data.ctypes.data] * 64], data)
    want = [[extended(int(v), kind, SIZES[wide]) for v in data[i::count]] for i in range(count)]
    assert found == want


@pytest.mark.parametrize(("form", "count", "kind"), STORES, ids=[form for form, _, _ in STORES])
def test_store(form, count, kind):
    data = aligned(count * 64 * SIZES[kind] // 8, 0xEE).view(f"u{SIZES[kind] // 8}")
    wide = f"b{storage(kind)}" if kind[0] == "f" else "b64"
    want = payload(kind, count, 64)
    high = 0x77 << 56 if SIZES[kind] < 64 else 0  # what lies above the type in the register is not stored
    columns = [[data.ctypes.data] * 64, *([int(v) | high for v in want[i::count]] for i in range(count))]
    names = [f"{{a{i + 1}}}" for i in range(count)]
    narrow = "".join(f"cvt.u32.u64 %r{44 + i}, {n};" for i, n in enumerate(names)) if wide == "b32" else ""
    names = [f"%r{44 + i}" for i in range(count)] if wide == "b32" else names
    code = addressed(data.itemsize * count) + narrow + f"{form} [%d45], {braces(names)};"
    run_with(code, (), columns, data)
    np.testing.assert_array_equal(data, want)


@pytest.mark.parametrize(("form", "count", "kind"), PARAM_LOADS, ids=[form for form, _, _ in PARAM_LOADS])
@pytest.mark.parametrize("by_register", [False, True])
def test_param_load(form, count, kind, by_register):
    size = SIZES[kind] // 8 * count
    values = payload(kind, count, 4)
    out = np.zeros(32 * count, np.uint64)
    wide = 64 if kind[0] in "us" else storage(kind)
    letter = {16: "%h", 32: "%r", 64: "%d"}[wide]
    names = [f"{letter}{i}" for i in range(count)]
    # the lanes read different places only when the address is in a register
    address = "[%d20+16]" if by_register else f"[block+{16 + 2 * size}]"
    text = f"""{HEADER}.visible .entry k(.param .u64 out, .param .align 16 .b8 block[{16 + 4 * size}]) {{
        .reg .b16 %h<9>; .reg .b32 %r<20>; .reg .b64 %d<30>;
        mov.u32 %r10, %tid.x; ld.param.u64 %d21, [out]; mul.wide.u32 %d22, %r10, {8 * count}; add.s64 %d21, %d21, %d22;
        and.b32 %r11, %r10, 3; mul.wide.u32 %d22, %r11, {size}; mov.b64 %d20, block; add.s64 %d20, %d20, %d22;
        {form} {braces(names).replace("{{", "{").replace("}}", "}")}, {address};
        {"".join(f"st.global.b{wide} [%d21+{8 * i}], {n};" for i, n in enumerate(names))} ret; }}"""
    params = np.array([out.ctypes.data, 0, 0, 0], np.uint64).tobytes() + values.tobytes()
    module = Module(text)
    module.run("k", 1, 32, params, launch_memory(out=out))
    rows = values.reshape(4, count)
    want = [extended(int(v), kind, wide) for lane in range(32) for v in rows[lane % 4 if by_register else 2]]
    assert out.tolist() == want
    with pytest.raises(ValueError, match="bytes of parameters instead of"):
        module.run("k", 1, 32, params[:-1], launch_memory(out=out))


@pytest.mark.parametrize(("suffix", "count", "kind"), SHARED, ids=[f"{s}.{k}" for s, _, k in SHARED])
def test_shared_memory_belongs_to_the_cta(suffix, count, kind):
    size, wide = SIZES[kind] // 8 * count, 64 if kind[0] in "us" else storage(kind)
    values = payload(kind, count, 128).reshape(128, count)
    source, out = aligned(values.nbytes), np.zeros(128 * count, np.uint64)
    source.view(values.dtype)[:] = values.reshape(-1)
    letter = {16: "%h", 32: "%r", 64: "%d"}[wide]
    names = braces([f"{letter}{i}" for i in range(count)]).replace("{{", "{").replace("}}", "}")
    stores = "".join(f"st.global.b{wide} [%d21+{8 * i}], {letter}{i};" for i in range(count))
    text = f"""{HEADER}.visible .entry k(.param .u64 source, .param .u64 out) {{
        .reg .b16 %h<9>; .reg .b32 %r<30>; .reg .b64 %d<30>;
        .shared .align 4 .b8 before[4]; .shared .align 16 .b8 tile[{64 * size}];
        mov.u32 %r10, %tid.x; mov.u32 %r11, %ctaid.x; mad.lo.u32 %r12, %r11, 64, %r10;
        ld.param.u64 %d20, [source]; mul.wide.u32 %d22, %r12, {size}; add.s64 %d20, %d20, %d22;
        ld.param.u64 %d21, [out]; mul.wide.u32 %d22, %r12, {8 * count}; add.s64 %d21, %d21, %d22;
        mov.u32 %r13, tile; mad.lo.u32 %r14, %r10, {size}, %r13; xor.b32 %r15, %r10, 63; mul.lo.u32 %r15, %r15, {size};
        cvt.u64.u32 %d23, %r15; mov.u64 %d24, tile; add.s64 %d23, %d23, %d24;
        ld.global{suffix}.{kind} {names}, [%d20]; st.shared{suffix}.{kind} [%r14], {names}; bar.sync 0;
        ld.shared{suffix}.{kind} {names}, [%d23]; {stores} ret; }}"""
    params = np.array([source.ctypes.data, out.ctypes.data], np.uint64).tobytes()
    Module(text).run("k", 2, 64, params, launch_memory(source=source, out=out), seed=1)
    want = [extended(int(v), kind, wide) for lane in range(128) for v in values[lane ^ 63]]
    assert out.tolist() == want


ATOMS = [(n, k) for n in ("add", "min", "max") for k in ("u32", "u64")] + [
    ("cas", "b32"),
    ("cas", "b64"),
    ("exch", "b64"),
]
TESTED.update(f"atom.{space}.{n}.{k}" for space in ("global", "shared") for n, k in ATOMS)
TESTED.update(f"red.{space}.{n}.{k}" for space in ("global", "shared") for n, k in ATOMS if n not in ("cas", "exch"))


def combined(name, cell, value):
    return {"add": cell + value, "min": min(cell, value), "max": max(cell, value), "exch": value}[name]


@pytest.mark.parametrize(
    ("verb", "name", "kind"),
    [(v, n, k) for v in ("atom", "red") for n, k in ATOMS if v == "atom" or n not in ("cas", "exch")],
)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomic(verb, space, name, kind):
    bits, width, initial = SIZES[kind], SIZES[kind] // 8, 5
    cells = np.full(4, initial, f"u{width}")
    given = np.array([v % (1 << bits) for v in (edges(kind) * 3)[:64]], f"u{width}")
    out = np.zeros(64, f"u{width}")
    letter = {32: "%r", 64: "%d"}[bits]
    target = "%d20" if space == "global" else "%d23"
    load = "" if space == "global" else f"st.shared.b{bits} [%d23], {initial}; bar.sync 0;"
    copy_back = (
        ""
        if space == "global"
        else f"bar.sync 0; ld.shared.b{bits} {letter}3, [%d23]; st.global.b{bits} [%d20], {letter}3;"
    )
    operands = f"{letter}2, 17" if name == "cas" else f"{letter}2"
    compare = f"selp.b{bits} {letter}2, 5, 17, %p0;" if name == "cas" else ""
    text = f"""{HEADER}.visible .entry k(.param .u64 cells, .param .u64 given, .param .u64 out) {{
        .reg .pred %p<2>; .reg .b32 %r<30>; .reg .b64 %d<30>; .shared .align 8 .b8 s[32];
        mov.u32 %r10, %tid.x; and.b32 %r11, %r10, 3; setp.lt.u32 %p0, %r10, 40; setp.eq.u32 %p1, %r11, 2;
        ld.param.u64 %d20, [cells]; mul.wide.u32 %d22, %r11, {width}; add.s64 %d20, %d20, %d22;
        mov.u64 %d23, s; add.s64 %d23, %d23, %d22; {load}
        mul.wide.u32 %d22, %r10, {width}; ld.param.u64 %d24, [given]; add.s64 %d24, %d24, %d22;
        ld.param.u64 %d25, [out]; add.s64 %d25, %d25, %d22; mov.b{bits} {letter}1, 99;
        ld.global.b{bits} {letter}2, [%d24]; {compare}
        @!%p1 {verb}.{space}.{name}.{kind} {f"{letter}1, " if verb == "atom" else ""}[{target}], {operands};
        st.global.b{bits} [%d25], {letter}1; {copy_back} ret; }}"""
    params = np.array([cells.ctypes.data, given.ctypes.data, out.ctypes.data], np.uint64).tobytes()
    Module(text).run("k", 1, 64, params, launch_memory(cells=cells, given=given, out=out))
    want, old = [initial] * 4, []
    for lane, value in enumerate(given.tolist()):
        cell = want[lane % 4]
        if lane % 4 == 2:
            old.append(99)
            continue
        old.append(cell if verb == "atom" else 99)
        if name == "cas":
            want[lane % 4] = 17 if cell == (5 if lane < 40 else 17) else cell
        else:
            want[lane % 4] = combined(name, cell, value) % (1 << bits)
    assert cells.tolist() == want
    assert out.tolist() == old


def fault(code, addresses, memory_array, results=("u32",)):
    with pytest.raises(PtxFaultError) as caught:
        run_with(code, results, [addresses], memory_array)
    return caught.value


def test_a_lane_past_the_end_is_named():
    data = aligned(64)
    start = data.ctypes.data
    addresses = [start] * 40
    addresses[37] = start + 64
    error = fault("ld.global.u32 {z0}, [{a0}];", addresses, data)
    assert (error.kernel, error.cta, error.thread, error.address) == ("k", 0, 37, start + 64)
    assert error.text == "ld.global.u32 %r1, [%d0];"
    assert f"k, line {error.line}: ld.global.u32 %r1, [%d0];: cta 0, thread 37: read of 4 bytes" in str(error)
    assert "out of bounds; the nearest range is array" in str(error)


@pytest.mark.parametrize("shift", [-4, 64, 60 - (1 << 40)])
def test_bounds_on_both_sides(shift):
    data = aligned(64)
    addresses = [data.ctypes.data + shift]
    assert fault("st.global.u32 [{a0}], 1;", addresses, data, ()).address == addresses[0]
    run_with("st.global.u32 [{a0}+60], 1;", (), [[data.ctypes.data]], data)


@pytest.mark.parametrize("address", [0, 8, 1 << 47, (1 << 64) - 16])
def test_wild_addresses(address):
    assert fault("ld.global.u64 {z0}, [{a0}];", [address], aligned(64), ("u64",)).address == address


def test_an_access_over_the_end_of_its_range():
    data = aligned(64)
    assert (
        fault("ld.global.v4.u32 {{{z0},%r44,%r45,%r46}}, [{a0}];", [data[:56].ctypes.data + 48], data[:56]).thread == 0
    )


MISALIGNED = [("v4.u32", "{{{z0},%r44,%r45,%r46}}", 16, s) for s in (1, 2, 4, 8)] + [
    ("u32", "{z0}", 4, s) for s in (1, 2)
]


@pytest.mark.parametrize(("form", "names", "size", "shift"), MISALIGNED)
def test_misalignment_is_of_the_whole_vector(form, names, size, shift):
    data = aligned(64)
    addresses = [data.ctypes.data] * 3
    addresses[1] += shift
    error = fault(f"ld.global.{form} {names}, [{{a0}}];", addresses, data)
    assert (error.thread, error.address) == (1, addresses[1])
    assert f"access of {size} bytes at {addresses[1]:#x} is misaligned" in str(error)


def test_lanes_that_do_not_execute_access_nothing():
    data = aligned(64)
    code = "setp.ne.u64 %p40, {a0}, 0; @%p40 st.global.u32 [{a0}], 7;"
    run_with(code, (), [[0, data.ctypes.data]], data)
    assert data.view(np.uint32)[0] == 7


def test_read_only_memory():
    data, memory = np.zeros(4, np.uint32), Memory()
    memory.add_array(data, "constants", writable=False)
    text = (
        HEADER
        + ".visible .entry k(.param .u64 p) {.reg .b64 %d<2>; ld.param.u64 %d1, [p]; st.global.u32 [%d1], 1; ret;}"
    )
    with pytest.raises(PtxFaultError, match="constants is read-only"):
        Module(text).run("k", 1, 1, data.ctypes.data.to_bytes(8, "little"), memory)


@pytest.mark.parametrize(("code", "message"), [
    ("mov.u32 %r44, tile; st.shared.u32 [%r44+16], 1;", "shared offset 0x10 is out of bounds of 16 bytes"),
    ("mov.u32 %r44, tile; st.shared.u32 [%r44+-4], 1;", "shared offset 0xfffffffc is out of bounds"),
    ("mov.u32 %r44, tile; st.shared.u64 [%r44+4], 1;", "access of 8 bytes at 0x4 is misaligned"),
    ("mov.u64 %d44, z0; ld.param.u64 %d45, [%d44+8];", "param offset 0x10 is out of bounds of 16 bytes"),
])  # fmt: skip
def test_bounds_of_the_other_spaces(code, message):
    declaration = ".shared .align 8 .b8 tile[16];"
    with pytest.raises(PtxFaultError, match=message):
        evaluate(code, ("u32",), ("u32",), [[0]], declaration)


def test_memory_keeps_its_ranges_apart():
    memory, data = Memory(), np.zeros(64, np.uint8)
    added = memory.add_array(data[:32], "first")
    with pytest.raises(ValueError, match="second overlaps first"):
        memory.add_array(data[16:48], "second")
    with pytest.raises(ValueError, match="no range of 0 bytes"):
        memory.add(added.address, 0, "empty")
    memory.add_array(data[32:], "second")
    assert [r.name for r in memory.ranges] == ["first", "second"]
    assert memory.find(added.address + 31, 2) is None
    memory.remove(added.address)
    assert memory.find(added.address) is None
    with pytest.raises(ValueError, match="no range starts at"):
        memory.remove(added.address)
