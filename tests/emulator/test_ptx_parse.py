"""The accepted language is closed: whatever is outside it is refused when the module is read."""

from __future__ import annotations

import pytest

from tests.emulator.ptx_check import HEADER
from tests.emulator.ptx_run import Module
from tests.emulator.ptx_text import PtxSyntaxError

REGISTERS = ".reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<4>; .reg .b64 %d<4>; .shared .align 4 .b8 s[4];"


def module(body, registers=REGISTERS, end="ret;"):
    return Module(f"{HEADER}.visible .entry k(.param .u64 p)\n{{\n{registers}\n{body}\n{end} }}")


def test_what_is_accepted_is_listed():
    found = module("mov.u32 %r1, %tid.x; mov.u32 %r2, s; mov.b32 %r1, {%h1, %h2}; @%p1 bra end; end: mov.u32 %r1, 5;")
    want = {"mov.u32", "mov.u32 %tid.x", "mov.u32 address", "mov.b32 pack", "bra", "ret"}
    assert found.instructions() == want


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("frobnicate.u32 %r1, %r2;", "unknown instruction frobnicate.u32"),
        ("add.f16x2 %r1, %r2, %r3;", "unknown instruction"),
        ("add.sat.s32 %r1, %r2, %r3;", "unknown instruction"),
        ("add %r1, %r2, %r3;", "unknown instruction add"),
        ("ld.global.L2::128B.u32 %r1, [%d1];", "unknown instruction"),
        ("ld.volatile.global.u32 %r1, [%d1];", "unknown instruction"),
        ("ld.local.u32 %r1, [%d1];", "unknown instruction"),
        ("ld.u32 %r1, [%d1];", "unknown instruction"),
        ("ld.global.v4.u64 {%d1, %d2, %d3, %d0}, [%d1];", "unknown instruction"),
        ("st.param.u32 [%d1], %r1;", "unknown instruction"),
        ("setp.lo.s32 %p1, %r1, %r2;", "unknown instruction"),
        ("setp.lt.b32 %p1, %r1, %r2;", "unknown instruction"),
        ("shfl.idx.b32 %r1, %r2, %r3, 31;", "unknown instruction"),
        ("cvt.f32.u32 %r1, %r2;", "unknown instruction"),
        ("setp.lt.f16 %p1|%p2, %h1, %h2;", "wrong number of operands"),
        ("mul.f32 %r1, %r2, %r3;", "unknown instruction"),
        ("bar.sync 1;", "the only barrier"),
        ("bar.sync 0, 32;", "the only barrier"),
        ("@%p1 bar.sync 0;", "a guard on bar.sync"),
        ("@%p1 shfl.sync.idx.b32 %r1, %r2, 0, 31, -1;", "a guard on shfl.sync.idx.b32"),
        ("bra nowhere;", "no instruction to branch to"),
        ("mov.u32 %r1, %smid;", "unknown register %smid"),
        ("mov.u64 %d1, %tid.x;", "is no u64 source"),
        ("mov.u32 %r1, p;", "the address of p has 64 bits"),
        ("mov.u32 %r1, %r4;", "unknown register %r4"),
        ("mov.u32 %r1, %x;", "unknown register %x"),
        ("@%r1 ret;", "a guard must be a predicate"),
        ("add.u32 %r1, %r2, %d1;", "64 bits, u32 is asked for"),
        ("add.u32 %d1, %r2, %r1;", "64 bits, u32 is given"),
        ("add.u32 %r1, %r2;", "wrong number of operands"),
        ("add.u32 %r1, %r2, %r2, %r3;", "wrong number of operands"),
        ("add.u32 5, %r2, %r2;", "is no destination"),
        ("add.u32 %r1|%r2, %r2, %r2;", "wrong number of operands"),
        ("selp.u32 %r1, %r2, %r3, !%p1;", "is no pred source"),
        ("ld.global.v2.u32 %r1, [%d1];", "needs 2 data operands"),
        ("ld.global.u32 %r1, %d1;", "needs an .address."),
        ("ld.global.u32 %r1, [%r1];", "is no base of a global address"),
        ("ld.global.u64 %r1, [%d1];", "cannot hold u64"),
        ("ld.param.u32 %r1, [s];", "s is no param variable"),
        ("ld.global.u32 %r1, [%d1], 5;", "wrong number of operands"),
        ("ld.global.u32 5, [%d1];", "cannot hold u32"),
        ("atom.global.add.u32 %r1, [%d1], %r2, %r3;", "wrong number of operands"),
        ("atom.global.add.u32 %d1, [%d1], %r2;", "cannot hold u32"),
        ("mov.u32 %r1, {%h1, %h2};", "operands of mov.u32"),
        ("mov.b32 %r1, {%h1, %h2, %h3};", "3 parts in mov.b32"),
        ("mov.u32 %r1, 4294967296;", "does not fit u32"),
        ("mov.u32 %r1, -2147483649;", "does not fit u32"),
        ("mov.u32 %r1, 0f3F800000;", "a float literal of 32 bits as u32"),
        ("mov.f32 %r1, 1;", "an integer as f32"),
        ("mov.u32 %r1, 010;", "octal literal"),
        ("x: x: mov.u32 %r1, 1;", "label x twice"),
        ("ret 5;", "ret takes no operands"),
        (".reg .b8 %b1;", "8-bit registers"),
        (".reg .v4 %b1;", "unknown type .v4"),
        (".pragma \"unroll\";", "unknown pragma"),
        (".local .b32 x;", ".local is no instruction"),
        ("{ .reg .pred q; } @q ret;", "unknown register q"),
        ("mov.u32 %r1, `5`;", "cannot read"),
    ],
)  # fmt: skip
def test_refusals_name_the_line(body, message):
    with pytest.raises(PtxSyntaxError, match=message) as caught:
        module(body)
    assert caught.value.line in (7, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".version 8.0 .target sm_90a .address_size 64", "target sm_90a"),
        (".version 8.0 .target sm_75 .address_size 32", "address size"),
        (HEADER + ".func f() { ret; }", "unknown directive .func"),
        (HEADER + ".const .u32 x = 1;", "unknown directive .const"),
        (HEADER + ".extern .shared .b8 x[];", "unknown directive .extern"),
        (HEADER + ".global .b8 x[2] = {1, 2, 3};", "too many values"),
        (HEADER + ".visible .entry k() .cluster 2 { ret; }", "unknown directive .cluster"),
        (HEADER + ".visible .entry k() { }", "does not end in ret, exit or bra"),
        (HEADER + ".visible .entry k() { .reg .pred %p<2>; @%p1 ret; }", "does not end in ret, exit or bra"),
        (HEADER + ".visible .entry k() { ret;", "expected a name, found ''"),
    ],
)
def test_module_refusals(text, message):
    with pytest.raises(PtxSyntaxError, match=message):
        Module(text)


def test_an_inner_scope_hides_the_outer_register():
    text = (
        "mov.u32 %r1, 1; { .reg .b32 %r1; mov.u32 %r1, 2; } { .reg .b64 %r1; mov.u64 %r1, 3; } ld.param.u64 %d1, [p];"
    )
    program = module(text).entries["k"]
    registers = [i.operands[0] for i in program.entry.instructions[:3]]
    assert len({r.name for r in registers}) == 3
    assert [r.bits for r in registers] == [32, 32, 64]
