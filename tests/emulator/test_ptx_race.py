"""Threads of a CTA that share memory: races between barriers are faults, and warps come in any order."""

from __future__ import annotations

import pytest

from tests.emulator.ptx_frame import PtxFaultError
from tests.emulator.test_ptx_control import launch

# %r3 is the byte offset of a thread's own word of the tile, %r4 that of the next thread's.
START = """.shared .align 16 .b8 tile[512]; mov.u32 %r1, %tid.x; shl.b32 %r3, %r1, 2; add.u32 %r4, %r3, 4;
    and.b32 %r4, %r4, 255; st.shared.u32 [%r3], %r1;
"""
RACES = {
    "a neighbour's word read": (START + "ld.shared.u32 %r5, [%r4]; ret;", "reads what thread"),
    "a neighbour's word written": (START + "st.shared.u32 [%r4], %r1; ret;", "writes what thread"),
    "a word written that a neighbour reads": (
        START + "bar.sync 0; ld.shared.u32 %r5, [%r4]; st.shared.u32 [%r3], %r5; ret;",
        "writes what thread 63 read since the last barrier",
    ),
    "a word written that several read": (
        START + "bar.sync 0; ld.shared.u32 %r5, [tile]; st.shared.u32 [%r3], %r5; ret;",
        "writes what several threads read",
    ),
    "within a warp": (
        START + "and.b32 %r4, %r4, 124; bar.sync 0; st.shared.u32 [%r3], %r1; ld.shared.u32 %r5, [%r4]; ret;",
        "reads what thread",
    ),
    "a shuffle between is no barrier": (
        START + "shfl.sync.idx.b32 %r6, %r1, 0, 31, -1; ld.shared.u32 %r5, [%r4]; ret;",
        "reads what thread",
    ),
    "a vector over others' words": (
        START + "setp.ne.u32 %p1, %r1, 0; @%p1 ret; ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [tile]; ret;",
        "reads what thread 1 wrote",
    ),
    "an atomic at a word that a neighbour wrote": (START + "atom.shared.add.u32 %r5, [%r4], 1; ret;", "writes what"),
    "a word read to which others add": (
        START + "bar.sync 0; red.shared.add.u32 [tile], 1; ld.shared.u32 %r5, [tile]; ret;",
        "reads what an atomic wrote",
    ),
}
ORDERLY = {
    "own words only": START + "ld.shared.u32 %r5, [%r3]; st.shared.u32 [%r3], %r5; ret;",
    "behind a barrier": START + "bar.sync 0; ld.shared.u32 %r5, [%r4]; bar.sync 0; st.shared.u32 [%r4], %r5; ret;",
    "all read one word": START + "bar.sync 0; ld.shared.u32 %r5, [tile]; ret;",
    "one of those that write a word is last": START + "bar.sync 0; st.shared.u32 [tile], %r1; ret;",
    "all add to one word": START + "bar.sync 0; red.shared.add.u32 [tile], 1; atom.shared.add.u32 %r5, [tile], 1; ret;",
}


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", RACES)
def test_a_race_on_shared_memory_is_a_fault(name: str, seed: int | None) -> None:
    body, message = RACES[name]
    which = f"cta 0, thread 0: a race on shared memory: {message}" if seed is None else "a race on shared memory"
    with pytest.raises(PtxFaultError, match=which):
        launch(body, 2, 64, 128, seed=seed)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", ORDERLY)
def test_what_barriers_order_is_no_race(name: str, seed: int | None) -> None:
    launch(ORDERLY[name], 3, 64, 192, seed=seed)


def test_warps_take_turns_between_barriers_in_the_order_of_the_seed() -> None:
    """Each warp takes a number before the barrier and one behind it."""
    body = """.shared .align 4 .b8 tile[4]; mov.u32 %r2, %laneid; setp.ne.u32 %p1, %r2, 0; @%p1 bra wait;
        atom.global.add.u32 %r1, [%d0], 1; st.global.u32 [%d1+128], %r1;
        wait: bar.sync 0; @%p1 ret;
        atom.global.add.u32 %r1, [%d0], 1; st.global.u32 [%d1+132], %r1; ret;"""
    orders = []
    for seed in (None, *range(6)):
        found = launch(body, 1, 128, 32 * 6, seed=seed)
        before, behind = found[32:160:32], found[33:161:32]
        assert sorted(before) == [0, 1, 2, 3]
        assert sorted(behind) == [4, 5, 6, 7]
        orders.append((*before, *behind))
    assert orders[0] == tuple(range(8))
    assert len(set(orders)) > 3
