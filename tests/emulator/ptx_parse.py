"""Reads PTX text into entries, variables and instructions; whatever it does not know is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from tests.emulator.ptx_text import (
    CLOCK,
    SIZES,
    SPECIALS,
    Address,
    Entry,
    Immediate,
    Instruction,
    Operand,
    Pair,
    PtxSyntaxError,
    Register,
    Special,
    Symbol,
    Text,
    Variable,
    Vector,
)

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)
      |(?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d+|\d+U?)(?![\w.])
      |(?P<word>[.%$_A-Za-z](?:[\w$.]|::)*)
      |(?P<string>"[^"\n]*")
      |(?P<mark>[@!|+\-<>=\[\]{}(),;:])""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int
    start: int
    end: int


def _tokens(text: str) -> Iterator[_Token]:
    position, line = 0, 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise PtxSyntaxError(line, f"cannot read {text[position : position + 20]!r}")
        kind, found = str(match.lastgroup), match.group()
        if kind != "skip":
            yield _Token(kind, found, line, position, match.end())
        line += found.count("\n")
        position = match.end()


def place(variables: dict[str, Variable], new: Variable) -> None:
    """Append a variable to a space, at the next offset that its alignment allows."""
    end = max((v.offset + v.nbytes for v in variables.values()), default=0)
    offset = -(-end // new.align) * new.align
    variables[new.name] = Variable(new.name, new.space, new.align, new.nbytes, offset, new.data)


class _Parser:
    def __init__(self, text: str) -> None:
        self.source = text
        self.tokens = list(_tokens(text))
        self.tokens += [_Token("end", "", text.count("\n") + 1, len(text), len(text))] * 2
        self.at = 0
        self.text = Text()
        self.shared: dict[str, Variable] = {}
        self.entry = Entry("")
        self.scopes: list[dict[str, Register | tuple[int, int, int]]] = []
        self.scope_count = 0

    # -- tokens
    @property
    def now(self) -> _Token:
        return self.tokens[self.at]

    def fail(self, message: str) -> NoReturn:
        raise PtxSyntaxError(self.now.line, message)

    def next(self) -> _Token:
        self.at += 1
        return self.tokens[self.at - 1]

    def take(self, text: str) -> bool:
        if self.now.text == text and self.now.kind != "string":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.take(text):
            self.fail(f"expected {text!r}, found {self.now.text!r}")

    def word(self) -> str:
        if self.now.kind != "word":
            self.fail(f"expected a name, found {self.now.text!r}")
        return self.next().text

    def integer(self) -> int:
        value = self.number()
        if value.float_bits:
            self.fail("expected an integer")
        return value.value

    def number(self) -> Immediate:
        sign = 1
        while self.now.text in ("+", "-"):
            sign = -sign if self.next().text == "-" else sign
        if self.now.kind != "number":
            self.fail(f"expected a number, found {self.now.text!r}")
        text = self.next().text.rstrip("U")
        if text[:2] in ("0f", "0F", "0d", "0D"):
            if sign < 0:
                self.fail("a float literal takes no sign")
            return Immediate(int(text[2:], 16), 32 if text[1] in "fF" else 64)
        if "." in text:
            self.fail(f"{text} is no integer")
        if len(text) > 1 and text.isdigit() and text[0] == "0":
            self.fail(f"octal literal {text}")
        return Immediate(sign * int(text, 0))

    # -- module
    def module(self) -> Text:
        self.expect(".version")
        self.next()
        self.expect(".target")
        target = self.word()
        if not re.fullmatch(r"sm_\d+", target):
            self.fail(f"target {target}")
        self.expect(".address_size")
        if self.integer() != 64:
            self.fail("address size must be 64")
        while self.now.kind != "end":
            self.take(".visible")
            kind = self.word()
            if kind == ".entry":
                self.kernel()
            elif kind == ".global":
                variable = self.variable("global")
                self.text.globals[variable.name] = variable
                self.expect(";")
            elif kind == ".shared":
                place(self.shared, self.variable("shared"))
                self.expect(";")
            else:
                self.fail(f"unknown directive {kind}")
        return self.text

    def type(self) -> str:
        name = self.word()
        if name[1:] not in SIZES or name[0] != ".":
            self.fail(f"unknown type {name}")
        return name[1:]

    def variable(self, space: str) -> Variable:
        align = self.integer() if self.take(".align") else 0
        kind = self.type()
        width = SIZES[kind] // 8
        name, count = self.word(), 1
        if self.take("["):
            count = self.integer()
            self.expect("]")
        data = b""
        if space == "global" and self.take("="):
            values = self.values() if self.now.text == "{" else [self.integer()]
            data = b"".join((v % (1 << 8 * width)).to_bytes(width, "little") for v in values)
            if len(data) > count * width:
                self.fail(f"too many values for {name}")
        return Variable(name, space, align or width, count * width, 0, data)

    def values(self) -> list[int]:
        self.expect("{")
        found = [self.integer()]
        while self.take(","):
            found.append(self.integer())
        self.expect("}")
        return found

    # -- kernels
    def kernel(self) -> None:
        self.entry = Entry(self.word(), shared=dict(self.shared))
        self.expect("(")
        while not self.take(")"):
            self.expect(".param")
            place(self.entry.params, self.variable("param"))
            if self.now.text != ")":
                self.expect(",")
        while self.now.text != "{":
            directive = self.word()
            sizes = [self.integer()]
            while self.take(","):
                sizes.append(self.integer())
            if directive in (".maxntid", ".reqntid"):
                self.entry.max_threads = sizes[0]
            elif directive not in (".minnctapersm", ".maxnreg"):
                self.fail(f"unknown directive {directive}")
        self.scopes, self.scope_count = [], 0
        self.block()
        self.text.entries[self.entry.name] = self.entry

    def block(self) -> None:
        self.expect("{")
        self.scopes.append({})
        self.scope_count += 1
        while not self.take("}"):
            if self.now.text == "{":
                self.block()
            else:
                self.statement()
        self.scopes.pop()

    def statement(self) -> None:
        if self.tokens[self.at + 1].text == ":" and self.now.kind == "word":
            if self.now.text in self.entry.labels:
                self.fail(f"label {self.now.text} twice")
            self.entry.labels[self.word()] = len(self.entry.instructions)
            self.expect(":")
            return
        if self.take(".reg"):
            self.registers()
        elif self.take(".shared"):
            place(self.entry.shared, self.variable("shared"))
        elif self.take(".pragma"):
            if self.next().text != '"nounroll"':
                self.fail("unknown pragma")
        else:
            self.instruction()
        self.expect(";")

    def registers(self) -> None:
        bits = SIZES[self.type()]
        if bits == 8:
            self.fail("8-bit registers")
        while True:
            name = self.word()
            if self.take("<"):
                self.scopes[-1][name + "<"] = (bits, self.integer(), self.scope_count)
                self.expect(">")
            else:
                self.scopes[-1][name] = Register(f"{name}@{self.scope_count}", bits)
            if not self.take(","):
                return

    def lookup(self, name: str) -> Register | None:
        family = re.fullmatch(r"(.*?)(0|[1-9]\d*)", name)
        for scope in reversed(self.scopes):
            found = scope.get(name)
            if isinstance(found, Register):
                return found
            ranged = scope.get(family[1] + "<") if family else None
            if isinstance(ranged, tuple) and family and int(family[2]) < ranged[1]:
                return Register(f"{name}@{ranged[2]}", ranged[0])
        return None

    def instruction(self) -> None:
        start = self.now
        guard = None
        if self.take("@"):
            guard = self.register()
            if guard.bits != 1:
                self.fail("a guard must be a predicate")
        opcode = self.word()
        if opcode[0] in ".%":
            self.fail(f"{opcode} is no instruction")
        operands = []
        while self.now.text != ";":
            operands.append(self.operand())
            if not self.take(","):
                break
        text = " ".join(self.source[start.start : self.now.end].split())
        self.entry.instructions.append(Instruction(start.line, text, guard, opcode, tuple(operands)))

    def register(self) -> Register:
        negated = self.take("!")
        name = self.word()
        found = self.lookup(name)
        if found is None:
            self.fail(f"unknown register {name}")
        return Register(found.name, found.bits, negated)

    def operand(self) -> Operand:
        if self.take("["):
            base = self.operand()
            offset = self.integer() if self.now.text in ("+", "-") else 0
            self.expect("]")
            return Address(base, offset)
        if self.take("{"):
            items = [self.operand()]
            while self.take(","):
                items.append(self.operand())
            self.expect("}")
            return Vector(tuple(items))
        if self.now.kind == "number" or self.now.text == "-":
            return self.number()
        if self.now.text != "!" and self.lookup(self.now.text) is None:
            name = self.word()
            if name in (*SPECIALS, CLOCK):
                return Special(name)
            if name.startswith("%"):
                self.fail(f"unknown register {name}")
            return Symbol(name)
        first = self.register()
        if self.take("|"):
            return Pair(first, self.register())
        return first


def parse(text: str) -> Text:
    """Parse a module.

    Raises
    ------
    PtxSyntaxError
        A directive, type, register or construct outside the accepted language.
    """
    return _Parser(text).module()
