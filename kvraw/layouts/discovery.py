"""From tensors to a format and a geometry: what was handed in, how its memory is ordered, and what the hints say.

Nothing is copied. There are two ways in:

1. ``axes=``: the caller names every axis, nothing is inferred, strides are followed.
2. Hints, or none. Every reading that fits the tensors, the engine and the hints is made: each shape of
   `kvraw.layouts.formats` with its axes in the order of memory, whatever the order of the tensor's
   axes, and, where no format is named, with its axes as the tensor is shaped. The stride of an axis of size 1
   means nothing, so such an axis may be any. One reading must be left: two that put any token of any layer, plane
   or head elsewhere are an error, which names the hints that settle it. Nothing is likelier than something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol, TypeAlias

from kvraw.errors import LayoutError
from kvraw.layouts.engine_shapes import ENGINES, HINTS, KV_LISTS, LETTERS, PRODUCTS, EngineShape, every_shape, shapes_of
from kvraw.layouts.formats import VLLM_LAYOUTS, Format
from kvraw.layouts.geometry import CacheLayout, find_format
from kvraw.layouts.reading import Hints, Memory, Reading, Spelling, list_sizes, one_of, read

__all__ = ["Discovery", "Tensors", "View", "described", "discover", "flatten", "memory_of"]


class View(Protocol):
    """The attributes of a tensor that discovery uses; strides are in bytes."""

    @property
    def address(self) -> int: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def strides(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def itemsize(self) -> int: ...  # noqa: D102


Tensors: TypeAlias = "View | Sequence[View] | Sequence[Sequence[View]]"


@dataclass(frozen=True, slots=True)
class Discovery:
    """A layout, and the addresses that it takes in the order of its format's ``pointers``."""

    layout: CacheLayout
    addresses: tuple[int, ...]


def flatten(tensors: Tensors, name: str = "tensors") -> tuple[tuple[int, ...], dict[str, View]]:
    """The lengths of the list levels, and the tensors by the name that errors call them."""
    levels: tuple[int, ...] = ()
    found: dict[str, Any] = {name: tensors}
    while any(isinstance(x, Sequence) for x in found.values()):
        texts = {name: f"a list of {len(x)}" if isinstance(x, Sequence) else "one tensor" for name, x in found.items()}
        first = next(iter(found))
        for name, text in texts.items():
            if text == "a list of 0":
                raise LayoutError(f"{name} is an empty list, must hold one tensor or more")
            if len(levels) == 2 and text != "one tensor":
                raise LayoutError(f"{name} is {text}, must be one tensor: lists nest two deep at most")
            if text != texts[first]:
                raise LayoutError(f"{name} is {text}, {first} is {texts[first]}: must be alike")
        levels += (len(found[first]),)
        found = {f"{name}[{i}]": x for name, part in found.items() for i, x in enumerate(part)}
    return levels, found


def described(name: str, view: View) -> str:
    """A tensor in errors."""
    return f"{name} (shape {tuple(view.shape)}, strides {tuple(view.strides)} bytes, itemsize {view.itemsize})"


def memory_of(views: dict[str, View], levels: tuple[int, ...]) -> Memory:
    """Shape, strides and element size that all tensors share: no two of their elements are at one address."""
    (first, view), *others = views.items()
    memory = Memory(tuple(map(int, view.shape)), tuple(map(int, view.strides)), view.itemsize, levels)
    for name, other in others:
        alike = tuple(other.shape) == memory.shape and other.itemsize == view.itemsize
        if not alike or any(memory.strides[i] != other.strides[i] for i in memory.order):
            raise LayoutError(f"{described(name, other)} differs from {described(first, view)}: all must be alike")
    if 0 in memory.shape:
        raise LayoutError(f"{described(first, view)} has no elements")
    end = view.itemsize
    for i in reversed(memory.order):
        step = memory.strides[i]
        if step < end:
            why = "an expanded axis" if step == 0 else "a reversed axis" if step < 0 else "axes overlap"
            raise LayoutError(
                f"{described(first, view)}: axis {i} has stride {step}, {why}; must be {end} or more there"
            )
        end += step * (memory.shape[i] - 1)
    return memory


def _named(axes: str, levels: tuple[int, ...], dims: int, hints: Hints) -> Spelling:
    """The spelling that `axes` is, with the list levels named too."""
    given, slash, letters = axes.rpartition("/")
    if set(axes) & {"N", "C"}:
        raise LayoutError(
            f"axes is {axes!r}, must name the axes as the tensors are shaped by the letters {''.join(LETTERS)}; "
            f"a name of vLLM's for the order in memory is kv_layout="
        )
    spelled = "".join(PRODUCTS.get(x, {"W": "D", "1": "", "2": ""}.get(x, x)) for x in given + letters)
    known = set(letters) <= set(LETTERS) and set(given) <= {"L", "P"}
    if not known or len(set(spelled)) != len(spelled) or not set("BTD") <= set(spelled):
        raise LayoutError(
            f"axes is {axes!r}, must name blocks B, tokens of a block T (or S: blocks*block_size) and elements D, "
            f"and what else there is: heads H, planes P (K and V), layers L, 1; each once, lists in front: 'PL/BTHD'"
        )
    if set(letters) & {"2", "W"} and "P" in spelled:
        raise LayoutError(f"axes is {axes!r}: 2 and W are K and V of a head side by side, P must not be named too")
    if len(letters) != dims:
        raise LayoutError(f"axes is {axes!r}, names {len(letters)} axes of a tensor, the tensors have {dims}")
    if not slash:
        given = "".join(a for a in "LP" if a not in letters)
        if len(levels) < 2 or len(given) < 2:
            given = given[: len(levels)] if levels != (1,) or "L" in given else ""
        elif levels == (2, 2):
            raise LayoutError(f"axes is {axes!r}, tensors is lists of 2 by 2: say 'PL/{axes}' or 'LP/{axes}'")
        elif levels[0] == 2:
            given = "PL"
    if (hints.kv_list_layout == "k_v") != (set(given) == {"P", "L"}) and hints.kv_list_layout is not None:
        raise LayoutError(f"axes is {axes!r} for lists of {given!r}, kv_list_layout is {hints.kv_list_layout!r}")
    flat = len(levels) == 1 and len(given) == 2 and levels[0] % 2 == 0
    if not (len(given) == len(levels) or flat or (not given and set(levels) <= {1})):
        lists = " of ".join(f"a list of {n}" for n in levels) or "one tensor"
        raise LayoutError(f"axes is {axes!r} with {given or 'nothing'!r} for the lists, tensors is {lists}")
    return Spelling(given, letters)


def _candidates(row: EngineShape, memory: Memory, hints: Hints, asked: bool) -> Iterator[Spelling]:
    """Every way to lay the axes of a row on those of the tensors: as they are shaped, as their memory is ordered."""
    lists, order = row.given.replace(",", ""), memory.order
    if not asked:
        shaped = row.dims
        if hints.kv_layout in VLLM_LAYOUTS and set(row.dims) <= set("LBHTD"):
            shaped = "".join(a for a in "LBHTD" if a in row.dims)  # the order of vLLM's views, whatever their memory
        yield Spelling(lists, shaped, row.format)
    ones = [i for i, n in enumerate(memory.shape) if n == 1]
    for places in combinations(range(len(row.dims)), len(order)):
        others = (p for p in range(len(row.dims)) if p not in places)
        placed = dict(zip(order, places, strict=True)) | dict(zip(ones, others, strict=True))
        yield Spelling(lists, "".join(row.dims[placed[i]] for i in range(len(row.dims))), row.format)


def _require_order(reading: Reading, kv_layout: str | None, form: Format | None) -> None:
    """Raise `LayoutError` where heads and tokens, or all axes of a name of vLLM's, are ordered otherwise in memory."""
    if reading.layout is None:
        return
    steps = {a: reading.steps[a] for a in reading.steps if reading.sizes[a] > 1}
    hnd = steps["H"] > steps["T"] if {"T", "H"} <= set(steps) else None
    if form is not None:
        if hnd not in (None, form.hnd):
            raise LayoutError(f"is {'HND' if hnd else 'NHD'} in memory, {form.name} is {'HND' if form.hnd else 'NHD'}")
    elif kv_layout is not None and kv_layout in VLLM_LAYOUTS:
        found = sorted((a for a in steps if a in "LBTH"), key=lambda a: -steps[a])
        if found != [a for a in VLLM_LAYOUTS[kv_layout].axes if a in found]:
            raise LayoutError(f"is {''.join(found)} in memory, kv_layout is {kv_layout!r}")
    elif kv_layout is not None and hnd not in (None, kv_layout == "HND"):
        raise LayoutError(f"is {'HND' if hnd else 'NHD'} in memory, kv_layout is {kv_layout!r}")


def _shown(row: EngineShape, reading: Reading) -> str:
    assert reading.layout is not None
    g = reading.layout.geometry
    counts = f"blocks={g.blocks}, block_size={g.block_size}, num_heads={g.heads}, head_size={g.head_size}"
    name = f"{row.format.name}: " if row.format.number >= 0 else ""
    return f"{row.label} ({name}layers={g.layers}, planes={g.planes}, {counts})"


def _says(row: EngineShape, reading: Reading, hint: str) -> object:
    """The value of `hint` that means this reading; None where none does for certain."""
    assert reading.layout is not None
    if hint == "axes":
        return str(reading.spelling)
    if hint == "format":
        form = row.format
        return form.number if form.number >= 0 else form.name if form.name in VLLM_LAYOUTS else None
    if hint == "kv_layout":
        return None if row.format.mla or row.layouts[0] in VLLM_LAYOUTS else row.layouts[0]
    if hint == "kv_list_layout":
        return next((word for word in row.words if word in KV_LISTS), None)
    if hint == "head_size" and row.format.paired:
        return None
    return getattr(reading.layout.geometry, "heads" if hint == "num_heads" else hint)


_Readings = list[tuple[EngineShape, Reading]]


def _only(readings: _Readings, what: str, by_format: Callable[[EngineShape, Reading], bool]) -> Reading:
    """The reading that is left, or an error that names what settles it.

    `by_format` tells of which readings the format's number is enough: those in the order of memory.
    """
    alike: dict[object, _Readings] = {}
    for row, reading in readings:
        alike.setdefault(reading.same, []).append((row, reading))
    groups = list(alike.values())
    for (row, reading), *_ in groups:
        if reading.missing:
            needs = ", ".join(f"{name}=" for name in reading.missing)
            raise LayoutError(f"{what}: {row.label} is handed in as {row.shown}: pass {needs}")
    if len(groups) == 1:
        return groups[0][0][1]
    options = []
    for hint in ("kv_layout", *HINTS.values(), "planes", "kv_list_layout", "format", "axes"):
        values = [{_says(row, reading, hint) for row, reading in group} for group in groups]
        every = set().union(*values)
        if hint == "format" and not all(by_format(*group[0]) for group in groups):
            continue
        if len(every) == sum(map(len, values)) and None not in every:
            first = [_says(*group[0], hint) for group in groups]
            options.append(" or ".join(f"{hint}={value!r}" for value in first[:6]) + " ..." * (len(first) > 6))
    readable = "; or ".join(_shown(*group[0]) for group in groups[:6]) + "; or ..." * (len(groups) > 6)
    raise LayoutError(f"{what} cannot be told apart: {readable}. To settle it pass {', or '.join(options)}")


def discover(
    tensors: Tensors,
    *,
    axes: str | None = None,
    format: int | str | Format | None = None,
    engine: str = "vllm",
    kv_layout: str | None = None,
    block_size: int | None = None,
    num_heads: int | None = None,
    head_size: int | None = None,
    kv_list_layout: str | None = None,
    planes: int | None = None,
) -> Discovery:
    """Find the format and the geometry of a paged KV cache.

    Parameters
    ----------
    tensors : View, sequence of View, or sequence of sequences of View
        What the engine hands in, in any permutation of its dimensions.
    axes : str, optional
        The axes of a tensor as it is shaped, such as ``"PBTHD"``: ``B`` blocks, ``T`` tokens of a block, ``H`` heads,
        ``D`` elements of a head, ``P`` planes (K and V), ``L`` layers, ``S`` blocks * block_size (with `block_size`),
        ``1`` an axis that is none. Nothing is inferred then, and strides may be any as long as ``D`` is dense. Lists
        are layers, or pairs or lists of K and V where no ``P`` is named; ``"PL/BTHD"`` names them too.
    format : int, str or Format, optional
        The format, where it is known: its axes are the order in memory, and `engine` does not matter.
    engine : str
        ``"vllm"``, ``"sglang"`` or ``"trtllm"``: whose shapes they are.
    kv_layout : str, optional
        ``"NHD"``, ``"HND"`` or one of vLLM's ``"LBNHC"``, ``"LBHNC"``, ``"LHBNC"``, ``"BLHNC"``, ``"BLNHC"``,
        ``"BHLNC"``: the order in memory; not asked of formats without heads.
    block_size, num_heads, head_size : int, optional
        Tokens per block, KV heads, elements per head (for fused formats of one half or of both).
    kv_list_layout : str, optional
        SGLang: a flat list is ``"k_v"``, all K then all V, or ``"unified"``, one entry per layer.
    planes : int, optional
        1 or 2; for fused formats whether K and V are taken apart: they are not where nothing is said.

    Raises
    ------
    LayoutError
        The tensors fit no format, contradict the hints, or cannot be told apart: the text names what settles it.
    """
    hints = Hints(kv_layout, block_size, num_heads, head_size, planes, kv_list_layout)
    one_of("engine", engine, ENGINES)
    if kv_list_layout is not None and engine != "sglang" and format is None and axes is None:
        raise LayoutError(f"kv_list_layout is {kv_list_layout!r}, engine is {engine!r}: only 'sglang' has it")
    levels, views = flatten(tensors)
    memory = memory_of(views, levels)
    name, view = next(iter(views.items()))
    what = described(name, view) if len(views) == 1 else f"{len(views)} tensors like {described(name, view)}"
    if axes is not None:
        if format is not None:
            raise LayoutError(f"axes is {axes!r}, format is {format!r}: pass one of them")
        found = _by_axes(axes, memory, hints, what)
    else:
        found = _by_rows(format, engine, memory, hints, what)
    assert found.layout is not None
    addresses = tuple(int(x.address) for x in views.values())
    if found.split:  # K and V are the two halves of the one tensor
        addresses = (addresses[0], addresses[0] + found.split)
    return Discovery(found.layout, addresses)


def _by_axes(axes: str, memory: Memory, hints: Hints, what: str) -> Reading:
    spelling = _named(axes, memory.levels, len(memory.shape), hints)
    try:
        found = read(spelling, memory, hints)
        _require_order(found, hints.kv_layout, None)
    except LayoutError as error:
        raise LayoutError(f"{what}, axes {axes!r} with {hints}: {error}") from None
    if found.missing:
        needs = ", ".join(f"{name}=" for name in found.missing)
        raise LayoutError(f"{what}, axes {axes!r}: pass {needs}")
    return found


def _by_rows(format: int | str | Format | None, engine: str, memory: Memory, hints: Hints, what: str) -> Reading:
    levels, asked = memory.levels, format is not None
    if format is not None:
        rows = [*shapes_of(find_format(format))]
        source = rows[0].label
    else:
        engines = {engine} | ({"named"} if engine == "vllm" and hints.kv_layout in VLLM_LAYOUTS else set())
        said = {hints.kv_list_layout} - {None}
        rows = [row for row in every_shape() if engines & {*row.words} and said <= {*row.words}]
        source = f"engine {engine!r}"

    def fit(row: EngineShape) -> bool:
        depth = len(row.given.split(",")) if row.given else 0
        alone = asked and set(levels) <= {1}  # a format that was asked for takes its one tensor bare or in a list
        return len(row.dims) == len(memory.shape) and (
            alone or (len(levels) == depth and list_sizes(row.given.replace(",", ""), levels) is not None)
        )

    fits = [row for row in rows if fit(row)]
    if not fits:
        shown = "; ".join(f"{row.shown} ({row.label})" for row in rows)
        lists = f"a list of {' lists of '.join(map(str, levels))}" if levels else "one tensor"
        raise LayoutError(f"tensors is {lists}, {what}: {source} takes {shown}; or name the axes: axes=")
    readings: _Readings = []
    reasons: dict[str, str] = {}  # not the errors: their tracebacks would keep the tensors
    for row in fits:
        label = f"{row.label}, {row.shown}"
        if hints.kv_layout not in (None, *row.layouts):
            reasons[label] = f"is {' or '.join(row.layouts)}, kv_layout is {hints.kv_layout!r}"
            continue
        for spelling in dict.fromkeys(_candidates(row, memory, hints, asked)):
            try:
                reading = read(spelling, memory, hints)
                _require_order(reading, None, row.format)
            except LayoutError as error:
                reasons.setdefault(label, str(error))
            else:
                readings.append((row, reading))
    if not readings:
        why = "; ".join(f"{label}: {reason}" for label, reason in reasons.items())
        raise LayoutError(f"{what} fits no layout of {source} with {hints}: {why}; or name the axes: axes=")
    return _only(readings, what, lambda row, one: one.spelling in _candidates(row, memory, hints, True))
