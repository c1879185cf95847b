"""What the tests of SGLang's operations share: bytes as arrays and as tensors, and an operation on both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvraw.adapters import sglang
from tests.helpers import kv_oracle as oracle
from tests.helpers.torch_like import Tensor, TorchLike


@dataclass(frozen=True)
class Op:
    name: str
    src: str
    dst: str
    all_layers: bool = False
    mla: bool = False

    @property
    def paged(self) -> bool:
        return self.src in ("ph", "hg") or self.dst in ("ph", "hg")


OPS = [
    Op("transfer_kv_per_layer", "lf", "lf"),
    Op("transfer_kv_per_layer_pf_lf", "pf", "lf"),
    Op("transfer_kv_per_layer_ph_lf", "ph", "lf"),
    Op("transfer_kv_per_layer_pfdhg_lf", "hg", "lf"),
    Op("transfer_kv_all_layer", "lf", "lf", True),
    Op("transfer_kv_all_layer_lf_pf", "lf", "pf", True),
    Op("transfer_kv_all_layer_lf_ph", "lf", "ph", True),
    Op("transfer_kv_all_layer_lf_pfdhg", "lf", "hg", True),
    Op("transfer_kv_per_layer_mla", "lf", "lf", False, True),
    Op("transfer_kv_per_layer_mla_pf_lf", "pf", "lf", False, True),
    Op("transfer_kv_per_layer_mla_lf_pf", "lf", "pf", False, True),
    Op("transfer_kv_all_layer_mla", "lf", "lf", True, True),
    Op("transfer_kv_all_layer_mla_lf_pf", "lf", "pf", True, True),
]
BY_NAME = {op.name: op for op in OPS}
LAYERS, TOKENS, PAGE = 3, 24, 4
SRC, DST = [5, 0, 23, 7, 6, 12], [1, 9, 2, 22, 23, 0]  # what some tests move


def bytes_of(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def same(w: TorchLike, pairs: list[tuple[Tensor, np.ndarray]]) -> None:
    for tensor, array in pairs:
        np.testing.assert_array_equal(w.take(tensor), array)


def tokens_of(pages: list[int]) -> list[int]:
    return [p * PAGE + k for p in pages for k in range(PAGE)]


def ids(w: TorchLike, values: list[int], on_device: bool) -> Tensor:
    return w.put("device" if on_device and w.stream is not None else "host", np.array(values, np.int64))


class Case:
    """Both sides of an operation: arrays of random bytes, and tensors of the same bytes."""

    def __init__(
        self, w: TorchLike, op: Op, kinds: tuple[str, str], page: int = 4, heads: int = 2, dim: int = 24, gap: int = 0
    ) -> None:
        self.w, self.op, self.page, self.heads, self.dim = w, op, page, heads, dim
        self.groups = 2 if heads % 2 == 0 else 1
        rng = np.random.default_rng(0)
        planes = 1 if op.mla else 2

        self.arrays: tuple[list[np.ndarray], list[np.ndarray]] = [], []
        self.tensors: tuple[list[Tensor], list[Tensor]] = [], []
        self.whole: list[tuple[np.ndarray, Tensor]] = []
        for side, layout in enumerate((op.src, op.dst)):
            shape = oracle.shape(layout, LAYERS, TOKENS, page, heads, dim, self.groups)
            wide = layout == "lf" and gap > 0  # rows of other tokens between those that take part
            for _ in range(planes):
                array = rng.integers(0, 256, (*shape[:2], gap + 1, *shape[2:]) if wide else shape, dtype=np.uint8)
                tensor = w.put(kinds[side], array)
                self.whole.append((array, tensor))
                self.arrays[side].append(array[:, :, gap] if wide else array)
                self.tensors[side].append(tensor.select(2, gap) if wide else tensor)
        self.kept: list[Tensor] = []

    @property
    def item(self) -> int:
        return self.heads * self.dim

    def argument(self, side: int, plane: int, layer: int) -> Tensor:
        tensor, layout = self.tensors[side][plane], (self.op.src, self.op.dst)[side]
        if layout != "lf":
            return tensor
        if not self.op.all_layers:
            return tensor[layer]
        self.kept.append(self.w.table(self.w.kinds[0], [tensor[k] for k in range(LAYERS)]))
        return self.kept[-1]

    def call(self, src: list[int], dst: list[int], layer: int = 0, dtype: str = "int64", **more: object) -> None:
        op = self.op
        planes = range(1 if op.mla else 2)
        args: list[object] = [self.argument(side, plane, layer) for plane in planes for side in (0, 1)]
        args += [self.w.put(self.w.kinds[0], np.array(ids, dtype)) for ids in (src, dst)]
        whole = op.src != "lf" or op.dst != "lf"
        named: dict[str, object] = {"item_size": self.item}
        if op.all_layers:
            named["num_layers"] = LAYERS
        elif whole:
            named["layer_id"] = layer
        if whole:
            named[f"{'dst' if op.src == 'lf' else 'src'}_layout_dim"] = self.item * LAYERS
        if op.paged:
            named |= {"page_size": self.page, "head_num": self.groups if "hg" in (op.src, op.dst) else self.heads}
        getattr(sglang, op.name)(*args, **named | more)

    def expect(self, src: list[int], dst: list[int], layer: int = 0) -> None:
        """Do in the arrays what the call did, and compare all bytes of both sides."""
        layers = list(range(LAYERS)) if self.op.all_layers else [layer]
        for a, b in zip(*self.arrays, strict=True):
            oracle.move(a, self.op.src, b, self.op.dst, src, dst, layers, self.page)
        self.compare()

    def compare(self) -> None:
        for array, tensor in self.whole:
            np.testing.assert_array_equal(self.w.take(tensor), array)
