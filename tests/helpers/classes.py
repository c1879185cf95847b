"""What an engine can tell of a case: cases that agree in it take the same branches of the engine's code.

The list of cases is written by formats. An engine never hears of a format: it gets a folded plan, base addresses and
indices. So one case of each class shows of an engine what the whole list does; that formats become the right plans, the
engines on the host show with the whole list.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np

from kvraw.arrays import index_vector
from kvraw.copying.copy_engine import describe
from kvraw.copying.operands import Operands
from kvraw.copying.plan import CopyPlan
from kvraw.layouts.geometry import CacheLayout, Geometry, chunk_side, copy_plan, find_chunk_layout, find_format
from tests.helpers.cases import Case

__all__ = ["VIEWS", "one_of_each", "staging_slot"]

View = tuple[object, ...]


def _plan(case: Case) -> CopyPlan:
    """The plan that engines carry out."""
    s, row = case.shape, find_format(case.format)
    counts = (s.nl, s.nb, s.bs, s.nh, case.hs, case.element)
    g = Geometry(*counts, planes=case.planes)
    if case.pad:
        g = Geometry(*counts, planes=case.planes, block_stride=CacheLayout(row, g).strides()["B"] + case.pad)
    paged = CacheLayout(row, g).side(case.by)
    flat = chunk_side(find_chunk_layout(case.layout), g, case.chunk_tokens, case.by)
    return copy_plan(g, *((paged, flat) if case.direction == "store" else (flat, paged)), case.by)


def _folded(plan: CopyPlan) -> View:
    """Which folded dimensions step through tables, and which sides have pages and tables."""
    sides = [(s.page > 1, s.table_outer != 0) for s in (plan.src_flat, plan.dst_flat)]
    return *((d.src_table != 0, d.dst_table != 0) for d in plan.dims), None, *sides


def _ids(case: Case) -> View:
    """The side that ids belong to, whether there are any, whether some are left out, whether leading ones are."""
    return case.direction, bool(case.ids), min(case.ids, default=0) < 0, case.skip > 0


def _chunk_bytes(case: Case) -> int:
    s = case.shape
    return s.planes * s.nl * case.chunk_tokens * s.nh * s.d


def staging_slot(case: Case) -> int:
    """Bytes of a staging slot so small that chunks are cut, or that few fit."""
    return max(2048, _chunk_bytes(case) * (1 + case.seed % 5) // 3)


def _kernel(case: Case) -> View:
    """Bytes of an access, and whether a run is cut into segments."""
    plan = _plan(case)
    width = plan.width(case.off | 64, case.chunk_off | 64)
    return _folded(plan), _ids(case), width, plan.run_bytes // width > 128


def _copy(case: Case) -> View:
    """Whether neighbours are joined into larger copies."""
    plan, count = _plan(case), len(case.ids) - case.skip
    store = case.direction == "store"
    far = np.arange(1, 1 + max((plan.src if store else plan.dst).entries, case.chunks), dtype=np.uint64)
    paged = Operands(far << np.uint64(40), index_vector("ids", list(case.ids)))
    chunks = Operands(far << np.uint64(32))
    made = describe(plan, *((paged, chunks) if store else (chunks, paged)), case.skip, count)
    kept = sum(i >= 0 for i in case.ids[case.skip :])
    return _folded(plan), _ids(case), len(made) < kept * plan.runs_per_item


def _staged(case: Case) -> View:
    """The axes that chunks are cut along, whether they are, and whether whole chunks are left out."""
    per_chunk = case.chunk_tokens // (1 if case.by == "slot" else case.bs)
    cut = _chunk_bytes(case) > staging_slot(case)
    return _folded(_plan(case)), _ids(case), case.layout, cut, case.skip >= per_chunk


VIEWS: dict[str, Callable[[Case], View]] = {"kernel": _kernel, "paced": _kernel, "copy": _copy, "staged": _staged}


def one_of_each(engine: str, cases: list[Case]) -> set[Case]:
    """One case of each class of an engine: of each the one whose format and layout were taken least often so far."""
    classes: defaultdict[View, list[Case]] = defaultdict(list)
    for case in cases:
        classes[VIEWS[engine](case)].append(case)
    taken: Counter[View] = Counter()
    found = set()
    for members in classes.values():
        case = min(members, key=lambda c: taken[c.format, c.layout])
        taken[case.format, case.layout] += 1
        found.add(case)
    return found
