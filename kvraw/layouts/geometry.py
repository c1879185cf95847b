"""From a format and a geometry to a `Side`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvraw.checks import integer
from kvraw.copying.plan import CopyPlan, Side
from kvraw.errors import LayoutError
from kvraw.layouts.formats import CHUNK_LAYOUTS, FORMATS, ChunkLayout, Format, every_format

__all__ = ["CacheLayout", "Geometry", "chunk_side", "copy_plan", "find_chunk_layout", "find_format"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Counts of a paged KV cache.

    Attributes
    ----------
    layers, blocks, block_size, heads, head_size : int
        Layers, blocks of the pool, tokens per block, KV heads, elements per head (both halves where K and V are fused
        in one row of one plane).
    element_size : int
        Bytes per element.
    planes : int
        2 where K and V are apart, 1 where they are not.
    block_stride : int
        Bytes from one block to the next; 0 means tight. Only where blocks are the outermost axis.

    Raises
    ------
    TypeError
        A count is no integer.
    LayoutError
        A count is out of bounds, or the cache takes 2**63 bytes or more.

    Examples
    --------
    >>> geometry = kvraw.Geometry(layers=32, blocks=1000, block_size=16, heads=8, head_size=128, element_size=2)
    >>> geometry.token_bytes
    131072
    """

    layers: int
    blocks: int
    block_size: int
    heads: int
    head_size: int
    element_size: int
    planes: int = 2
    block_stride: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, integer(f"geometry: {field.name}", getattr(self, field.name)))
        for name in ("layers", "block_size", "heads", "head_size", "element_size"):
            if getattr(self, name) <= 0:
                raise LayoutError(f"geometry: {name} is {getattr(self, name)}, must be positive")
        if self.blocks < 0 or self.block_stride < 0:
            raise LayoutError(f"geometry: blocks is {self.blocks}, block_stride {self.block_stride}: must be >= 0")
        if self.planes not in (1, 2):
            raise LayoutError(f"geometry: planes is {self.planes}, must be 1 or 2")
        nbytes = max(self.blocks, 1) * max(self.block_size * self.token_bytes, self.block_stride)
        if nbytes >= 1 << 63:
            raise LayoutError(f"{self} takes {nbytes} bytes, must be fewer than {1 << 63}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and planes."""
        return self.layers * self.planes * self.heads * self.head_size * self.element_size

    def axis_sizes(self, tokens: int) -> dict[str, int]:
        """Size of each axis letter.

        Parameters
        ----------
        tokens : int
            What ``T`` stands for: tokens of a block, or of a chunk.

        Returns
        -------
        dict of str to int
            The sizes of ``B``, ``L``, ``P``, ``T``, ``H`` and ``D``.
        """
        return {
            "B": self.blocks,
            "L": self.layers,
            "P": self.planes,
            "T": tokens,
            "H": self.heads,
            "D": self.head_size,
        }


_WORDS = {"B": "block", "L": "layer", "P": "plane", "T": "token", "H": "head", "D": "element"}


def _strides(axes: str, sizes: dict[str, int], unit: int, block_stride: int = 0) -> dict[str, int]:
    """Byte stride of each axis, tight from the innermost outwards; absent axes have stride 0."""
    strides = dict.fromkeys("BLPTHD", 0)
    for axis in reversed(axes):
        strides[axis] = unit
        if axis == "B" and block_stride:
            if block_stride < unit:
                raise LayoutError(f"block_stride is {block_stride} bytes, a block takes {unit}")
            strides[axis] = block_stride
        unit = strides[axis] * sizes[axis]
    return strides


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A format with a geometry: where every run of a paged cache lies.

    Attributes
    ----------
    format, geometry
        The axes and their counts.
    given : tuple of (str, int)
        Byte stride of each axis where tensors have strides of their own; empty: as the format and geometry say.
    """

    format: Format
    geometry: Geometry
    given: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        g, f = self.geometry, self.format
        if f.axes_for(g.planes) is None:
            raise LayoutError(f"format {f.name} has {f.planes} plane(s), the geometry says {g.planes}")
        if f.mla and g.heads != 1:
            raise LayoutError(f"format {f.name} has one head, the geometry says {g.heads}")
        if g.block_stride and self.axes[0] != "B":
            raise LayoutError(f"format {f.name}: blocks are not the outermost axis, block_stride must be 0")
        self.strides()

    @property
    def axes(self) -> str:
        """Axes of one tensor, outermost first."""
        axes = self.format.axes_for(self.geometry.planes)
        assert axes is not None
        return axes

    @property
    def pointers(self) -> int:
        """Base addresses that the format takes."""
        sizes = self.geometry.axis_sizes(self.geometry.block_size)
        count = 1
        for axis in self.format.pointers:
            count *= sizes[axis]
        return count

    def strides(self) -> dict[str, int]:
        """Byte stride of each axis in one tensor."""
        g = self.geometry
        if self.given:
            return {**dict.fromkeys("BLPTHD", 0), **dict(self.given)}
        return _strides(self.axes, g.axis_sizes(g.block_size), g.element_size, g.block_stride)

    def __str__(self) -> str:
        g, f = self.geometry, self.format
        planes = "K and V apart" if g.planes == 2 else "one plane"
        heads = f"{g.heads} head{'s' * (g.heads != 1)} of {g.head_size} elements of {g.element_size} bytes"
        each = " and ".join({"L": "layer", "P": "plane"}[a] for a in f.pointers)
        order = ", ".join(_WORDS[a] for a in self.axes)
        sizes, strides, expected, gaps = g.axis_sizes(g.block_size), self.strides(), g.element_size, []
        for a in reversed(self.axes):
            if sizes[a] > 1:
                gaps += [f"{strides[a]} bytes from one {_WORDS[a]} to the next"] * (strides[a] != expected)
                expected = strides[a] * sizes[a]
        return (
            f"{f.name}: {g.layers} layer{'s' * (g.layers != 1)}, {planes}, {g.blocks} blocks of {g.block_size} tokens, "
            f"{heads}; {f'a tensor per {each}' if each else 'one tensor'}, in memory [{order}]"
            + "".join(f", {gap}" for gap in reversed(gaps))
        )

    def tensor_bytes(self) -> int:
        """Bytes from a tensor's base to the end of its last run."""
        g = self.geometry
        sizes, strides = g.axis_sizes(g.block_size), self.strides()
        if not g.blocks:
            return 0
        return g.element_size + sum((sizes[a] - 1) * strides[a] for a in self.axes)

    def side(self, by: str) -> Side:
        """The side of a copy that addresses this cache by ``"block"`` ids or by ``"slot"`` numbers."""
        g, stride = self.geometry, self.strides()
        table = dict.fromkeys("LP", 0)
        entries = 1
        for axis in reversed(self.format.pointers):
            table[axis] = entries
            entries *= g.axis_sizes(0)[axis]
        slots = by == "slot"
        return Side(
            outer=stride["B"],
            inner=stride["T"] if slots else 0,
            page=g.block_size if slots else 1,
            layer=stride["L"],
            plane=stride["P"],
            token=0 if slots else stride["T"],
            head=stride["H"],
            table_layer=table["L"],
            table_plane=table["P"],
            limit=g.blocks * (g.block_size if slots else 1),
            entries=entries,
            skip_negative=slots,
        )


def chunk_side(layout: ChunkLayout, geometry: Geometry, chunk_tokens: int, by: str) -> Side:
    """The side of a copy whose item i is block (or token) i of a row of chunks, one base per chunk.

    Raises
    ------
    LayoutError
        `chunk_tokens` is not a positive multiple of the block size, by blocks.
    """
    slots = by == "slot"
    step = 1 if slots else geometry.block_size
    if chunk_tokens <= 0 or chunk_tokens % step:
        raise LayoutError(f"chunk_tokens is {chunk_tokens}, must be a positive multiple of the block size {step}")
    stride = _strides(layout.axes, geometry.axis_sizes(chunk_tokens), geometry.element_size)
    return Side(
        outer=0,
        inner=step * stride["T"],
        page=chunk_tokens // step,
        layer=stride["L"],
        plane=stride["P"],
        token=0 if slots else stride["T"],
        head=stride["H"],
        table_outer=1,
        entries=0,
    )


def copy_plan(geometry: Geometry, src: Side, dst: Side, by: str) -> CopyPlan:
    """The plan that moves items of this geometry from `src` to `dst`."""
    return CopyPlan(
        src,
        dst,
        layers=geometry.layers,
        planes=geometry.planes,
        tokens=1 if by == "slot" else geometry.block_size,
        heads=geometry.heads,
        run=geometry.head_size * geometry.element_size,
    )


def find_format(format: int | str | Format) -> Format:
    """A format by number or name.

    Raises
    ------
    LayoutError
        There is no such format (lists those there are), or it is several layouts at once.
    """
    if isinstance(format, Format):
        found: Format | None = format
    elif isinstance(format, str):
        found = next((row for row in every_format() if row.name == format), None)
    else:
        found = FORMATS.get(int(format))
    if found is None:
        known = sorted(FORMATS) if not isinstance(format, str) else [row.name for row in every_format()]
        raise LayoutError(f"format {format!r} is unknown; known: {', '.join(map(str, known))}")
    if found.several:
        raise LayoutError(f"format {format!r} is several layouts at once, a cache has one")
    return found


def find_chunk_layout(name: str | ChunkLayout) -> ChunkLayout:
    """A chunk layout by name.

    Raises
    ------
    LayoutError
        There is no such layout; lists those there are.
    """
    if isinstance(name, ChunkLayout):
        return name
    if name not in CHUNK_LAYOUTS:
        raise LayoutError(f"chunk layout {name!r} is unknown; known: {', '.join(CHUNK_LAYOUTS)}")
    return CHUNK_LAYOUTS[name]
