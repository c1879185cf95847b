"""LMCache's server of its multiprocess mode, and workers of it with kvraw's and with LMCache's own copies."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.environments import Environment
from tests.engines.test_lmcache import CLI, free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
WORKER = Path(__file__).with_name("lmcache_server.py")


@contextlib.contextmanager
def server(environment: Environment, log: Path, *options: str) -> Iterator[str]:
    """Run it; its address."""
    port, http = free_port(), free_port()
    sizes = ["--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven"]
    ports = ["--port", str(port), "--http-port", str(http)]
    command = [str(environment.python), *CLI, "server", *sizes, *ports, *options]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=environment.folder, env=environment.environ(), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        for _ in range(240):
            assert process.poll() is None, log.read_text()[-4000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://localhost:{http}/", timeout=5).close()
                break
            time.sleep(0.5)
        yield f"tcp://localhost:{port}"
    finally:
        process.terminate()
        process.wait(120)


def work(environment: Environment, address: str, *how: str) -> dict[str, Any]:
    """Run a worker, which compares all bytes itself; its messages and its calls."""
    text = environment.run(str(WORKER), address, *how, KVRAW_DISABLE="lmcache")
    line = next(line for line in text.splitlines() if line.startswith("RESULT "))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("first", ["kvraw", "own"])
def test_worker(lmcache: Environment, tmp_path: Path, shared: bool, first: str) -> None:
    """What one stores the other retrieves, and the messages are the same."""
    name = f"lmcache_l1_pool_{os.getpid()}_{first}"
    options = ["--no-l1-use-lazy", "--shm-name", name] if shared else []
    order = [first, "own" if first == "kvraw" else "kvraw"]
    with server(lmcache, tmp_path / "server.txt", *options) as address:
        results = {how: work(lmcache, address, how) for how in order}
    with server(lmcache, tmp_path / "server.txt", *options) as address:  # with nothing in it: the store's messages
        alone = work(lmcache, address, order[1])
    calls = results["kvraw"]["calls"]
    kinds = len(results["kvraw"]["runs"])
    assert calls.get("gather_paged_kv_to_cpu", 0) >= (kinds if first == "kvraw" or not shared else 0)
    assert calls["compute_kv_layout"] == kinds
    assert calls["scatter_cpu_to_paged_kv"] == 2 * kinds
    assert calls.get("bytes_of", 0) >= (6 * kinds if shared else 0)
    assert results["own"]["calls"] == {}
    for kind, run in results[first]["runs"].items():
        assert run["way"] == ("EngineDrivenContextShm" if shared else "EngineDrivenContextPickle")
        assert run["messages"] == alone["runs"][kind]["messages"]
