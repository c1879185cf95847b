"""The doors of other projects: operations of LMCache, SGLang and vLLM, by kvraw's adapters or by their own modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvraw.adapters import vllm
from kvraw.bench.beside.doors import chunk_rows, device_rows, fitted, geometry_of, paged_cache
from kvraw.bench.beside.ground import Case, Ground, Lane, ordered

__all__ = ["LMCacheBlocks", "LMCacheSlots", "SGLang", "VLLMBatch", "VLLMBlocks"]

HEAD = 256  # bytes of one head's row
PAGE = 16
LAYERS = 32
_FORMATS = {1: "NL_X_TWO_NB_BS_NH_HS", 6: "NL_X_TWO_NB_NH_BS_HS"}


def _token_counts(case: Case, page: int) -> tuple[int, int]:
    """Layers, and tokens of a call: whole pages, so that layers are left out where a transfer is small."""
    layers = LAYERS
    while layers > 1 and case.nbytes < 2 * layers * page * case.row:
        layers //= 2
    tokens = case.nbytes // (2 * layers * case.row) // page * page
    if not tokens:
        raise ValueError(f"{case.nbytes} bytes are less than a page with rows of {case.row}")
    return layers, tokens


class LMCacheBlocks(Lane):
    """``multi_layer_block_kv_transfer``: blocks to and from pinned objects, ids on the device."""

    def __init__(self, ground: Ground, case: Case, module: Any) -> None:
        super().__init__(ground, case)
        shape, self._count = fitted(case)
        if shape.format not in _FORMATS:
            raise ValueError(f"there is no such operation for rows of {case.row} bytes")
        g = self._geometry = geometry_of(ground, shape)
        self._shape, self._module = shape, module
        self.moved = self._count * shape.chunk_bytes
        _, bases = paged_cache(self, shape, g)
        self._table = self.torch.tensor(bases, dtype=self.torch.int64, device=ground.place)
        self._host_ids = ground.ids(self._count * shape.chunk_tokens // g.block_size, g.blocks)
        self._ids = ground.there(self._host_ids)
        described = self._described = module.PageBufferShapeDesc()
        described.kv_size, described.nl, described.nb, described.bs = g.planes, g.layers, g.blocks, g.block_size
        described.nh, described.hs, described.element_size = g.heads, g.head_size, g.element_size
        self._format = getattr(module.EngineKVFormat, _FORMATS[shape.format])
        self._direction = getattr(module.TransferDirection, "D2H" if self.way == "store" else "H2D")
        each = shape.chunk_bytes
        self._objects = [
            [int(self.part(k).data_ptr()) + c * each for c in range(self._count)] for k in range(self.places)
        ]

    def _enqueue(self, at: int) -> None:
        self._module.multi_layer_block_kv_transfer(
            self._table,
            self._objects[at % self.places],
            self._ids[at % len(self._ids)],
            self.ground.place,
            self._direction,
            self._described,
            self._shape.chunk_tokens,
            self._format,
            0,
        )

    def _ends(self, at: int) -> tuple[Any, Any]:
        blocks = self._host_ids[at % len(self._ids)]
        return (
            device_rows(self, self._shape, self._geometry, blocks),
            chunk_rows(self.part(at), self._shape, self._count),
        )


class LMCacheSlots(Lane):
    """``multi_layer_kv_transfer``: tokens to and from one pinned tensor, slots on the device."""

    def __init__(self, ground: Ground, case: Case, module: Any) -> None:
        super().__init__(ground, case)
        torch, self._module = self.torch, module
        self._layers, count = _token_counts(case, PAGE)
        self.moved = count * 2 * self._layers * case.row
        self._held = ground.device_bytes // (2 * self._layers * case.row) // PAGE * PAGE
        self._slots = ground.there(ground.ids(count, self._held, PAGE))
        step = 2 * self._held * case.row
        bases = [int(self.memory.data_ptr()) + k * step for k in range(self._layers)]
        self._table = torch.tensor(bases, dtype=torch.int64, device=ground.place)
        shape = (2, self._layers, count, case.row // 2)
        self._tokens = [self.part(k).view(torch.bfloat16).view(shape) for k in range(self.places)]
        self._format = module.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS
        self._direction = getattr(module.TransferDirection, "D2H" if self.way == "store" else "H2D")

    def _enqueue(self, at: int) -> None:
        self._module.multi_layer_kv_transfer(
            self._tokens[at % self.places],
            self._table,
            self._slots[at % len(self._slots)],
            self.ground.place,
            self._held,
            self._direction,
            self._format,
            PAGE,
            HEAD // 2,
        )

    def _ends(self, at: int) -> tuple[Any, Any]:
        row, slots = self.case.row, self._slots[at % len(self._slots)]
        device = self.memory[: self._layers * 2 * self._held * row].view(self._layers, 2, self._held, row)[:, :, slots]
        return device, self.part(at).view(2, self._layers, -1, row).transpose(0, 1)


# By layout of the host's memory: the axes of a plane (layer, page, token of a page, head, its bytes), the operation
# that stores and the one that loads a layer.
_LAYOUTS = {
    "layer_first": ("LBTHD", "transfer_kv_all_layer", "transfer_kv_per_layer"),
    "page_first": ("BTLHD", "transfer_kv_all_layer_lf_pf", "transfer_kv_per_layer_pf_lf"),
    "page_head": ("BHTLD", "transfer_kv_all_layer_lf_ph", "transfer_kv_per_layer_ph_lf"),
    "head_groups": ("BHLTD", "transfer_kv_all_layer_lf_pfdhg", "transfer_kv_per_layer_pfdhg_lf"),
}


class SGLang(Lane):
    """SGLang's operations with ids on the device; loads go layer by layer, but for `whole`."""

    def __init__(self, ground: Ground, case: Case, module: Any, layout: str, whole: bool = False) -> None:
        super().__init__(ground, case)
        torch, row, place = self.torch, case.row, ground.place
        self._axes, store, load = _LAYOUTS[layout]
        self._layers, count = _token_counts(case, PAGE)
        self._heads = max(1, row // HEAD)
        self.moved = count * 2 * self._layers * row
        per_token = 2 * self._layers * row
        self._held = {
            name: held // per_token // PAGE * PAGE
            for name, held in (("device", ground.device_bytes), ("host", ground.host_bytes))
        }
        self._device = self.memory[: self._held["device"] * per_token].view(2, self._layers, -1, row)
        self._host = self.pinned[: self._held["host"] * per_token].view(2, -1)
        there, here = self._held["device"], self._held["host"]
        self._ids = ground.there(ground.ids(count, there, PAGE))
        self._host_ids = ground.ids(count, here, PAGE)[::-1]
        self._host_ids_there = ground.there(self._host_ids)
        tables = [
            torch.tensor([t.data_ptr() for t in plane], dtype=torch.uint64, device=place) for plane in self._device
        ]
        dim = self._layers * row
        parts: tuple[Any, ...] = () if layout in ("layer_first", "page_first") else (PAGE, self._heads)
        k, v = self._host
        operation = getattr(module, store if self.way == "store" or whole else load)
        self._calls: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []
        if self.way == "store" or whole:
            far: Sequence[Any] = (k, v)
            if layout == "layer_first":
                layers = self._host.view(2, self._layers, -1)
                far = [
                    torch.tensor([t.data_ptr() for t in plane], dtype=torch.uint64, device=place) for plane in layers
                ]
            sides = (tables[0], far[0], tables[1], far[1])
            if self.way == "load":
                sides = (far[0], tables[0], far[1], tables[1])
            sizes = (row, self._layers) if layout == "layer_first" else (row, dim, self._layers, *parts)
            self._calls.append((operation, sides, sizes))
        else:
            for layer in range(self._layers):
                near = self._device[:, layer]
                if layout == "layer_first":
                    one = self._host.view(2, self._layers, here, row)[:, layer]
                    self._calls.append((operation, (one[0], near[0], one[1], near[1]), (row,)))
                else:
                    self._calls.append((operation, (k, near[0], v, near[1]), (layer, row, dim, *parts)))

    def _enqueue(self, at: int) -> None:
        ids = self._ids[at % len(self._ids)], self._host_ids_there[at % len(self._ids)]
        if self.way == "load":
            ids = ids[::-1]
        for operation, sides, sizes in self._calls:
            operation(*sides, *ids, *sizes)

    def _clear(self, at: int) -> None:
        self._host.zero_()

    def _ends(self, at: int) -> tuple[Any, Any]:
        device = self._device[:, :, self._ids[at % len(self._ids)]]
        sizes = {"P": 2, "L": self._layers, "B": self._held["host"] // PAGE, "T": PAGE, "H": self._heads}
        sizes["D"] = self.case.row // self._heads
        pages = self._host_ids[at % len(self._ids)][::PAGE] // PAGE
        host = ordered(self._host, "P" + self._axes, sizes, "BPLTHD")[self.torch.from_numpy(pages)]
        return device, host.permute(1, 2, 0, 3, 4, 5).reshape(device.shape)


class VLLMBatch(Lane):
    """``swap_blocks_batch``: addresses and sizes on the host."""

    def __init__(self, ground: Ground, case: Case) -> None:
        super().__init__(ground, case)
        count = case.nbytes // case.row
        self._rows = ground.device_bytes // case.row, ground.host_bytes // case.row
        self._ids = ground.ids(count, self._rows[0]), ground.ids(count, self._rows[1])[::-1]
        sizes = self.torch.full((count,), case.row, dtype=self.torch.int64)
        self._given = []
        for there, here in zip(*self._ids, strict=True):
            ends = [
                self.torch.from_numpy(ids * case.row + int(memory.data_ptr()))
                for ids, memory in ((there, self.memory), (here, self.pinned))
            ]
            self._given.append((*(ends if self.way == "store" else ends[::-1]), sizes))

    def _enqueue(self, at: int) -> None:
        vllm.swap_blocks_batch(*self._given[at % len(self._given)])

    def _clear(self, at: int) -> None:
        self.pinned.zero_()

    def _ends(self, at: int) -> tuple[Any, Any]:
        found = []
        for memory, rows, ids in zip((self.memory, self.pinned), self._rows, self._ids, strict=True):
            index = self.torch.from_numpy(ids[at % len(ids)]).to(memory.device)
            found.append(memory[: rows * self.case.row].view(rows, -1)[index])
        return found[0], found[1]


class VLLMBlocks(VLLMBatch):
    """``swap_blocks``: one tensor's blocks, the mapping on the host."""

    def __init__(self, ground: Ground, case: Case) -> None:
        super().__init__(ground, case)
        tensors = [
            memory[: rows * case.row].view(rows, case.row)
            for memory, rows in zip((self.memory, self.pinned), self._rows, strict=True)
        ]
        self._tensors = tensors if self.way == "store" else tensors[::-1]
        pairs = zip(*(self._ids if self.way == "store" else self._ids[::-1]), strict=True)
        self._mappings = [
            self.torch.stack([self.torch.from_numpy(a), self.torch.from_numpy(b)], dim=1).contiguous() for a, b in pairs
        ]

    def _enqueue(self, at: int) -> None:
        src, dst = self._tensors
        vllm.swap_blocks(src, dst, self.case.row, self._mappings[at % len(self._mappings)])
