"""Docstrings of everything public: parameters, what is returned and raised, and examples, which run."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw import codec
from kvraw.errors import KvrawError
from kvraw.rope import rerotate_keys
from tests.emulator.fake_driver import FakeDriver

PUBLIC = {
    **{name: getattr(kvraw, name) for name in kvraw.__all__ if not name.startswith("_")},
    **{f"codec.{name}": getattr(codec, name) for name in codec.__all__},
    "rope.rerotate_keys": rerotate_keys,
}
ERRORS = {name for name in PUBLIC if isinstance(PUBLIC[name], type) and issubclass(PUBLIC[name], KvrawError)}
# What calls return: nobody makes them, so their own parameters are nobody's business.
RETURNED = {"HostChunk", "Transfer"}
# What other rooms of the package call; what lies ahead of a call is theirs to know.
INTERNAL = {
    "HostBuffer.mark_used",
    "HostBuffer.note_use",
    "HostPool.mark_used",
    "HostPool.mark_live_chunks",
    "HostPool.note_use",
    "HostPool.use_chunks",
    "PagedCache.keep_plan",
    "PagedCache.without_plans",
    *(f"PreparedCopy.{name}" for name in ("batch", "choose", "enqueue_batch", "enqueue_kernel", "launch", "ready")),
    "TransferPlan.describe",
    "TransferPlan.enqueue",
}
SECTIONS = ("Parameters", "Attributes", "Returns", "Raises", "Notes", "Examples")


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods of a class, with those that it has from other classes of kvraw, and ``__call__``."""
    for name in dir(cls):
        home = next((c for c in cls.__mro__ if name in vars(c)), object)
        if not home.__module__.startswith("kvraw") or (name.startswith("_") and name != "__call__"):
            continue
        member = vars(home)[name]
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        if inspect.isfunction(member):
            yield name, member


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function and method by its name."""
    for name in PUBLIC:
        value = PUBLIC[name]
        if inspect.isfunction(value):
            yield name, value
        elif name not in ERRORS:
            yield from ((f"{name}.{method}", member) for method, member in members(value))


CALLABLES = {name: function for name, function in callables() if name not in INTERNAL}


def sections(text: str) -> dict[str, str]:
    """The parts of a docstring by their headings; what is ahead of the first one by ""."""
    parts = re.split(rf"^({'|'.join(SECTIONS)})\n-+\n", inspect.cleandoc(text) + "\n", flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def raised(function: Callable[..., Any]) -> set[str]:
    """The errors that a function raises by name in its own body."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
    return {
        c.func.id for c in calls if isinstance(c, ast.Call) and isinstance(c.func, ast.Name) and c.func.id[0].isupper()
    }


def missing_raises(function: Callable[..., Any], text: str) -> list[str]:
    """Errors that a docstring does not name, in its section or, in one line, in its text."""
    return sorted(error for error in raised(function) if error not in text)


def faults_of(function: Callable[..., Any]) -> list[str]:
    """What the docstring of a function lacks."""
    text = function.__doc__ or ""
    parts = sections(text)
    signature = inspect.signature(function)
    parameters = [p.name for p in signature.parameters.values() if p.name not in ("self", "cls")]
    faults = [f"parameter {p} is not described" for p in parameters if not re.search(rf"\b{p}\b", text)]
    if signature.return_annotation in ("None", None):
        faults += ["returns nothing, but has a section Returns"] * ("Returns" in parts)
    elif "Returns" not in parts:
        faults.append(f"returns {signature.return_annotation}, and has no section Returns")
    faults += [f"raises {error}, which is not named" for error in missing_raises(function, text)]
    if raised(function) and "Raises" not in parts and f"Raise `{next(iter(raised(function)))}`" not in text:
        faults.append("raises, and has no section Raises")
    return faults


@pytest.mark.parametrize("name", CALLABLES)
def test_a_callable_says_what_it_takes_returns_and_raises(name: str) -> None:
    assert faults_of(CALLABLES[name]) == []


def test_what_is_missing_is_found() -> None:
    def bad(count: int) -> int:
        """Do something."""
        raise ValueError(str(count))

    assert [fault.split(",")[0] for fault in faults_of(bad)] == [
        "parameter count is not described",
        "returns int",
        "raises ValueError",
        "raises",
    ]


@pytest.mark.parametrize("name", [n for n in PUBLIC if isinstance(PUBLIC[n], type) and n not in ERRORS])
def test_a_class_says_how_it_is_made(name: str) -> None:
    cls = PUBLIC[name]
    text = cls.__doc__ or ""
    parts = sections(text)
    faults = []
    if name not in RETURNED:
        init = cls.__init__ if "__init__" in vars(cls) else None
        parameters = inspect.signature(cls).parameters
        faults += [f"parameter {p} is not described" for p in parameters if not re.search(rf"\b{p}\b", text)]
        if not is_dataclass(cls) and not hasattr(cls, "_fields") and parameters and "Parameters" not in parts:
            faults.append("no section Parameters")
        made = [f for f in (init, vars(cls).get("__post_init__")) if inspect.isfunction(f) and not is_generated(f)]
        errors = {error for function in made for error in raised(function)}
        faults += [
            f"raises {error}, which is not named" for error in sorted(errors) if error not in parts.get("Raises", "")
        ]
    assert faults == []


def is_generated(function: Callable[..., Any]) -> bool:
    """Whether a dataclass made it: there is no source."""
    return not function.__code__.co_filename.endswith(".py")


@pytest.mark.parametrize("name", [n for n in PUBLIC if n not in ERRORS])
def test_examples_are_there_and_run(name: str, fake: FakeDriver) -> None:
    """On the host; what needs a GPU has the emulator's."""
    value = PUBLIC[name]
    found = [value, *(member for _, member in members(value))] if isinstance(value, type) else [value]
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    count, out = 0, list[str]()
    for one in found:
        text = inspect.cleandoc(one.__doc__ or "")
        test = parser.get_doctest(text, {"kvraw": kvraw, "np": np}, f"{name}.{one.__name__}", None, None)
        count += len(test.examples)
        runner.run(test, out=out.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(out)
    assert count, "has no example"


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_an_error_says_when_it_is_raised(name: str) -> None:
    assert len((PUBLIC[name].__doc__ or "").split()) >= 5
