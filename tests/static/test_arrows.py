"""Which module may import which: the arrows between the rooms of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "kvraw").rglob("*.py"))
}
LONGEST = 420  # lines of a file, docstrings apart

# Rooms that say what they import of kvraw; the longest matching name rules. `kvraw` itself only names things lazily.
ALLOWED = {
    "kvraw.errors": "",
    "kvraw.checks": "",
    "kvraw.memo": "",
    "kvraw.config": "",
    "kvraw.layouts.formats": "errors",
    "kvraw.copying.plan": "errors",
    "kvraw.addresses": "errors",
    "kvraw.plain": "",
    "kvraw.arrays": "errors plain",
    "kvraw.layouts.geometry": "errors checks layouts copying.plan",
    "kvraw.layouts.discovery": "errors layouts copying.plan",
    "kvraw.layouts.parts": "errors layouts copying.plan",
    "kvraw.layouts": "errors layouts",
    "kvraw.layouts.engine_shapes": "errors layouts",
    "kvraw.ptx": "errors ptx",
    "kvraw.runtime": "errors addresses checks config runtime",
    "kvraw.copying": "errors checks config memo arrays layouts runtime ptx copying",
    "kvraw.codec": "errors checks config arrays runtime ptx copying codec",
    "kvraw.rope": "errors config arrays runtime ptx copying rope",
    "kvraw.pages": "arrays",
    "kvraw.cache": "errors addresses checks layouts arrays runtime",
    "kvraw.chunks": "errors addresses arrays cache runtime copying",
    "kvraw.batch": "errors addresses arrays cache runtime copying",
    "kvraw.prepared": "errors checks config arrays cache runtime copying",
    "kvraw.transfer_plan": "errors checks config layouts arrays cache chunks runtime copying",
    "kvraw.transfer": "errors cache chunks copying.planner copying.transfer runtime transfer_plan",
    "kvraw.host_kv_pool": "errors checks memo arrays layouts cache pages runtime copying prepared",
    "kvraw.transformers": "errors batch runtime copying adapters",
    "kvraw.adapters": (
        "errors addresses checks config layouts plain arrays memo runtime copying codec rope "
        "cache batch prepared transfer transfer_plan adapters"
    ),
    "kvraw.multiprocess": "errors checks config layouts cache runtime copying transfer_plan multiprocess",
    "kvraw.bench": "errors layouts runtime copying adapters bench",
    "kvraw.cli.engines": "__version__ adapters.engines",
    "kvraw.cli": "__version__ errors config layouts ptx runtime copying multiprocess bench cli",
    "kvraw.__main__": "cli",
}
# Rooms that may use the package as its users do.
USERS = ("kvraw.bench", "kvraw.cli", "kvraw.adapters")
# Imported on first use of the CPU engine only.
NUMBA = (
    "kvraw.copying.cpu_kernels",
    "kvraw.copying.cpu_floats",
    "kvraw.copying.descriptors_numba",
    "kvraw.copying.given_numba",
    "kvraw.codec.cpu_kernels",
    "kvraw.codec.quantize_kernels",
    "kvraw.rope.cpu_kernels",
    "kvraw.runtime.jit",
    "kvraw.runtime.jit_cache",
    "kvraw.runtime.program_numba",
)
# Who may import these; everybody else may not.
ONLY_FOR = {
    "kvraw.cli": ("kvraw.cli", "kvraw.__main__"),
    "kvraw.bench": ("kvraw.bench", "kvraw.cli"),
    "kvraw.adapters": ("kvraw.adapters", "kvraw.bench", "kvraw.cli.engines", "kvraw.transformers"),
    "kvraw.multiprocess": ("kvraw.multiprocess", "kvraw.cli"),
    "zmq": ("kvraw.multiprocess",),
    "msgspec": ("kvraw.multiprocess",),
    "prometheus_client": ("kvraw.multiprocess",),
    "cuda": ("kvraw.runtime.driver",),
    "numba": NUMBA,
    "llvmlite": NUMBA,
    "torch": ("kvraw.bench.matmul", "kvraw.adapters"),
    "lmcache": ("kvraw.adapters.lmcache_plugin", "kvraw.adapters.trials"),
    "sglang": ("kvraw.adapters.trials",),
    "vllm": ("kvraw.adapters.vllm_offload", "kvraw.adapters.trials"),
    "matplotlib": ("kvraw.bench.plot",),
    "rich": ("kvraw.cli",),
}


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def imports_of(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Every module that a source imports, inside functions too; for `from a import b` both `a` and `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                home = parts[: len(parts) - node.level + is_package]
                base = ".".join([*home, *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            # `from kvraw import config` is about kvraw.config, not about all of kvraw
            yield from names if base == "kvraw" else (base, *names)


def broken(module: str, imported: str) -> str | None:
    """What an import violates."""
    room = max((r for r in ALLOWED if within(module, r)), key=len, default=None)
    if room is not None and within(imported, "kvraw"):
        allowed = [f"kvraw.{name}" for name in ALLOWED[room].split()]
        if not any(within(imported, name) for name in allowed) and not (imported == "kvraw" and room in USERS):
            return f"{module} imports {imported}; {room} may import {', '.join(allowed) or 'nothing'} of kvraw"
    for target, users in ONLY_FOR.items():
        if within(imported, target) and not any(within(module, user) for user in users):
            return f"{module} imports {imported}; only {', '.join(users) or 'discard'} may"
    return None


@pytest.mark.parametrize("module", MODULES)
def test_arrows(module: str) -> None:
    path = MODULES[module]
    imported = set(imports_of(path.read_text(), module, path.name == "__init__.py"))
    assert [fault for name in sorted(imported) if (fault := broken(module, name))] == []


def test_rooms_exist() -> None:
    assert set(ALLOWED) <= set(MODULES)


def test_each_module_is_in_a_room() -> None:
    assert [m for m in MODULES if m != "kvraw" and not any(within(m, room) for room in ALLOWED)] == []


def needed_by(source: str, module: str, is_package: bool) -> set[str]:
    """The modules of kvraw that a module needs to run: those that types alone name do not count."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    found = set(imports_of(ast.unparse(tree), module, is_package)) & set(MODULES)
    # `from package import module` needs the module, and the package not more than everybody below it does.
    return {name for name in found if not any(within(other, name) and other != name for other in (*found, module))}


def circle(needs: dict[str, set[str]]) -> list[str]:
    """Modules that need each other, in order; empty where there are none."""
    over: set[str] = set()

    def walk(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module not in over:
            for other in sorted(needs.get(module, ())):
                if found := walk(other, [*way, module]):
                    return found
            over.add(module)
        return []

    return next((found for module in sorted(needs) if (found := walk(module, []))), [])


def test_no_import_circles() -> None:
    assert circle({m: needed_by(p.read_text(), m, p.name == "__init__.py") for m, p in MODULES.items()}) == []


def test_a_circle_is_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    source = "if TYPE_CHECKING:\n    import kvraw.copying.plan\ndef f():\n    import kvraw.cache"
    assert needed_by(source, "kvraw.layouts.geometry", False) == {"kvraw.cache"}


def test_one_module_knows_the_bindings() -> None:
    assert [name for name, path in MODULES.items() if "cuda.bindings" in path.read_text()] == ["kvraw.runtime.driver"]


def test_locks_let_their_own_thread_in_again() -> None:
    # A finalizer runs between any two instructions, also of a block that holds a lock, and gives back what needs it.
    assert [name for name, path in MODULES.items() if "threading.Lock()" in path.read_text()] == []


def test_only_the_package_imports_by_name() -> None:
    dynamic = [
        name for name, path in MODULES.items() if any(w in path.read_text() for w in ("import_module", "__import__"))
    ]
    assert dynamic == [
        "kvraw",
        "kvraw.adapters.lmcache_multiprocess",
        "kvraw.bench.beside.peers",
    ]  # which imports others' modules, if they are there


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvraw.runtime.host.pool", "def f():\n    from kvraw.copying import cpu"),
        ("kvraw.runtime.host.pool", "from ...copying.plan import Side"),
        ("kvraw.runtime.host.pool", "import kvraw"),
        ("kvraw.errors", "from kvraw import config"),
        ("kvraw.layouts.geometry", "from kvraw.runtime.driver import driver"),
        ("kvraw.copying.cpu", "if True:\n    import kvraw.transfer"),
        ("kvraw.codec.gpu", "from kvraw.layouts.geometry import CacheLayout"),
        ("kvraw.codec.cpu", "import numba"),
        ("kvraw.rope.rotate", "from kvraw.codec import cpu"),
        ("kvraw.copying.launch", "from kvraw.codec.args import CODEC"),
        ("kvraw.transfer", "import torch.cuda"),
        ("kvraw.cache", "from kvraw.copying import cpu"),
        ("kvraw.prepared", "import kvraw.host_kv_pool"),
        ("kvraw.transfer", "import kvraw.adapters.vllm"),
        ("kvraw.transfer", "from kvraw import cli"),
        ("kvraw.transfer", "def f():\n    from cuda.bindings import driver"),
    ],
)
def test_a_broken_arrow_is_seen(module: str, source: str) -> None:
    assert any(broken(module, name) for name in imports_of(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvraw.runtime.host.pool", "from . import driver\nfrom kvraw.errors import ClosedError\nimport os"),
        ("kvraw.copying.cpu", "from kvraw import config\nfrom kvraw.copying import operands"),
        ("kvraw.adapters.vllm", "from kvraw.adapters import common\nimport kvraw.transfer"),
    ],
)
def test_a_kept_arrow_is_left_alone(module: str, source: str) -> None:
    assert not any(broken(module, name) for name in imports_of(source, module))


def without_docstrings(path: Path) -> int:
    """Lines of a file, but for docstrings in Python."""
    text = path.read_text()
    lines = text.count("\n")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            if documented and ast.get_docstring(node, clean=False) is not None:
                first = node.body[0]
                lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def test_files_are_short() -> None:
    lines = {
        str(path.relative_to(ROOT)): without_docstrings(path)
        for room in ("kvraw", "tests")
        for path in (ROOT / room).rglob("*")
        if path.is_file() and path.suffix != ".ptx" and path.name != "manifest.json" and "__pycache__" not in path.parts
    }
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}
