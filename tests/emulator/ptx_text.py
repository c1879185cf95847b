"""What a PTX module is made of, as read from its text."""

from __future__ import annotations

from dataclasses import dataclass, field

SIZES = {"pred": 1}  # bits by type
SIZES |= {f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)}
SIZES |= {"f16": 16, "f32": 32, "f64": 64}
SPECIALS = ("%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x", "%laneid")
CLOCK = "%globaltimer"  # of 64 bits


class PtxError(Exception):
    """Any refusal of the interpreter."""


class PtxSyntaxError(PtxError):
    """The text holds something outside the accepted language."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line


@dataclass(frozen=True, slots=True)
class Register:
    """A virtual register; its name is unique over the scopes of one entry."""

    name: str
    bits: int
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Immediate:
    """An integer, or the bits of a float literal."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A label or the name of a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``, two destinations."""

    first: Register
    second: Register


@dataclass(frozen=True, slots=True)
class Address:
    """``[base+offset]``."""

    base: Operand
    offset: int


Operand = Register | Immediate | Special | Symbol | Vector | Pair | Address


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction with its place in the text."""

    line: int
    text: str
    guard: Register | None
    opcode: str
    operands: tuple[Operand, ...]

    @property
    def form(self) -> str:
        """The opcode with its modifiers; for `mov`, also what kind of thing moves."""
        if self.opcode.startswith("mov."):
            for operand, suffix in zip(self.operands, ("unpack", "pack"), strict=False):
                if isinstance(operand, Vector):
                    return f"{self.opcode} {suffix}"
            source = self.operands[-1]
            if isinstance(source, Symbol):
                return f"{self.opcode} address"
            if isinstance(source, Special):
                return f"{self.opcode} {source.name}"
        return self.opcode


@dataclass(frozen=True, slots=True)
class Variable:
    """A parameter, shared or global variable."""

    name: str
    space: str
    align: int
    nbytes: int
    offset: int = 0
    data: bytes = b""


@dataclass(slots=True)
class Entry:
    """A kernel as written."""

    name: str
    params: dict[str, Variable] = field(default_factory=dict)
    shared: dict[str, Variable] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    max_threads: int = 1024


@dataclass(slots=True)
class Text:
    """A parsed module."""

    globals: dict[str, Variable] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
