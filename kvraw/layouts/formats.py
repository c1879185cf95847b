"""Layouts as data: every paged-cache format and every chunk layout is one row.

A row names the axes of a tensor from outermost to innermost: ``B`` block, ``T`` token of a block (of a chunk, in chunk
layouts), ``L`` layer, ``P`` plane (K or V), ``H`` head, ``D`` elements of a head. ``pointers`` are the axes that choose
the tensor instead of an offset in it. Numbers and names of the cache formats are LMCache's ``EngineKVFormat``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType

__all__ = [
    *("CHUNK_LAYOUTS", "FORMATS", "HOST_LAYOUTS", "OTHERS", "VLLM_LAYOUTS", "ChunkLayout", "Format"),
    "every_format",
]


@dataclass(frozen=True, slots=True)
class Format:
    """A paged KV cache's layout, and all else that is known of it.

    Attributes
    ----------
    number : int
        LMCache's ``EngineKVFormat`` value; -1 for layouts that have none.
    name : str
        Its name.
    pointers : str
        Axes that choose the tensor, outermost first: ``""`` one tensor, ``"L"`` one per layer, ``"PL"`` all K, then
        all V. ``K`` are planes of a layer that have widths of their own.
    axes : str
        Axes of one tensor, outermost first.
    shapes : str
        The shapes in which it is handed in, see `kvraw.layouts.engine_shapes.shapes_of`.
    fused : str
        The axes when a fused format is taken as two planes (``kv_size`` 2); empty where it cannot be.
    paired : bool
        K and V of a head are one row: some count one half as the head size, some both.
    older : int
        The number by which LMCache's reference version knows it; -1: its own.
    flat : bool
        Handed in as [blocks * block_size, ...].
    direct : bool
        LMCache copies its blocks without a kernel.
    scales : int
        Bytes at the end of a token that a block holds behind all that its tokens have in front of them.
    token_bytes : int
        Bytes of a token, where LMCache knows the format by them.
    """

    number: int
    name: str
    pointers: str
    axes: str
    shapes: str = ""
    fused: str = ""
    paired: bool = False
    older: int = -1
    flat: bool = False
    direct: bool = False
    scales: int = 0
    token_bytes: int = 0

    @property
    def planes(self) -> int:
        """Planes of K and V: 2, or 1 where they are one row or one entry."""
        return 2 if "P" in self.pointers + self.axes else 1

    @property
    def mla(self) -> bool:
        """True where a token is one head of one plane by definition."""
        return "H" not in self.axes

    @property
    def hnd(self) -> bool:
        """True where heads are outside the tokens of a block."""
        return "H" in self.axes and self.axes.index("H") < self.axes.index("T")

    @property
    def several(self) -> bool:
        """True where it is several layouts at once, see `kvraw.layouts.parts`."""
        return self.scales > 0 or "K" in self.pointers

    @property
    def plane(self) -> Format:
        """The format of one of its planes; of one that is not several layouts, itself."""
        return replace(self, pointers=self.pointers.replace("K", ""), scales=0) if self.several else self

    @property
    def tokens_apart(self) -> bool:
        """True where a slot's number times a token's bytes is its place in a tensor, whatever the block size."""
        return "BT" in self.axes and not self.several

    def axes_for(self, planes: int) -> str | None:
        """The axes for this number of planes, or None where the format has none."""
        if planes == self.planes:
            return self.axes
        return self.fused or None if planes == 2 else None


def _numbered(*rows: Format) -> dict[int, Format]:
    return {row.number: row for row in rows}


def _named(*rows: Format) -> dict[str, Format]:
    return {row.name: row for row in rows}


# Where several fit, the earlier one is meant.
FORMATS = _numbered(
    Format(0, "NB_NL_TWO_BS_NH_HS", "", "BLPTHD", "BLPTHD vllm", direct=True),
    Format(8, "NB_NL_TWO_NH_BS_HS", "", "BLPHTD", "BLPHTD vllm trtllm, BLPF trtllm"),
    Format(1, "NL_X_TWO_NB_BS_NH_HS", "L", "PBTHD", "L/PBTHD vllm", direct=True),
    Format(2, "NL_X_NB_TWO_BS_NH_HS", "L", "BPTHD", "L/BPTHD vllm", direct=True),
    Format(6, "NL_X_TWO_NB_NH_BS_HS", "L", "PBHTD", "L/PBHTD vllm"),
    Format(7, "NL_X_NB_TWO_NH_BS_HS", "L", "BPHTD", "L/BPHTD vllm"),
    Format(15, "NL_X_TWO_NB_NH_ONE_BS_HS", "L", "PBHTD", "L/PBH1TD vllm"),
    Format(13, "NL_X_NB_BS_NH_CS", "L", "BTHD", "L/BTHD vllm", paired=True, older=11, direct=True),
    Format(12, "NL_X_NB_NH_BS_CS", "L", "BHTD", "L/BHTD vllm", paired=True, older=10),
    Format(
        11, "NL_X_NB_BS_NH_TWO_HS", "L", "BTHD", "L/BTHW vllm, L/BTH2D vllm", fused="BTHPD", paired=True, direct=True
    ),
    Format(10, "NL_X_NB_NH_BS_TWO_HS", "L", "BHTD", "L/BHTW vllm, L/BHT2D vllm", fused="BHTPD", paired=True),
    Format(5, "NL_X_NBBS_ONE_HS", "L", "BTD", "L/S1D sglang unified", flat=True, direct=True),
    Format(18, "NL_X_NB_BS_NH_HS", "L", "BTHD", "L/BTHD sglang unified"),
    Format(3, "NL_X_NB_BS_HS", "L", "BTD", "L/BTD vllm sglang unified", direct=True),
    Format(
        4, "TWO_X_NL_X_NBBS_NH_HS", "PL", "BTHD", "P,L/SHD vllm sglang k_v, PL/SHD sglang k_v", flat=True, direct=True
    ),
    Format(9, "TWO_X_NL_X_NB_BS_NH_HS", "PL", "BTHD", "P,L/BTHD vllm sglang k_v, PL/BTHD sglang k_v", direct=True),
    Format(16, "NL_X_TWO_X_NB_BS_NH_HS", "LP", "BTHD", "L,P/BTHD vllm"),
    # A block of values and scales, and planes of unlike widths: LMCache alone hands these in.
    Format(14, "NL_X_NB_BSV_BSS", "L", "BTD", "L/BTD", scales=4, token_bytes=132),
    Format(17, "NL_X_NP_X_NB_BS_ONE_HS", "LK", "BTD", "L,K/BT1D, L,K/BTD"),
)

# Orders that engines hand in and that have no number.
OTHERS = _named(
    Format(-1, "heads_first", "L", "HBTD", "L/HBTD vllm"),  # a layer of LHBNC
    Format(-1, "k_v_lists_hnd", "PL", "BHTD", "P,L/BHTD vllm"),
    Format(-1, "k_v_pairs_hnd", "LP", "BHTD", "L,P/BHTD vllm"),
)

# SGLang's host pools, most of which count tokens: K and V are two tensors, or a leading 2 of one.
HOST_LAYOUTS = _named(
    Format(-1, "layer_first", "P", "LBTHD", "P/LSHD, P/LBTHD, PLSHD, PLBTHD"),
    Format(-1, "page_first", "P", "BTLHD", "P/SLHD, P/BTLHD, PSLHD, PBTLHD"),
    Format(-1, "page_first_direct", "P", "BLTHD", "P/BLTHD, PBLTHD"),
    Format(-1, "page_head", "P", "BHTLD", "P/BHTLD, PBHTLD"),
    Format(-1, "layer_first_mla", "", "LBTD", "LSD, LS1D, LBTD, LBT1D"),
    Format(-1, "page_first_mla", "", "BTLD", "SLD, SL1D, BTLD, BTL1D"),
    Format(-1, "page_first_direct_mla", "", "BLTD", "BLTD, BLT1D"),
)

# vLLM's names of the order in memory (its N is a token of a block, its C the content of a head, K and V side by side),
# as one tensor that holds all layers; a layer's own tensor has the same order without L.
VLLM_LAYOUTS = _named(
    *(
        Format(-1, name, "", axes, f"{axes} named")
        for name in ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
        for axes in (name.replace("N", "T").replace("C", "D"),)
    )
)


def every_format() -> Iterator[Format]:
    """All rows, those that engines hand in first."""
    return chain(FORMATS.values(), OTHERS.values(), VLLM_LAYOUTS.values(), HOST_LAYOUTS.values())


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
