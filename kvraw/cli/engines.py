"""`kvraw doctor --engines`: which engines are installed, whether and how kvraw serves them, and a try of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

from kvraw import __version__
from kvraw.adapters.engines import ENGINES, Engine, version_of, why_not

__all__ = ["examine", "rows"]

Report = dict[str, Any]
_SECONDS = 300  # engines take their time to be imported
# As an engine's own process: the current folder is none of its places.
_TRIAL = "import sys; sys.path[:] = filter(None, sys.path); from kvraw.adapters.trials import main; main(sys.argv[1])"


def _entered(engine: Engine) -> bool:
    """Whether the engine's plugin manager finds kvraw."""
    return any(found.value == engine.entry for found in entry_points(group=engine.group))


def _try(name: str) -> Report:
    """The trial of an engine, in a process of its own."""
    command = [sys.executable, "-c", _TRIAL, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=os.environ)
        report: Report = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"called": None, "equal": False, "error": f"not done in {_SECONDS} s"}
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
        return {"called": None, "equal": False, "error": f"the process ended with {done.returncode}: {last}"}
    return report


def _one(engine: Engine) -> Report:
    version = version_of(engine)
    report: Report = {"version": version or None, "known": engine.known, "served": False, "why_not": None}
    report |= {"serves": engine.serves, "leaves": engine.leaves, "entry_point": _entered(engine), "trial": None}
    if not version:
        return report | {"why_not": "it is not installed"}
    reason = why_not(engine)
    if not reason and not report["entry_point"]:
        reason = f"its plugin manager does not find kvraw in {engine.group}: kvraw is not installed as a package"
    if reason:
        return report | {"why_not": reason}
    trial = _try(engine.name)
    called = trial["called"] or ""
    if trial["error"]:
        reason = f"the try failed: {trial['error']}"
    elif not called.startswith("kvraw."):
        reason = f"the engine called its own {called}"
    elif not trial["equal"]:
        reason = f"bytes that {called} moved did not arrive"
    return report | {"trial": trial, "served": not reason, "why_not": reason or None}


def examine() -> Report:
    """Look for the engines and try them; ``ok`` says that those that kvraw ought to serve are served."""
    found = {name: _one(engine) for name, engine in ENGINES.items()}
    failed = [one for one in found.values() if not one["served"] and (one["trial"] or not one["entry_point"])]
    return {"ok": not any(one["version"] for one in failed), "kvraw": __version__, "served_engines": found}


def rows(report: Report) -> list[tuple[str, str]]:
    """The report as text."""
    out = [("kvraw", report["kvraw"])]
    for name, one in report["served_engines"].items():
        if not one["version"]:
            out.append((name, f"not installed; kvraw serves {one['known']}"))
        elif one["served"]:
            out.append((f"{name} {one['version']}", f"served: {one['serves']}"))
            out.append(("", f"its own: {one['leaves']}"))
            out.append(("", f"tried: it called {one['trial']['called']}, all bytes arrived"))
        else:
            out.append((f"{name} {one['version']}", f"not served: {one['why_not']}"))
    return out
