"""LMCache's published package on the CPU, with kvraw by its entry point and nothing else."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.engines.environments import SUITE, Environment, outcome

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

CLI = ("-m", "lmcache.cli.main")
SHAPE = "(2,64,16,2,64):float16:4"
MODES = ("engine_driven", "lmcache_driven")
# Its own tests of what kvraw serves: operations and devices, then transfers between processes.
OPERATIONS = (
    "test_torch_ops.py test_cuda_ops_parity.py test_mem_kernels.py test_fused_rerope.py "
    "test_kv_layer_groups_manager.py test_staging_buffer.py test_gpu_connector.py gpu_connector platform "
    "test_blocks_first_group_construction.py "
    "test_memory_management.py distributed/memory_manager distributed/test_l1_memory_manager.py"
)
PROCESSES = (
    "test_engine_driven_transfer.py test_engine_driven_device_dispatch.py test_engine_driven_async_copy_lifetime.py "
    "test_async_engine_driven_transfer_context.py test_posix_shm.py test_completion_recorder.py "
    "test_direct_transfer_dispatch.py test_skip_first_n_tokens.py test_batched_iteration_with_skip.py "
    "test_lmcache_driven_layout_registry.py test_lmcache_driven_transfer_skip.py test_blend_retrieve.py "
    "test_blend_rope.py test_blend_store.py test_cache_server.py test_event_ipc_handle_path.py "
    "test_l1_owner_completion.py test_qstore.py"
)


def free_port() -> int:
    with closing(socket.socket()) as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


@contextmanager
def server(environment: Environment, mode: str, disk: Path) -> Iterator[tuple[int, int]]:
    """Run its server, which keeps what it holds on a disk; its ports."""
    port, http = free_port(), free_port()
    adapter = json.dumps({"type": "fs", "base_path": str(disk)})
    sizes = ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--l2-adapter", adapter]
    ports = ["--port", str(port), "--http-port", str(http), "--supported-transfer-mode", mode]
    command = [str(environment.python), *CLI, "server", *sizes, *ports]
    with (disk.parent / "server.txt").open("w") as log:
        process = subprocess.Popen(
            command, cwd=environment.folder, env=environment.environ(), stdout=log, stderr=subprocess.STDOUT
        )
    try:
        for _ in range(240):
            if process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"http://localhost:{http}/", timeout=5).close()
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.5)
            else:
                break
        assert process.poll() is None, (disk.parent / "server.txt").read_text()[-4000:]
        yield port, http
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def drive(environment: Environment, mode: str, ports: tuple[int, int]) -> str:
    """Run its driver: a worker that stores, loads and compares checksums of what it loaded."""
    where = ["--rpc-url", f"tcp://localhost:{ports[0]}", "--url", f"http://localhost:{ports[1]}"]
    what = ["--num-tokens", "512", "--kvcache-shape-spec", SHAPE, "--num-blocks", "64", "--end", "2"]
    return environment.run(
        *CLI, "bench", "server", "--mode", "cpu", "--transfer-mode", mode, *where, *what, "--interval", "0.1"
    )


def loaded(text: str) -> list[str]:
    """The checksums of what was loaded."""
    return re.findall(r"/warm\] CHECKSUM: (\w+)", text)


@pytest.mark.parametrize("mode", MODES)
def test_store_restart_and_load(lmcache: Environment, mode: str, tmp_path: Path) -> None:
    """What a server stored, another one that was started anew gives to a worker, by kvraw's operations in both."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with server(lmcache, mode, disk) as ports:
        stored = drive(lmcache, mode, ports)
    first = lmcache.counted
    assert re.search(r"Checksum OK: +2\b", stored), stored[-3000:]
    assert stored.count("kvraw serves lmcache") == 1
    with server(lmcache, mode, disk) as ports:
        again = drive(lmcache, mode, ports)
    assert again.count("/cold] RETRIEVE: retrieved") == 2, again[-3000:]
    assert len(loaded(stored)) == 2
    assert loaded(again) == loaded(stored)
    for calls in (first, lmcache.counted):
        assert calls["kvraw.adapters.lmcache.multi_layer_block_kv_transfer"] >= 4, calls


def failures(environment: Environment, folder: str, names: str, **environ: str) -> set[str]:
    """What of its own tests does not pass."""
    sources = environment.sources
    if (sources / "lmcache").exists():  # the installed one is meant
        (sources / "lmcache").rename(sources / "lmcache_of_the_sources")
    paths = [f"tests/v1/{folder}{name}" for name in names.split()]
    environ |= {"PYTHONPATH": str(sources)}
    done = environment.tried(*SUITE, *paths, "--timeout", "180", cwd=sources, timeout=1500, **environ)
    passed, failed = outcome(done.stdout)
    assert passed > 100, done.stdout[-4000:]
    print(f"{environment.packages.engine}: {passed} passed, {len(failed)} failed, {environ}")
    return failed


@pytest.mark.parametrize(("folder", "names"), [("", OPERATIONS), ("multiprocess/", PROCESSES)])
def test_its_own_tests(lmcache: Environment, folder: str, names: str) -> None:
    """None fails that does not fail without kvraw."""
    ours = failures(lmcache, folder, names)
    assert sum(lmcache.counted.values()) > 20  # most of them call its fallback by name
    assert ours - failures(lmcache, folder, names, KVRAW_DISABLE="lmcache") == set()
    assert sum(lmcache.counted.values()) == 0


def test_disabled(lmcache: Environment) -> None:
    code = "import lmcache; print(lmcache.device_ops.batched_memcpy.__module__)"
    assert lmcache.run("-c", code).splitlines()[-1].startswith("kvraw.")
    assert lmcache.run("-c", code, KVRAW_DISABLE="lmcache").splitlines()[-1].startswith("lmcache.")


def test_doctor(lmcache: Environment) -> None:
    text = lmcache.run("-m", "kvraw", "doctor", "--engines")
    assert "tried: it called kvraw.adapters.lmcache" in text, text
