"""Every shape in which an engine hands in its cache: one entry per shape, read by `kvraw.layouts.discovery`."""

from __future__ import annotations

from dataclasses import dataclass

from kvraw.layouts.formats import FORMATS, HOST_LAYOUTS, VLLM_LAYOUTS, Format

__all__ = ["ENGINES", "GIVEN", "HALVES", "HINTS", "KV_LAYOUTS", "KV_LISTS", "LETTERS", "PRODUCTS", "ROWS", "Row"]


@dataclass(frozen=True, slots=True)
class Row:
    """One way to hand in a format.

    Attributes
    ----------
    format : Format
        What it is.
    given : str
        Axes of the list levels, split by commas: ``""`` one tensor, ``"P,L"`` two lists, ``"PL"`` one list, K first.
    dims : str
        Physical axes of a tensor: those of `Format`, and ``S`` blocks * block_size, ``F`` heads * block_size *
        head_size, ``W`` K and V of a head side by side, and the literals ``1`` and ``2``.
    engines : str
        Engines that hand it in; ``named``: vLLM, where ``kv_layout`` is one of `VLLM_LAYOUTS`; empty where only
        ``format=`` asks for it.
    lists : str
        Values of ``kv_list_layout`` that mean it; ``-`` is None.
    """

    format: Format
    given: str
    dims: str
    engines: str = ""
    lists: str = "-"

    @property
    def layouts(self) -> tuple[str, ...]:
        """Values of ``kv_layout`` that mean it; all of them where it has no heads or is a host layout."""
        form, names = self.format, []
        if "P" not in form.pointers + form.axes:
            unlike = "L" if "L" in form.pointers else ""
            names = [name for name, other in VLLM_LAYOUTS.items() if other.axes.replace(unlike, "") == form.axes]
        if form.mla or (form.number < 0 and not names and "L" not in form.pointers):
            return KV_LAYOUTS
        # NHD and HND have the heads inside the blocks
        inside = form.axes.index("B") < form.axes.index("H") if "H" in form.axes else True
        return (*(["HND" if form.hnd else "NHD"] if inside else []), *names)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"format {self.format.number if self.format.number >= 0 else self.format.name}"

    @property
    def shown(self) -> str:
        """Its shape as it is handed in, for messages."""
        return f"{GIVEN[self.given]} [{', '.join(LETTERS[x] for x in self.dims)}]"


LETTERS = {"B": "blocks", "L": "layers", "P": "2", "T": "block_size", "H": "heads", "D": "head_size", "1": "1"}
LETTERS |= {"2": "2", "S": "blocks*block_size", "F": "heads*block_size*head_size", "W": "2*head_size"}
GIVEN = {"": "one tensor", "L": "a list (one per layer) of", "P": "a list (K, V) of", "PL": "a list (all K, all V) of"}
GIVEN |= {"P,L": "two lists (K, V; one per layer) of", "L,P": "a list (one per layer) of pairs (K, V) of"}
PRODUCTS = {"S": "BT", "F": "HTD"}
HINTS = {"T": "block_size", "H": "num_heads", "D": "head_size"}
ENGINES = ("vllm", "sglang", "trtllm")
KV_LAYOUTS = ("NHD", "HND", *VLLM_LAYOUTS)
KV_LISTS = ("k_v", "unified")
# Unified rows hold K and V of a head side by side: a head_size hint may mean one half.
HALVES = (10, 11, 12, 13)

_TABLE = (
    ("", "vllm", "-", "0 BLPTHD"),
    ("", "vllm trtllm", "-", "8 BLPHTD"),
    ("", "trtllm", "-", "8 BLPF"),
    ("L", "vllm", "-", "1 PBTHD, 2 BPTHD, 6 PBHTD, 7 BPHTD, 15 PBH1TD, 13 BTHD, 12 BHTD"),
    ("L", "vllm", "-", "11 BTHW, 10 BHTW, 11 BTH2D, 10 BHT2D, heads_first HBTD"),
    ("", "named", "-", "LBNHC LBTHD, LBHNC LBHTD, LHBNC LHBTD, BLHNC BLHTD, BLNHC BLTHD, BHLNC BHLTD"),
    ("L", "sglang", "- unified", "5 S1D, 18 BTHD"),
    ("L", "vllm sglang", "- unified", "3 BTD"),
    ("P,L", "vllm sglang", "- k_v", "4 SHD, 9 BTHD"),
    ("P,L", "vllm", "-", "k_v_lists_hnd BHTD"),
    ("L,P", "vllm", "-", "16 BTHD, k_v_pairs_hnd BHTD"),
    ("PL", "sglang", "- k_v", "4 SHD, 9 BTHD"),
    # SGLang's host pools, most of which count tokens; K and V are two tensors, or a leading 2 of one.
    ("P", "", "-", "layer_first LSHD, page_first SLHD, page_first_direct BLTHD, page_head BHTLD"),
    ("P", "", "-", "layer_first LBTHD, page_first BTLHD"),
    ("", "", "-", "layer_first PLSHD, page_first PSLHD, page_first_direct PBLTHD, page_head PBHTLD"),
    ("", "", "-", "layer_first PLBTHD, page_first PBTLHD"),
    ("", "", "-", "layer_first_mla LSD, page_first_mla SLD, page_first_direct_mla BLTD"),
    ("", "", "-", "layer_first_mla LS1D, page_first_mla SL1D, page_first_direct_mla BLT1D"),
    ("", "", "-", "layer_first_mla LBTD, page_first_mla BTLD, layer_first_mla LBT1D, page_first_mla BTL1D"),
)
# Orders that engines hand in and that have no number.
_MORE = (
    Format(-1, "heads_first", "L", "HBTD"),  # a layer of LHBNC
    Format(-1, "k_v_lists_hnd", "PL", "BHTD"),
    Format(-1, "k_v_pairs_hnd", "LP", "BHTD"),
)
_NAMED = {str(number): row for number, row in FORMATS.items()} | HOST_LAYOUTS | VLLM_LAYOUTS
_NAMED |= {row.name: row for row in _MORE}
ROWS = tuple(
    Row(_NAMED[name], given, dims, engines, lists)
    for given, engines, lists, shapes in _TABLE
    for name, dims in (shape.split() for shape in shapes.split(", "))
)
