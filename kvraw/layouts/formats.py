"""Layouts as data: every paged-cache format and every chunk layout is one row.

A row names the axes of a tensor from outermost to innermost: ``B`` block, ``T`` token of a block (of a chunk, in chunk
layouts), ``L`` layer, ``P`` plane (K or V), ``H`` head, ``D`` elements of a head. ``pointers`` are the axes that choose
the tensor instead of an offset in it. Numbers and names of the cache formats are LMCache's ``EngineKVFormat``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["CHUNK_LAYOUTS", "FORMATS", "HOST_LAYOUTS", "VLLM_LAYOUTS", "ChunkLayout", "Format"]


@dataclass(frozen=True, slots=True)
class Format:
    """A paged KV cache's layout.

    Attributes
    ----------
    number : int
        LMCache's ``EngineKVFormat`` value; -1 for layouts that have none.
    name : str
        Its name.
    pointers : str
        Axes that choose the tensor, outermost first: ``""`` one tensor, ``"L"`` one per layer, ``"PL"`` all K, then
        all V.
    axes : str
        Axes of one tensor, outermost first.
    fused : str
        The axes when a fused format is taken as two planes (``kv_size`` 2); empty where it cannot be.
    mla : bool
        One head and one plane by definition.
    flat : bool
        Handed in as [blocks * block_size, ...].
    """

    number: int
    name: str
    pointers: str
    axes: str
    fused: str = ""
    mla: bool = False
    flat: bool = False

    @property
    def planes(self) -> int:
        """Planes of K and V: 2, or 1 where they are one row or one entry."""
        return 2 if "P" in self.pointers + self.axes else 1

    @property
    def hnd(self) -> bool:
        """True where heads are outside the tokens of a block."""
        return "H" in self.axes and self.axes.index("H") < self.axes.index("T")

    def axes_for(self, planes: int) -> str | None:
        """The axes for this number of planes, or None where the format has none."""
        if planes == self.planes:
            return self.axes
        return self.fused or None if planes == 2 else None


_ROWS = (
    Format(0, "NB_NL_TWO_BS_NH_HS", "", "BLPTHD"),
    Format(1, "NL_X_TWO_NB_BS_NH_HS", "L", "PBTHD"),
    Format(2, "NL_X_NB_TWO_BS_NH_HS", "L", "BPTHD"),
    Format(3, "NL_X_NB_BS_HS", "L", "BTD", mla=True),
    Format(4, "TWO_X_NL_X_NBBS_NH_HS", "PL", "BTHD", flat=True),
    Format(5, "NL_X_NBBS_ONE_HS", "L", "BTD", mla=True, flat=True),
    Format(6, "NL_X_TWO_NB_NH_BS_HS", "L", "PBHTD"),
    Format(7, "NL_X_NB_TWO_NH_BS_HS", "L", "BPHTD"),
    Format(8, "NB_NL_TWO_NH_BS_HS", "", "BLPHTD"),
    Format(9, "TWO_X_NL_X_NB_BS_NH_HS", "PL", "BTHD"),
    Format(10, "NL_X_NB_NH_BS_TWO_HS", "L", "BHTD", fused="BHTPD"),
    Format(11, "NL_X_NB_BS_NH_TWO_HS", "L", "BTHD", fused="BTHPD"),
    Format(12, "NL_X_NB_NH_BS_CS", "L", "BHTD"),
    Format(13, "NL_X_NB_BS_NH_CS", "L", "BTHD"),
    Format(15, "NL_X_TWO_NB_NH_ONE_BS_HS", "L", "PBHTD"),
    Format(16, "NL_X_TWO_X_NB_BS_NH_HS", "LP", "BTHD"),
    Format(18, "NL_X_NB_BS_NH_HS", "L", "BTHD"),
)
FORMATS = MappingProxyType({row.number: row for row in _ROWS})

# SGLang's host pools (K and V are two halves of one buffer): the number -1, addressed like any other cache.
HOST_LAYOUTS = MappingProxyType(
    {
        row.name: row
        for row in (
            Format(-1, "layer_first", "P", "LBTHD"),
            Format(-1, "page_first", "P", "BTLHD"),
            Format(-1, "page_first_direct", "P", "BLTHD"),
            Format(-1, "page_head", "P", "BHTLD"),
            Format(-1, "layer_first_mla", "", "LBTD", mla=True),
            Format(-1, "page_first_mla", "", "BTLD", mla=True),
            Format(-1, "page_first_direct_mla", "", "BLTD", mla=True),
        )
    }
)

# vLLM's names of the order in memory (its N is a token of a block, its C the content of a head, K and V side by side),
# as one tensor that holds all layers; a layer's own tensor has the same order without L.
VLLM_LAYOUTS = MappingProxyType(
    {
        name: Format(-1, name, "", name.replace("N", "T").replace("C", "D"))
        for name in ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
    }
)


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Layout of one chunk (a memory object): axes outermost first, ``T`` counting the chunk's tokens.

    ``P`` and ``L`` are left out of the address where a cache has one plane or one layer.
    """

    name: str
    axes: str


CHUNK_LAYOUTS = MappingProxyType(
    {
        row.name: row
        for row in (
            ChunkLayout("2LTD", "PLTHD"),  # [planes, layers, tokens, heads * head_size]
            ChunkLayout("T2D", "TLPHD"),  # token-major: [tokens, layers, planes, heads * head_size]
            ChunkLayout("L2TD", "LPTHD"),  # layer-major, for chunks of single layers: [layers, planes, tokens, ...]
        )
    }
)
