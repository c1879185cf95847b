"""Prints, as JSON, what an engine's published package has and calls of what kvraw serves, read from its sources."""

from __future__ import annotations

import ast
import json
import sys
from importlib.metadata import distribution
from pathlib import Path

# The modules whose functions and methods become kvraw's.
MODULES = {
    "lmcache": ("lmcache/v1/platform/base/device_ops.py", "lmcache/v1/platform/base/pin_memory.py"),
    "sglang": ("sglang/kernels/ops/kvcache/hicache.py",),
    "vllm": (
        "vllm/_custom_ops.py",
        "vllm/v1/kv_offload/cpu/swap_blocks_triton.py",
        "vllm/v1/simple_kv_offload/cuda_mem_ops.py",
    ),
}
# What its other modules reach them by, as the last name ahead of the dot; or take them from.
CALLERS = {"lmcache": ("lmcache", "device_ops"), "sglang": ("sglang/srt", ""), "vllm": ("vllm/v1", "ops")}
TAKEN_FROM = {"sglang": ("sgl_kernel.kvcacheio",)}


def functions(body: list[ast.stmt]) -> dict[str, list[str]]:
    """Public functions and methods, by their own names, with their parameters."""
    found: dict[str, list[str]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found |= functions(node.body)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            a = node.args
            found[node.name] = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.arg not in ("self", "cls")]
    return found


def calls(tree: ast.AST, base: str) -> dict[str, list[str]]:
    """Calls of a module's names with the keywords that they are given."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            home = node.func.value
            if getattr(home, "id", getattr(home, "attr", None)) == base:
                found.setdefault(node.func.attr, []).extend(k.arg for k in node.keywords if k.arg)
    return found


def main(engine: str) -> None:
    home = Path(str(distribution(engine).locate_file("")))
    has = {path: functions(ast.parse((home / path).read_text()).body) for path in MODULES[engine]}
    called: dict[str, set[str]] = {}
    taken: set[str] = set()
    root, base = CALLERS[engine]
    for path in (home / root).rglob("*.py"):
        text = path.read_text()
        if base and f"{base}." in text:
            for name, words in calls(ast.parse(text), base).items():
                called.setdefault(name, set()).update(words)
        for module in TAKEN_FROM.get(engine, ()):
            for node in ast.walk(ast.parse(text)) if module in text else ():
                if isinstance(node, ast.ImportFrom) and node.module == module:
                    taken |= {alias.name for alias in node.names}
    json.dump({"has": has, "called": {k: sorted(v) for k, v in called.items()}, "taken": sorted(taken)}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
