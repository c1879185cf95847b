"""CacheBlend's retrieval plans: staging, turned keys and scatters, against plain indexing; order, checks, captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw.adapters import deferred_errors, tensors
from kvraw.adapters.lmcache import _blend_groups, _memo, _paged, _planned
from kvraw.runtime import driver as driver_module
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.memory import Laid, numbers
from tests.helpers.retrieval import TOKENS, TYPES, Retrieval

FORMATS = [(0, 2), (1, 2), (3, 1), (5, 1), (6, 2), (9, 2), (10, 1), (13, 1), (15, 2)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("number", "planes"), FORMATS)
def test_every_format(place: int | None, number: int, planes: int, dtype: str) -> None:
    r = Retrieval(place, number, planes, dtype, neox=number % 2 == 0)
    r.expect()
    r.run()
    r.check()
    r.close()


@pytest.mark.parametrize(("per_step", "halves", "chunks"), [(1, 1, 4), (2, 1, 5), (2, 3, 9), (5, 1, 5), (1, 2, 6)])
def test_slots_that_come_again(place: int | None, per_step: int, halves: int, chunks: int) -> None:
    r = Retrieval(place, chunks=chunks, per_step=per_step, halves=halves)
    r.expect()
    r.run()
    r.check()
    r.close()


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_copies_wait_for_what_uses_their_slots(seed: int, halves: int) -> None:
    """Streams that run in any order their events allow, and a plan behind another one that is still under way."""
    fake = FakeDriver(seed=seed)
    before = driver_module.install(fake)  # type: ignore[arg-type]
    try:
        r = Retrieval(0, chunks=5, per_step=1 + seed % 2, halves=halves)
        again = np.random.default_rng(9).permutation(r.s.nb * r.s.bs)[: len(r.mapping)].tolist()
        held = numbers(again, "device", 0)
        r.expect()
        r.run()
        r.mapping, r.held = again, held
        r.expect()
        r.run()
        r.check()
        r.close()
        assert not fake.violations, fake.violations
    finally:
        for one in (_memo, _paged, _blend_groups):
            one._known.clear()
        for queue in (_planned._bits, *deferred_errors._found.values()):
            queue.clear()
        driver_module.install(before)


def test_slots_apart_in_the_mapping_and_cut_short_in_a_step(place: int | None) -> None:
    r = Retrieval(place, chunks=5, per_step=5, halves=1)
    r.begins, r.counts = [16, 3, 7, 0, 12], [4, 4, 2, 3, 0]
    r.expect()
    r.run()
    r.check()
    r.close()


def test_a_slot_that_is_scattered_again_in_a_later_step(device: int) -> None:
    """The second step takes more tokens of a slot than the first did: all of them have turned."""
    r = Retrieval(device, chunks=1, per_step=1, halves=1)
    r.counts = [2]
    tables = r.tables()
    tables["scatters"] = np.array([(0, 0, 0, 2), (0, 0, 0, 4)])
    tables["step_offsets"] = np.array([(1, 1, 1), (1, 1, 2)])
    r.counts = [4]
    r.expect()
    r.run(**tables)
    r.check()
    r.close()


def test_what_turns_ends_with_the_cosines(device: int) -> None:
    """A slot that is cut short, at the last positions: what the allocation does not hold is not read."""
    r = Retrieval(device, chunks=2, per_step=1, halves=1)
    info = driver_module.driver().pointer_info(r.table.addresses[0])
    assert info is not None
    limit = (info.base + info.size - r.table.addresses[0]) // (r.rotary * r.size)
    r.counts, r.new = [4, 2], [0, limit - 1]
    with pytest.raises(ValueError, match=rf"ropes\[1\]: cur_st is {limit - 1} for 2 tokens"):
        r.run()
    r.counts[1] = 1
    r.run()
    r.close()


def test_two_groups_whose_rows_are_mixed(place: int | None) -> None:
    a, b = Retrieval(place, 1), Retrieval(place, 6)
    a.expect()
    b.expect()
    ours, theirs = a.tables(), b.tables()
    both = {}
    for name in ("staging", "ropes", "scatters"):
        other = theirs[name].copy()
        if name != "staging":
            other[:, 0] = 1
        rows, at = [], [0, 0, 0]
        column = ("staging", "ropes", "scatters").index(name)
        for end in ours["step_offsets"]:
            part = slice(at[column], end[column])
            rows += [other[part], ours[name][part]]
            at = list(end)
        both[name] = np.concatenate(rows)
    a.run([a.group(), b.group()], **both, step_offsets=2 * ours["step_offsets"])
    for one in (a, b):
        one.check()
        one.close()


def test_pages_of_values_and_scales(place: int | None) -> None:
    """Format 14, of which a plan holds a group that does not turn: two layouts over one table."""
    layers, blocks, bs, values, scales = 3, 9, 4, 128, 4
    row = values + scales
    device, host = ("host", "host") if place is None else ("device", "pinned")
    cache = Laid(device, [(blocks, bs * row)] * layers, place, 1)
    chunks, slots = (Laid(k, [(layers, TOKENS, row)] * 2, place, seed) for k, seed in ((host, 2), (device, 3)))
    mapping = [30, 3, -1, 17, 0, 35, 8, 21]
    table, held = numbers(cache.addresses, device, place), numbers(mapping, device, place)
    spec = ops.CBGroupSpec(
        table, slots.addresses, layers, TOKENS, row, 1, 14, blocks * bs, bs, row, held, len(mapping), 0, 0, 1, row, 0,
        True,
    )  # fmt: skip
    for k, chunk in enumerate(chunks.arrays):
        slots.arrays[k][:] = chunk
        for token, slot in enumerate(mapping[TOKENS * k :][:TOKENS]):
            block, at = divmod(slot, bs)
            for layer in range(layers if slot >= 0 else 0):
                page = cache.arrays[layer][block]
                page[values * at : values * (at + 1)] = chunk[layer, token, :values]
                page[bs * values + scales * at :][:scales] = chunk[layer, token, values:]
    staging = [(s, c, layers * TOKENS * row, 0) for s, c in zip(slots.addresses, chunks.addresses, strict=True)]
    where = "cpu" if place is None else place
    moves = [(0, k, TOKENS * k, TOKENS) for k in range(2)]
    ops.execute_cb_retrieve_plan_flat(where, 4096, [spec], staging, [], moves, [(1, 0, 1), (2, 0, 2)])
    for one in (cache, chunks, slots):
        one.check()
        one.close()


def test_keys_that_keep_their_positions(place: int | None) -> None:
    r = Retrieval(place)
    r.expect(turned=False)
    r.run([r.group(cos_sin_cache=0, rot_dim=0, rope_num_kv_heads=1, key_scalar_type=0)])
    r.check()
    r.close()


def test_tensors_and_staging_copies(place: int | None) -> None:
    r = Retrieval(place)
    r.expect()
    spec = r.group(
        paged_kv_ptrs=r.pointers,
        temp_buffer_ptrs=r.slots.tensors(2),
        slot_mapping_base=r.held,
        cos_sin_cache=r.table.tensors(2)[0],
        engine_kv_format=ops.EngineKVFormat(r.number),
    )
    r.run([spec], staging=[ops.StagingCopy(*row) for row in r.tables()["staging"].tolist()])
    r.check()
    r.close()


def test_another_mapping_is_stamped_on_a_spec(place: int | None) -> None:
    r = Retrieval(place)
    spec = r.group()
    for seed in range(3):
        r.mapping = np.random.default_rng(seed).permutation(r.s.nb * r.s.bs)[: len(r.mapping)].tolist()
        r.held = numbers(r.mapping, "host" if place is None else "device", place)
        spec.slot_mapping_base, spec.slot_mapping_capacity = r.held.data_ptr(), len(r.mapping)
        r.expect()
        r.run([spec])
        r.check()
    r.close()


def test_nothing_to_do(place: int | None) -> None:
    r = Retrieval(place)
    none = np.zeros((0, 4), np.int64)
    r.run(staging=none, ropes=[], scatters=none, step_offsets=[])
    r.run(staging=none, ropes=none, scatters=none, step_offsets=[(0, 0, 0)])
    r.run([], staging=none, ropes=none, scatters=none, step_offsets=none[:, :3])
    r.check()
    r.close()


def change_row(name: str, row: int, column: int, value: int) -> Callable[[Retrieval], dict[str, Any]]:
    def change(r: Retrieval) -> dict[str, Any]:
        table = r.tables()[name]
        table[row, column] = value
        return {name: table}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_row("ropes", 3, 0, 1), r"ropes\[3\]: group_idx is 1, must be in \[0, 1\)"),
        (change_row("ropes", 4, 1, 4), r"ropes\[4\]: slot_idx is 4, must be in \[0, 4\)"),
        (change_row("ropes", 1, 1, -1), r"ropes\[1\]: slot_idx is -1"),
        (change_row("ropes", 2, 2, -1), r"ropes\[2\]: old_st is -1 for 4 tokens, must be in \[0, "),
        (change_row("ropes", 2, 3, -9), r"ropes\[2\]: cur_st is -9 for 4 tokens"),
        (change_row("scatters", 3, 0, -1), r"scatters\[3\]: group_idx is -1"),
        (change_row("scatters", 4, 1, 9), r"scatters\[4\]: slot_idx is 9"),
        (change_row("scatters", 4, 2, 17), r"slot_mapping_offset is 17, n_tok 4: must lie within the 20 slots"),
        (change_row("scatters", 0, 2, -1), r"scatters\[0\]: slot_mapping_offset is -1"),
        (change_row("scatters", 2, 3, 5), r"scatters\[2\]: n_tok is 5, must be in \[0, 4\]"),
        (change_row("staging", 4, 0, 0), "staging copy: dest is 0"),
        (change_row("staging", 4, 2, -8), "nbytes is -8"),
        (change_row("step_offsets", 1, 1, 1), r"step_offsets\[1\] is \[4, 1, 4\], must be at least \[2, 2, 2\]"),
        (change_row("step_offsets", 2, 2, 6), r"step_offsets\[2\] is \[5, 5, 6\]"),
        (
            lambda r: {"ropes": np.zeros((2, 3), np.int64)},
            r"ropes has shape \(2, 3\) of int64, must be integers \[n, 4\]",
        ),
        (lambda r: {"scatters": np.zeros((2, 4))}, "scatters has shape .2, 4. of float64"),
        (lambda r: {"alignment": 3}, "must be power of two"),
        (lambda r: {"group": [r.group(engine_kv_format=99)]}, "Unsupported EngineKVFormat"),
        (change_row("step_offsets", 2, 1, 4), r"step_offsets ends at \[5, 4, 5\], must end at \[5, 5, 5\]"),
        (
            lambda r: {**change_row("ropes", 1, 1, 9)(r), "group": [r.group(cos_sin_cache=0)]},
            r"ropes\[1\]: slot_idx is 9",
        ),
        (lambda r: {"group": [r.group(temp_buffer_ptrs=[])]}, "there is no slot"),
        (lambda r: {"group": [r.group(paged_kv_ptrs=0)]}, "paged_kv_ptrs or one of temp_buffer_ptrs is null"),
        (lambda r: {"group": [r.group(slot_mapping_base=0)]}, "slot_mapping_base is null"),
        (lambda r: {"group": [r.group(slot_tokens=0)]}, "slot_tokens is 0, must be positive"),
        (lambda r: {"group": [r.group(rot_dim=7)]}, r"rot_dim is 7, must be even and in \[2, 24\]"),
        (lambda r: {"group": [r.group(rot_dim=26)]}, "rot_dim is 26"),
        (lambda r: {"group": [r.group(key_scalar_type=1)]}, "key_scalar_type is 1 with elements of 2 bytes"),
        (lambda r: {"group": [r.group(rope_head_stride=12)]}, "rope_num_kv_heads is 2, rope_head_stride 12"),
        (lambda r: {"group": [r.group(rope_base_offset=3)]}, "rope_base_offset is 3, must be whole elements"),
        (lambda r: {"group": [r.group(rope_base_offset=48)]}, "rope_base_offset is 48"),
    ],
)
def test_a_plan_is_checked_whole_before_anything_moves(
    place: int | None, change: Callable[[Retrieval], dict[str, Any]], message: str
) -> None:
    r = Retrieval(place)
    with pytest.raises(ValueError, match=message):
        r.run(**change(r))
    r.check()
    r.close()


def test_a_position_behind_the_cosines(device: int) -> None:
    r = Retrieval(device)
    with pytest.raises(ValueError, match=r"ropes\[0\]: cur_st is \d+ for 4 tokens, must be in \[0, \d+\]"):
        r.run(**change_row("ropes", 0, 3, 1 << 40)(r))
    r.check()
    r.close()


def test_cosines_and_slots_in_the_wrong_place(device: int) -> None:
    r = Retrieval(device)
    plain = np.zeros(1 << 16, np.uint8)
    with pytest.raises(kvraw.PlacementError, match=r"cos_sin_cache at .* is pageable host memory"):
        r.run([r.group(cos_sin_cache=int(plain.ctypes.data))])
    with pytest.raises(kvraw.PlacementError, match="pageable host memory"):
        r.run([r.group(temp_buffer_ptrs=[int(plain.ctypes.data)] * 4)])
    with pytest.raises(kvraw.PlacementError, match="slot_mapping_base lies in pageable host memory"):
        r.run([r.group(slot_mapping_base=int(plain.ctypes.data))])
    r.check()
    r.close()


def test_bad_slots_are_reported(place: int | None) -> None:
    r = Retrieval(place)
    good, bad = r.mapping[9], r.s.nb * r.s.bs
    r.mapping[9] = bad
    r.held = numbers(r.mapping, "host" if place is None else "device", place)
    if place is None:
        with pytest.raises(IndexError, match=rf"slot_mapping\[9\] is {bad}, must be in \[0, {bad}\)"):
            r.run()
        r.check()  # nothing moved, though steps before it are in order
    else:
        r.run()
        r.mapping[9] = -1
        r.expect()
        r.check()
        with pytest.raises(IndexError, match=rf"slot_mapping\[1\] is {bad}, must be in \[0, {bad}\)"):
            r.run()
        r.mapping[9] = good
        r.held = numbers(r.mapping, "device", place)
        r.expect()
        r.run()
        r.check()
    r.close()


def test_a_capture(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    r = Retrieval(0)
    with kvraw.Stream(0) as stream:
        monkeypatch.setattr(tensors, "_raw_stream", lambda device: stream.handle)
        r.run()  # what a capture has no time to make is there now
        fake.capture(stream.handle, True)
        r.expect()
        r.run()
        fake.capture(stream.handle, False)
        stream.synchronize()  # the emulator's capture runs at once: a replay
        r.check()
    r.close()
