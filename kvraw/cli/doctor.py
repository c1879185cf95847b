"""`kvraw doctor`: what can run on this machine, what stands in the way, and what to change.

It starts the driver but makes no context on any device, and allocates nothing there.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

import kvraw
from kvraw import config
from kvraw.cli.host_memory import host_memory, host_memory_row
from kvraw.cli.limits import file_text, memory_limits
from kvraw.copying import cpu
from kvraw.errors import ArtifactError, DriverError, DriverNotFoundError, KvrawError, UnsupportedDriverError
from kvraw.ptx.loader import manifest, read_ptx
from kvraw.runtime.cgroup import usable_cores
from kvraw.runtime.driver import CudaDriver, driver
from kvraw.runtime.host.backing import device_node
from kvraw.runtime.module import no_compiler
from kvraw.runtime.startup import hiding_file, kind_of, loaded_libcuda

__all__ = ["examine", "rows"]

Report = dict[str, Any]

_TESTS_VARIABLES = {"KVRAW_REQUIRE_GPU", "KVRAW_TEST_DEVICE"}  # no setting of the library


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class _Findings:
    """Problems and hints, each with what to change."""

    def __init__(self) -> None:
        self.problems: list[dict[str, str]] = []
        self.hints: list[dict[str, str]] = []

    def broken(self, what: object, change: str) -> None:
        self.problems.append({"what": str(what), "change": change})

    def better(self, what: object, change: str) -> None:
        self.hints.append({"what": str(what), "change": change})


def _variables(environ: Mapping[str, str], found: _Findings) -> dict[str, str]:
    known = {variable.name: variable for variable in config.VARIABLES}
    out = {name: value for name, value in sorted(environ.items()) if name.startswith("KVRAW_")}
    for name in out:
        if name in known:
            try:
                known[name].get(environ)
            except ValueError as error:
                found.broken(error, f"unset {name} or correct it: {known[name].help}")
        elif name not in _TESTS_VARIABLES:
            found.better(f"{name} is set, which kvraw does not know", f"kvraw knows {', '.join(known)}")
    return out


def _ptx(found: _Findings) -> dict[str, Report]:
    """Every artifact of the manifest, read and checked."""
    try:
        entries = manifest()
    except ArtifactError as error:
        found.broken(error, "reinstall kvraw")
        return {}
    out: dict[str, Report] = {}
    for name, entry in sorted(entries.items()):
        out[name] = {"version": entry["version"], "target": entry["target"], "error": None}
        try:
            read_ptx(name)
        except ArtifactError as error:
            out[name]["error"] = str(error)
            found.broken(error, "reinstall kvraw")
    return out


def _no_compiler(d: CudaDriver) -> str | None:
    """Why this driver compiles no PTX, as far as that shows without a context; None: nothing speaks against it."""
    codes = []
    try:
        d.library_unload(d.library_load(read_ptx("copy_v16.ptx")))
    except DriverError as error:
        codes.append(error)
    except ArtifactError:
        pass
    if os.environ.get("CUDA_DISABLE_PTX_JIT", "0") not in ("", "0"):
        codes.append(DriverError("CUDA_ERROR_JIT_COMPILATION_DISABLED", 223, "cuLibraryLoadData"))
    elif loaded_libcuda():
        try:
            ctypes.CDLL("libnvidia-ptxjitcompiler.so.1")
        except OSError:
            codes.append(DriverError("CUDA_ERROR_JIT_COMPILER_NOT_FOUND", 221, "cuLibraryLoadData"))
    return next((text for error in codes if (text := no_compiler(error))), None)


def _gpu(ptx: dict[str, Report], found: _Findings) -> Report:
    """Driver, devices, the batch call, and why the kernel engine cannot run (None: it can)."""
    bindings = _version("cuda-bindings") or _version("cuda-python")
    module = re.search(r"\d{3}\.\d+(\.\d+)?", file_text("/proc/driver/nvidia/version") or "")
    loaded = module.group() if module else None
    out: Report = {
        "cuda_python": {"version": bindings, "error": None},
        "driver": {"cuda": None, "kernel_module": loaded, "libcuda": None, "error": None},
        "devices": [],
        "batch_memcpy": {"supported": False, "reason": "no driver"},
    }
    try:
        d = driver()
        cuda = d.version()
    except KvrawError as error:
        why = out["driver"]["error"] = str(error)
        out["driver"]["libcuda"] = loaded_libcuda()
        if (hidden := hiding_file()) is not None:
            found.broken(why, f"rename {hidden}, or start Python elsewhere")
        elif isinstance(error.__cause__, ImportError):
            out["cuda_python"]["error"] = why
            if loaded:
                found.broken(why, "pip install 'cuda-python>=12.8,<14'")
        elif isinstance(error, UnsupportedDriverError):
            found.broken(why, "install driver R525 or newer")
        elif not isinstance(error, DriverNotFoundError) or ("cuInit" in why and "CUDA_ERROR_NO_DEVICE" not in why):
            found.broken(why, "look at nvidia-smi and dmesg; reboot where the driver was just updated")
        elif loaded:
            found.better(
                f"the kernel has NVIDIA module {loaded}, but this process sees no GPU",
                "in a container, start it with the GPUs (--gpus all); see CUDA_VISIBLE_DEVICES",
            )
        return out | {"why_not": why}
    out["driver"]["cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
    libcuda = out["driver"]["libcuda"] = loaded_libcuda()
    if (kind := kind_of(libcuda)) is not None:
        found.better(f"the driver's library is a {kind} library, {libcuda}", "see LD_LIBRARY_PATH if that is not meant")
    batch = d.batch_supported()
    reason = "cuMemcpyBatchAsync is there" if batch else f"needs CUDA 12.8, the driver has {out['driver']['cuda']}"
    out["batch_memcpy"] = {"supported": batch, "reason": reason}
    why_not = "kvraw/ptx has no sound artifact" if all(a["error"] for a in ptx.values()) else _no_compiler(d)
    if why_not and "compiles no kernels" in why_not:
        found.broken(f"{why_not}; copies go by the copy engine alone, more slowly", why_not.rpartition("; ")[2])
    for number in range(d.device_count()):
        major, minor, count, engines, maps = (
            d.device_attribute(number, name)
            for name in (
                "COMPUTE_CAPABILITY_MAJOR",
                "COMPUTE_CAPABILITY_MINOR",
                "MULTIPROCESSOR_COUNT",
                "ASYNC_ENGINE_COUNT",
                "CAN_MAP_HOST_MEMORY",
            )
        )
        fits = [k for k, a in ptx.items() if int(a["target"][3:]) <= major * 10 + minor and a["error"] is None]
        device = {
            "device": number,
            "name": d.device_name(number),
            "compute_capability": f"{major}.{minor}",
            "multiprocessors": count,
            "memory_bytes": d.device_memory(number),
            "async_engines": engines,
            "maps_host_memory": bool(maps),
            "numa_node": device_node(number),
            "ptx": fits,
        }
        out["devices"].append(device)
    if not why_not and not any(x["ptx"] and x["maps_host_memory"] for x in out["devices"]):
        why_not = "no device takes the PTX (7.5 or newer) and maps host memory"
    return out | {"why_not": why_not}


def _cpu(found: _Findings) -> Report:
    """The CPU engine, tried out."""
    out: Report = {"usable_cores": usable_cores(), "threads": None, "why_not": None}
    jit: Report = {"version": _version("numba"), "llvmlite": _version("llvmlite"), "cache": None, "compiled": False}
    begin = time.perf_counter()
    try:
        out["threads"] = cpu.threads()
        kvraw.warm_up()
        from kvraw.runtime import jit as compiler
        from kvraw.runtime import jit_cache

        jit["compiled"], jit["cache"] = compiler.COMPILED, jit_cache.kept_in()
    except ValueError as error:  # a variable, which is among the problems already
        out["why_not"] = str(error)
    except Exception as error:  # numba and llvmlite fail in many ways where versions do not fit together
        out["why_not"] = f"numba fails: {type(error).__name__}: {error}"
        change = "install numba 0.59 or newer, and the numpy that it asks for"
        found.broken(out["why_not"], f"make {error.filename} usable" if isinstance(error, OSError) else change)
    else:
        if not jit["compiled"]:
            found.better("NUMBA_DISABLE_JIT is set: the CPU's kernels run as Python, very slowly", "unset it")
        elif jit["cache"] is None:
            found.better("numba has no place for compiled kernels", "set NUMBA_CACHE_DIR to a directory to write to")
        elif jit_cache.unsaved:
            found.better(
                f"compiled kernels cannot be kept in {jit['cache']}: {jit_cache.unsaved[0]}",
                "make room there, or set NUMBA_CACHE_DIR to another directory",
            )
            jit["cache"] = None
    return {"cpu": out, "numba": jit | {"seconds": round(time.perf_counter() - begin, 3)}}


def examine() -> Report:
    """Look at the machine; ``ok`` says that an engine can run and nothing is broken."""
    found = _Findings()
    variables = _variables(os.environ, found)
    ptx = _ptx(found)
    gpu, host = _gpu(ptx, found), _cpu(found)
    engines = {"kernel": gpu.pop("why_not"), "cpu": host["cpu"].pop("why_not"), "reference": None}
    if engines.get(variables.get(config.ENGINE.name, "")):
        name = variables[config.ENGINE.name]
        found.broken(f"{config.ENGINE.name} is {name}, but that engine cannot run", f"unset {config.ENGINE.name}")
    try:
        obtained = host_memory()
    except ValueError as error:  # a variable, which is among the problems already
        obtained = {"error": str(error)}
    memory = memory_limits()
    if memory["transparent_huge_pages"] == "never":
        found.better("transparent huge pages are off: pinning takes about three times as long", "set them to madvise")
    return {
        "ok": not found.problems and None in engines.values(),
        "kvraw": kvraw.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "numpy": np.__version__,
        **gpu,
        "ptx": ptx,
        "engines": {name: {"runs": why is None, "why_not": why} for name, why in engines.items()},
        **host,
        "memory": memory,
        "host_memory": obtained,
        "variables": variables,
        "problems": found.problems,
        "hints": found.hints,
    }


def _size(nbytes: int | None, none: str = "unlimited") -> str:
    if nbytes is None:
        return none
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"


def rows(report: Report) -> list[tuple[str, str]]:
    """The report as text."""
    r, gpu, memory, jit, host = report, report["driver"], report["memory"], report["numba"], report["cpu"]
    module = f", kernel module {gpu['kernel_module']}" if gpu["kernel_module"] else ""
    library = f", {gpu['libcuda']}" if gpu["libcuda"] else ""
    out = [
        ("kvraw", f"{r['kvraw']}, Python {r['python']}, numpy {r['numpy']}, {r['platform']}"),
        ("cuda-python", r["cuda_python"]["error"] or r["cuda_python"]["version"] or "not installed"),
        ("driver", f"none: {gpu['error']}" if gpu["error"] else f"CUDA {gpu['cuda']}{module}{library}"),
    ]
    for x in r["devices"]:
        maps = "maps host memory" if x["maps_host_memory"] else "cannot map host memory"
        node = "NUMA node unknown" if x["numa_node"] is None else f"NUMA node {x['numa_node']}"
        text = f"{x['name']}, compute {x['compute_capability']}, {x['multiprocessors']} SMs, {_size(x['memory_bytes'])}"
        text += f", {x['async_engines']} copy engines, {maps}, {node}"
        text += f", takes {len(x['ptx'])} of {len(r['ptx'])} PTX artifacts"
        out.append((f"GPU {x['device']}", text))
    kinds = sorted({f".version {x['version']} .target {x['target']}" for x in r["ptx"].values()})
    sound = sum(not x["error"] for x in r["ptx"].values())
    names = " ".join(name.removesuffix(".ptx") for name in r["ptx"])
    batch, kept = r["batch_memcpy"], f"cached in {jit['cache']}" if jit["cache"] else "not cached on disk"
    compiled = f"kernels ready in {jit['seconds']:.1f} s, {kept}" if r["engines"]["cpu"]["runs"] else "not tried"
    out += [
        ("PTX", f"{names}: {', '.join(kinds)}; {sound} of {len(r['ptx'])} as the manifest's sha256 says"),
        ("batch memcpy", f"{'yes' if batch['supported'] else 'no'}: {batch['reason']}"),
        *[(f"engine {k}", "can run" if v["runs"] else f"cannot run: {v['why_not']}") for k, v in r["engines"].items()],
        ("CPU", f"{host['usable_cores']} usable cores, the CPU engine takes {host['threads'] or 'no'} thread(s)"),
        ("numba", f"{jit['version']}, {compiled}"),
    ]
    lock = f"soft {_size(memory['memlock_soft_bytes'])}, hard {_size(memory['memlock_hard_bytes'])}"
    pages = ", ".join(f"{k} {v['free']} free of {v['total']}" for k, v in memory["huge_pages"].items()) or "none"
    shm = f"{_size(memory['shm_free_bytes'], 'not there')} free of {_size(memory['shm_total_bytes'], 'none')}"
    total = f"{_size(memory['available_bytes'])} available of {_size(memory['total_bytes'])}"
    out += [
        ("memory", f"{total}, control group limit {_size(memory['cgroup_limit_bytes'], 'none')}"),
        ("locked memory", f"RLIMIT_MEMLOCK {lock}"),
        ("huge pages", f"transparent: {memory['transparent_huge_pages'] or 'not there'}; explicit: {pages}"),
        ("/dev/shm", shm),
        ("host memory", host_memory_row(r["host_memory"])),
        ("variables", ", ".join(f"{k}={v}" for k, v in r["variables"].items()) or "no KVRAW_ variable is set"),
        *[("PROBLEM", f"{x['what']}; to change: {x['change']}") for x in r["problems"]],
        *[("hint", f"{x['what']}; to change: {x['change']}") for x in r["hints"]],
    ]
    able = ", ".join(name for name, x in r["engines"].items() if x["runs"])
    broken = f"{len(r['problems'])} problem(s), see above" if r["problems"] else "nothing is broken"
    return [*out, ("result", f"{able} can run; {broken}")]
