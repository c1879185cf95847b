"""A CacheBlend retrieval to run, and what it must do by plain indexing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import kvraw.adapters.lmcache as ops
from tests.helpers import coder_oracle
from tests.helpers.memory import Laid, numbers
from tests.helpers.oracle import PAGED, Shape, move

TOKENS, POSITIONS = 4, 64
TYPES = {"float16": 5, "float32": 6, "bfloat16": 15}


def bits(values: np.ndarray, dtype: str) -> np.ndarray:
    found: np.ndarray = coder_oracle.to_bits(values, dtype)
    return found.view(np.uint32 if dtype == "float32" else np.uint16)


class Retrieval:
    """Chunks on the host, slots that steps use in turns, a cache, and a mapping with a hole; chunk 3 is cut short."""

    def __init__(
        self,
        place: int | None,
        number: int = 1,
        planes: int = 2,
        dtype: str = "bfloat16",
        neox: bool = True,
        chunks: int = 5,
        per_step: int = 2,
        halves: int = 2,
    ) -> None:
        self.place, self.number, self.dtype, self.neox = place, number, dtype, neox
        self.per_step, self.halves = per_step, halves
        self.size = 4 if dtype == "float32" else 2
        self.heads = 1 if number in (3, 5) else 2
        self.s = s = Shape(nl=3, nb=19, bs=2, nh=self.heads, d=24 * self.size, planes=planes)
        self.offset = 8 * self.size if number in (3, 5) else 0  # of MLA, what turns trails the latent row
        self.rotary = 16
        device, host = ("host", "host") if place is None else ("device", "pinned")
        slot = (planes, s.nl, TOKENS, s.nh * s.d)
        slot_bytes = planes * s.nl * TOKENS * s.nh * s.d
        self.cache = Laid(device, [PAGED[number, planes].shape(s)] * PAGED[number, planes].tensors(s), place, 1)
        # Random bytes would be infinite or no number here and there.
        drawn = np.random.default_rng(6).standard_normal((chunks, slot_bytes // self.size)) * 3
        self.host = Laid(host, [slot] * chunks, place, 2, list(bits(drawn, dtype)))
        self.slots = Laid(device, [slot] * (per_step * halves), place, 3)
        angle = np.arange(POSITIONS)[:, None] / 100.0 ** (np.arange(self.rotary // 2) / 8)
        self.angles = bits(np.concatenate([np.cos(angle), np.sin(angle)], axis=1), dtype)
        self.table = Laid(device, [(POSITIONS, self.rotary * self.size)], place, 5, [self.angles])
        self.old = [(7 * c + 5) % (POSITIONS - TOKENS) for c in range(chunks)]
        self.new = [self.old[c] if c == 1 else TOKENS * c for c in range(chunks)]
        self.counts = [TOKENS - 1 if c == 3 else TOKENS for c in range(chunks)]
        self.begins = [TOKENS * c for c in range(chunks)]
        mapping = np.random.default_rng(4).permutation(s.nb * s.bs)[: TOKENS * chunks]
        mapping[2] = -1
        self.mapping = mapping.tolist()
        self.held = numbers(mapping, device, place)
        self.pointers = numbers(self.cache.addresses, device, place)

    def slot_of(self, chunk: int) -> int:
        step, k = divmod(chunk, self.per_step)
        return step % self.halves * self.per_step + k

    def group(self, **change: Any) -> ops.CBGroupSpec:
        s, half = self.s, 2 if self.number in (10, 12) else 1
        spec = ops.CBGroupSpec(
            self.pointers.data_ptr(), self.slots.addresses, s.nl, TOKENS, s.nh * s.d // self.size, self.size,
            self.number, s.nb * s.bs, s.bs, s.d // self.size // half, self.held.data_ptr(), len(self.mapping),
            self.table.addresses[0], self.rotary, s.nh, s.d // self.size, TYPES[self.dtype], self.neox, self.offset,
        )  # fmt: skip
        return replace(spec, **change)

    def tables(self) -> dict[str, Any]:
        staging, ropes, scatters, ends = [], [], [], []
        for first in range(0, len(self.old), self.per_step):
            base = first // self.per_step % self.halves * self.per_step
            for k, chunk in enumerate(range(first, min(first + self.per_step, len(self.old)))):
                slot, nbytes = base + k, self.host.arrays[chunk].nbytes
                staging.append((self.slots.addresses[slot], self.host.addresses[chunk], nbytes, 8))
                ropes.append((0, slot, self.old[chunk], self.new[chunk]))
                scatters.append((0, slot, self.begins[chunk], self.counts[chunk]))
            ends.append((len(staging), len(ropes), len(scatters)))
        names = ("staging", "ropes", "scatters", "step_offsets")
        return {n: np.array(t, np.int64) for n, t in zip(names, (staging, ropes, scatters, ends), strict=True)}

    def run(self, group: Any = None, alignment: int = 1 << 12, **change: Any) -> None:
        where = "cpu" if self.place is None else self.place
        groups = [self.group()] if group is None else group
        ops.execute_cb_retrieve_plan_flat(where, alignment, groups, **{**self.tables(), **change})

    def expect(self, turned: bool = True) -> None:
        """Change the arrays as a run must change the memory.

        On a device what any step takes out of a slot turns, in host memory what this one does.
        """
        for chunk, source in enumerate(self.host.arrays):
            at_slot = self.slot_of(chunk)
            slot, count = self.slots.arrays[at_slot], self.counts[chunk]
            slot[:] = source
            uses = [n for c, n in enumerate(self.counts) if self.slot_of(c) == at_slot]
            turning = count if self.place is None else max(uses)
            keys = slot[0].view(np.uint32 if self.size == 4 else np.uint16)
            keys = keys.reshape(self.s.nl, TOKENS, self.heads, -1)[:, :turning, :, self.offset // self.size :]
            if turned and self.old[chunk] != self.new[chunk]:
                at = np.arange(turning)
                for layer in keys:
                    given = layer.view(np.float32) if self.dtype == "float32" else layer
                    angles = self.angles.view(np.float32) if self.dtype == "float32" else self.angles
                    now = coder_oracle.rerotate(
                        given, at + self.old[chunk], at + self.new[chunk], angles, self.neox, self.dtype
                    )
                    layer[:] = now.view(layer.dtype)
            ids = self.mapping[self.begins[chunk] :][:count]
            move(self.number, self.s, self.cache.arrays, [slot], "2LTD", TOKENS, "load", "slot", ids, 0)

    def check(self) -> None:
        for one in (self.cache, self.slots, self.host, self.table):
            one.check()

    def close(self) -> None:
        for one in (self.cache, self.slots, self.host, self.table):
            one.close()
