"""Branches, barriers, warp instructions, special registers and launches."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emulator.ptx_check import HEADER, Covered, evaluate
from tests.emulator.ptx_frame import PtxFaultError
from tests.emulator.ptx_memory import Memory
from tests.emulator.ptx_run import Module
from tests.helpers.profile import examples

TESTED = Covered()
ALL = 0xFFFFFFFF


def launch(body, grid, block, words, params="", values=(), registers="", **options):
    """Run a kernel whose %d0 is the address of `words` outputs of 32 bits and whose %r0 is the global thread number."""
    out = np.zeros(words, np.uint32)
    memory = Memory()
    memory.add_array(out, "out")
    text = f"""{HEADER}.visible .entry k(.param .u64 out{params}) {{
        .reg .pred %p<20>; .reg .b32 %r<40>; .reg .b64 %d<40>; {registers}
        ld.param.u64 %d0, [out]; mov.u32 %r0, %tid.x; mov.u32 %r30, %ctaid.x; mov.u32 %r31, %ntid.x;
        mad.lo.u32 %r0, %r30, %r31, %r0; mul.wide.u32 %d1, %r0, 4; add.s64 %d1, %d0, %d1;
        {body} }}"""
    block_bytes = out.ctypes.data.to_bytes(8, "little") + b"".join(v.to_bytes(4, "little") for v in values)
    Module(text).run("k", grid, block, block_bytes, memory, **options)
    return out.tolist()


@TESTED.by("mov.u32 %tid.x", "mov.u32 %ntid.x", "mov.u32 %ctaid.x", "mov.u32 %nctaid.x", "mov.u32 %laneid")
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(("grid", "block"), [(3, 64), (5, 40), (2, 1024), (9, 1000)])
def test_special_registers(grid, block, seed):
    names = ("%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x", "%laneid")
    body = "".join(f"mov.u32 %r1, {n}; st.global.u32 [%d1+{4 * grid * block * i}], %r1;" for i, n in enumerate(names))
    found = np.array(launch(body + "ret;", grid, block, 5 * grid * block, seed=seed)).reshape(5, grid, block)
    want = [(t, block, c, grid, t % 32) for c in range(grid) for t in range(block)]
    assert found.reshape(5, -1).T.tolist() == [list(row) for row in want]


@TESTED.by("mov.u64 %globaltimer", "nanosleep.u32")
def test_the_clock_moves_on_by_itself_and_with_those_that_sleep():
    body = "mov.u64 %d3, %globaltimer; mov.u64 %d4, %globaltimer; sub.s64 %d5, %d4, %d3; st.global.u32 [%d1], %d5;"
    body += "mul.lo.u32 %r2, %r0, 1000; setp.ne.u32 %p1, %r0, 9; @%p1 nanosleep.u32 %r2; mov.u64 %d5, %globaltimer;"
    body += "sub.s64 %d5, %d5, %d4; st.global.u32 [%d1+40], %d5; ret;"
    assert launch(body, 1, 10, 20) == [32] * 10 + [8032] * 10


@TESTED.by("mov.u64 address", "mov.b64 address", "mov.u32 address", "mov.b32 address")
def test_addresses_of_variables():
    declared = ".shared .align 4 .b8 first[3]; .shared .align 8 .b8 second[8];"
    body = f"{declared} mov.u32 %r1, second; st.global.u32 [%d1], %r1; mov.b32 %r1, first; st.global.u32 [%d1+4], %r1;"
    body += "mov.u64 %d2, second; st.global.u32 [%d1+8], %d2; mov.b64 %d2, last; st.global.u32 [%d1+12], %d2; ret;"
    assert launch(body, 1, 1, 4, ", .param .u32 middle, .param .u32 last", (1, 2)) == [8, 0, 8, 12]


def test_parameters_lie_at_their_alignment():
    text = f"""{HEADER}.visible .entry k(.param .u8 a, .param .u64 out, .param .u16 b, .param .align 16 .b8 c[4]) {{
        .reg .b32 %r<9>; .reg .b64 %d<9>; ld.param.u64 %d0, [out]; ld.param.u8 %r0, [a]; ld.param.u16 %r1, [b];
        ld.param.u32 %r2, [c]; st.global.v2.u32 [%d0], {{%r0, %r1}}; st.global.u32 [%d0+8], %r2; ret; }}"""
    out, memory = np.zeros(4, np.uint32), Memory()
    memory.add_array(out, "out")
    module = Module(text)
    assert module.entries["k"].param_bytes == 36
    params = b"\x07" + bytes(7) + out.ctypes.data.to_bytes(8, "little") + b"\x34\x12" + bytes(14) + b"\x01\x02\x03\x04"
    module.run("k", 1, 1, params, memory)
    assert out.tolist() == [7, 0x1234, 0x04030201, 0]


def test_global_variables_have_their_initial_values():
    data = ".global .align 8 .b8 table[8] = {1, 2, 255, 4, 0x10}; .global .u32 counter = -3;"
    body = "mov.u64 %d2, table; ld.global.u64 %d3, [%d2]; mov.b64 {%r1, %r2}, %d3; st.global.v2.u32 [%d1], {%r1, %r2};"
    body += "ld.global.u32 %r3, [counter]; st.global.u32 [%d1+8], %r3; ret;"
    out, memory = np.zeros(4, np.uint32), Memory()
    memory.add_array(out, "out")
    text = f"""{HEADER}{data}.visible .entry k(.param .u64 out) {{
        .reg .b32 %r<9>; .reg .b64 %d<9>; ld.param.u64 %d1, [out]; {body} }}"""
    module = Module(text)
    module.run("k", 1, 1, out.ctypes.data.to_bytes(8, "little"), memory)
    assert out.tolist() == [0x04FF0201, 0x10, ALL - 2, 0]
    assert [r.name for r in memory.ranges] == ["out"]
    address, nbytes = module.variables["table"]
    assert (address % 8, nbytes) == (0, 8)


@TESTED.by("bra", "bra.uni", "ret", "exit")
def test_divergent_branches_meet_again():
    body = """and.b32 %r1, %r0, 3; mov.u32 %r2, 100; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 1;
        @%p1 bra zero; @%p2 bra one; setp.eq.u32 %p3, %r1, 2; @!%p3 bra three;
        add.u32 %r2, %r2, 2; bra.uni join;
        three: add.u32 %r2, %r2, 3; @%p3 bra.uni join; setp.gt.u32 %p4, %r0, 60; @%p4 ret; bra join;
        zero: add.u32 %r2, %r2, 50; bra.uni join;
        back: add.u32 %r2, %r2, 1000; bra.uni done;
        one: setp.eq.u32 %p5, %r0, 9; @%p5 exit; bra join;
        join: mov.u32 %r3, -1; vote.sync.ballot.b32 %r4, %p1, %r3; xor.b32 %r2, %r2, 0; bra back;
        done: st.global.u32 [%d1], %r2; ret;"""
    want = [1000 + 100 + {0: 50, 1: 0, 2: 2, 3: 3}[i % 4] for i in range(64)]
    want[9] = want[63] = 0
    assert launch(body, 1, 64, 64) == want


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64), st.sampled_from([32, 64, 96]))
def test_divergent_loops(starts, block):
    text = """mov.u32 {z0}, 0; mov.u32 %r44, {a0};
        loop: setp.le.u32 %p40, %r44, 1; @%p40 bra done;
        add.u32 {z0}, {z0}, 1; and.b32 %r45, %r44, 1; setp.eq.u32 %p41, %r45, 1; @%p41 bra odd;
        shr.u32 %r44, %r44, 1; bra loop;
        odd: sub.u32 %r44, %r44, 1; setp.eq.u32 %p42, %r45, 0; @%p42 bra odd; bra loop;
        done: mov.u32 %r46, -1; shfl.sync.idx.b32 {z1}, {z0}, 0, 31, %r46;"""

    def steps(n):
        count = 0
        while n > 1:
            count, n = count + 1, n - 1 if n & 1 else n >> 1
        return count

    found = evaluate(text, ("u32", "u32"), ("u32",), [starts], block=block)
    assert found[0] == [steps(n) for n in starts]
    assert found[1] == [steps(starts[i // 32 * 32]) for i in range(len(starts))]


def test_a_uniform_branch_must_be_uniform():
    body = "setp.lt.u32 %p1, %r0, {limit}; @%p1 bra.uni there; there: ret;"
    launch(body.format(limit=32), 1, 64, 1)
    with pytest.raises(PtxFaultError, match="thread 32: a uniform branch on which the warp does not agree"):
        launch(body.format(limit=40), 1, 64, 1)


def test_an_endless_loop_is_given_up():
    with pytest.raises(PtxFaultError, match=r"line \d+: bra again;: cta 0, thread 5: .* too many steps"):
        launch("setp.ne.u32 %p1, %r0, 5; @%p1 ret; again: bra again; ret;", 1, 32, 1, max_steps=1000)


@TESTED.by("bar.sync")
def test_a_barrier_holds_each_cta_until_all_its_threads_are_there():
    body = """.shared .align 4 .b8 tile[512]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ntid.x; shl.b32 %r3, %r1, 2;
        setp.ge.u32 %p1, %r1, 64; @%p1 bra late; add.u32 %r4, %r0, 7; st.shared.u32 [%r3], %r4; bar.sync 0; bra read;
        late: mov.u32 %r5, 0;
        spin: add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, %r1; @%p2 bra spin;
        mul.lo.u32 %r4, %r0, 3; st.shared.u32 [%r3], %r4; bar.sync 0;
        read: sub.u32 %r6, %r2, %r1; sub.u32 %r6, %r6, 1; shl.b32 %r6, %r6, 2; ld.shared.u32 %r7, [%r6];
        bar.sync 0; st.shared.u32 [%r6], %r7; bar.sync 0; ld.shared.u32 %r8, [%r3]; st.global.u32 [%d1], %r8; ret;"""
    block, grid = 100, 3
    stored = [[c * block + t + 7 if t < 64 else 3 * (c * block + t) for t in range(block)] for c in range(grid)]
    assert launch(body, grid, block, grid * block, seed=4) == [v for row in stored for v in row]


def test_a_barrier_that_not_all_threads_reach():
    with pytest.raises(PtxFaultError, match=r"bar\.sync 0;: cta 1, thread 0: waits for threads of its CTA"):
        launch("setp.eq.u32 %p1, %r0, 70; @%p1 ret; bar.sync 0; ret;", 2, 64, 1)


def test_a_warp_split_over_two_barriers():
    body = "setp.lt.u32 %p1, %r0, 8; @%p1 bra other; bar.sync 0; ret; other: bar.sync 0; ret;"
    with pytest.raises(PtxFaultError, match="the lanes of a warp are at different barriers"):
        launch(body, 1, 64, 1)


def shuffled(mode, lane, b, c):
    """The lane read and the predicate, from the pseudocode of the ISA."""
    bval, cval, segmask = b & 31, c & 31, c >> 8 & 31
    max_lane = (lane & segmask) | (cval & ~segmask & 31)
    min_lane = lane & segmask
    if mode == "up":
        j, ok = lane - bval, lane - bval >= max_lane
    elif mode == "down":
        j, ok = lane + bval, lane + bval <= max_lane
    elif mode == "bfly":
        j, ok = lane ^ bval, lane ^ bval <= max_lane
    else:
        j = min_lane | (bval & ~segmask & 31)
        ok = j <= max_lane
    return (j if ok else lane), ok


@TESTED.by(*(f"shfl.sync.{mode}.b32" for mode in ("idx", "up", "down", "bfly")))
@pytest.mark.parametrize("mode", ["idx", "up", "down", "bfly"])
@pytest.mark.parametrize("control", [0x1F, 0, 7, 0x1817, 0x1018, 0x1C00, 0xFFFFFFFF, None])
def test_shuffle(mode, control):
    rng = random.Random(f"{mode}{control}")
    a = [rng.getrandbits(32) for _ in range(256)]
    uniform = mode != "idx" and control is not None
    b = [(w * 5 + 1 if uniform else rng.choice([*range(40), 63, 0x100003])) for w in range(8) for _ in range(32)]
    c = [rng.choice([0x1F, 0x1817, 3, 0x1C1F]) if control is None else control for _ in range(256)]
    text = f"shfl.sync.{mode}.b32 {{z0}}|{{z1}}, {{a0}}, {{a1}}, {{a2}}, 0xffffffff;"
    text += f"shfl.sync.{mode}.b32 {{z2}}, {{a0}}, {{a1}}, {{a2}}, -1;"
    found = evaluate(text, ("b32", "pred", "b32"), ("b32", "b32", "b32"), [a, b, c])
    reads = [shuffled(mode, i % 32, b[i], c[i]) for i in range(256)]
    values = [a[i // 32 * 32 + j] for i, (j, _) in enumerate(reads)]
    assert found == [values, [int(ok) for _, ok in reads], values]


@TESTED.by("vote.sync.ballot.b32")
@pytest.mark.parametrize("negated", [False, True])
def test_ballot_counts_the_members_that_execute(negated):
    votes = [(i * 7 // 3) & 1 for i in range(64)]
    text = f"""mov.u32 %r44, %laneid; setp.lt.u32 %p40, %r44, 20; mov.u32 {{z0}}, 1; @%p40 bra low;
        vote.sync.ballot.b32 {{z0}}, {"!" if negated else ""}{{a0}}, 0xFFF00000; bra done;
        low: vote.sync.ballot.b32 {{z0}}, {"!" if negated else ""}{{a0}}, 0x000FFFFF; done:"""
    (found,) = evaluate(text + " mov.u32 %r45, 0;", ("b32",), ("pred",), [votes], block=64)
    for lane in range(64):
        start, low = lane // 32 * 32, lane % 32 < 20
        members = range(20) if low else range(20, 32)
        assert found[lane] == sum((votes[start + i] ^ int(negated)) << i for i in members)


def test_a_shuffle_waits_for_the_members_that_are_behind():
    body = """setp.lt.u32 %p1, %r0, 8; mov.u32 %r2, 1; @%p1 bra later;
        here: shfl.sync.idx.b32 %r3, %r2, 3, 31, -1; st.global.u32 [%d1], %r3; ret;
        later: mov.u32 %r2, 77; bra here;"""
    assert launch(body, 1, 32, 32) == [77] * 32


def test_two_groups_of_members_vote_and_shuffle_at_once():
    body = """mov.u32 %r1, 0xFFFFF; setp.ge.u32 %p1, %r0, 20; @%p1 mov.u32 %r1, 0xFFF00000; and.b32 %r2, %r0, 1;
        setp.eq.u32 %p2, %r2, 1; vote.sync.ballot.b32 %r3, %p2, %r1; st.global.u32 [%d1], %r3;
        mov.u32 %r4, 3; @%p1 mov.u32 %r4, 25; shfl.sync.idx.b32 %r5, %r0, %r4, 31, %r1;
        st.global.u32 [%d1+128], %r5; ret;"""
    want = [0xAAAAA] * 20 + [0xAAA00000] * 12 + [3] * 20 + [25] * 12
    assert launch(body, 1, 32, 64) == want


def test_lanes_that_exit_while_others_wait_for_them():
    body = """setp.ge.u32 %p3, %r0, 32; @%p3 bra far; setp.gt.u32 %p1, %r0, 20; @%p1 bra later;
        setp.lt.u32 %p2, %r0, 4; @%p2 bra slow;
        here: vote.sync.ballot.b32 %r1, %p2, -1; st.global.u32 [%d1], %r1; ret;
        slow: bra here; later: exit; far: st.global.u32 [%d1], %r0; ret;"""
    assert launch(body, 1, 64, 64) == [15] * 21 + [0] * 11 + list(range(32, 64))


def test_exited_lanes_are_not_waited_for():
    body = """setp.gt.u32 %p1, %r0, 20; @%p1 exit; vote.sync.ballot.b32 %r1, %p1, -1; not.b32 %r1, %r1;
        st.global.u32 [%d1], %r1; ret;"""
    assert launch(body, 1, 32, 32) == [ALL] * 21 + [0] * 11


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("shfl.sync.idx.b32 %r1, %r0, 0, 31, 0xFFFFFFFE; ret;", "thread 0: .* not in its own member mask"),
        ("setp.gt.u32 %p1, %r0, 20; @%p1 ret; shfl.sync.idx.b32 %r1, %r0, 25, 31, -1; ret;", "thread 0: reads lane 25"),
        ("mov.u32 %r1, -1; setp.eq.u32 %p1, %r0, 4; @%p1 mov.u32 %r1, 0x1f; "
         "shfl.sync.idx.b32 %r2, %r0, 0, 31, %r1; ret;",
         "different member masks"),
        ("mov.u32 %r1, 0xFFFFF; setp.ge.u32 %p1, %r0, 20; @%p1 mov.u32 %r1, 0xFFF00000; "
         "shfl.sync.idx.b32 %r2, %r0, 25, 31, %r1; ret;", "thread 0: reads lane 25, which does not take part"),
        ("setp.gt.u32 %p1, %r0, 20; @%p1 bra b; shfl.sync.idx.b32 %r1, %r0, 0, 31, -1; ret; "
         "b: shfl.sync.idx.b32 %r1, %r0, 0, 31, -1; ret;", "thread 0: waits for lanes of its warp that never come"),
    ],
)  # fmt: skip
def test_warp_instructions_without_their_lanes(body, message):
    with pytest.raises(PtxFaultError, match=message):
        launch(body, 1, 32, 1)


def test_ctas_run_in_the_order_of_the_seed_and_alone():
    body = """atom.global.add.u32 %r1, [%d0], 1; mov.u32 %r2, %tid.x; setp.ne.u32 %p1, %r2, 0; @%p1 ret;
        st.global.u32 [%d1+4096], %r1; ret;"""
    orders = [launch(body, 12, 1024, 1024 * 14, seed=seed)[1024::1024][:12] for seed in (None, 1, 2)]
    assert orders[0] == [1024 * i for i in range(12)]
    assert orders[1] != orders[2]
    assert all(sorted(order) == orders[0] for order in orders)


@pytest.mark.parametrize(("grid", "block"), [(0, 32), (1, 0), (1, 65)])
def test_a_launch_must_fit(grid, block):
    module = Module(HEADER + ".visible .entry k() .maxntid 64, 1, 1 { ret; }")
    module.run("k", 1, 64, b"", Memory())
    with pytest.raises(ValueError, match="at most 64 threads"):
        module.run("k", grid, block, b"", Memory())
