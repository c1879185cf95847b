"""Every shape in which an engine hands in its cache: what the rows of `kvraw.layouts.formats` say of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from kvraw.layouts.formats import VLLM_LAYOUTS, Format, every_format

__all__ = [
    *("ENGINES", "GIVEN", "HINTS", "KV_LAYOUTS", "KV_LISTS", "LETTERS", "PRODUCTS", "EngineShape", "every_shape"),
    "shapes_of",
]


@dataclass(frozen=True, slots=True)
class EngineShape:
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
    words : tuple of str
        Engines that hand it in (``named``: vLLM, where ``kv_layout`` is one of `VLLM_LAYOUTS`; none where only
        ``format=`` asks for it), and the values of ``kv_list_layout`` that mean it beside None.
    """

    format: Format
    given: str
    dims: str
    words: tuple[str, ...] = ()

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


@cache
def shapes_of(form: Format) -> tuple[EngineShape, ...]:
    """The shapes of a format's row: split by commas and spaces, each the axes and the words of an `EngineShape`.

    ``"P,L/SHD vllm k_v"`` are two lists, of K and of V, of tensors [blocks * block_size, heads, head_size], as vLLM
    hands them in, with or without ``kv_list_layout="k_v"``.
    """
    shapes = [shape.split() for shape in form.shapes.split(", ") if shape]
    if not shapes:
        shapes = [[f"{','.join(form.pointers)}/{form.axes.replace('BT', 'S') if form.flat else form.axes}"]]
    split = [(*axes.rpartition("/"), words) for axes, *words in shapes]
    return tuple(EngineShape(form, given, dims, tuple(words)) for given, _, dims, words in split)


def every_shape() -> Iterator[EngineShape]:
    """The shapes of all formats of one layout."""
    return (shape for form in every_format() if not form.several for shape in shapes_of(form))
