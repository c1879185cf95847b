"""Workers that store, retrieve and are killed beside one cache server: ``python -m tests.fuzz.serve [--seconds 10]``.

Every chunk's bytes follow from its key, so each worker knows what it must find. Workers are killed at any moment, once
the server too; nothing wrong may be read, no lock may outlive its limit, and nothing may be left in /dev/shm.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np

import kvraw
from kvraw.multiprocess import EngineWorker, ServerError, ServerTimeoutError
from tests.helpers.serving import BLOCK, BLOCKS, CHUNK, TOKENS, HostCache, Server, key, stats, until

PROMPTS, LONGEST, PER = 60, 6, TOKENS // BLOCK
LIVENESS = 1.0


def content(cache: HostCache, prompt: int, chunks: int, ids: list[int]) -> None:
    """Write what the chunks of a prompt are into blocks."""
    for at in range(chunks):
        rng = np.random.default_rng((prompt, at))
        for layer in cache.layers:
            part = layer[:, ids[at * PER : (at + 1) * PER]]
            layer[:, ids[at * PER : (at + 1) * PER]] = rng.integers(-(1 << 15), 1 << 15, part.shape, np.int16)


def work(endpoint: str, seed: int, out: int) -> None:
    """Store and retrieve until SIGTERM; then the counts."""
    r, counts = Random(seed), Counter[str]()
    ended: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    cache, expected = HostCache(seed), HostCache(seed)
    connected: EngineWorker | None = None
    while not ended:
        try:
            if connected is None:
                connected = EngineWorker.connect(
                    cache.cache,
                    endpoint,
                    chunk_tokens=TOKENS,
                    timeout=1.0,
                    use_messages=seed % 4 == 3,
                    engine="reference",
                )
            prompt, chunks = r.randrange(PROMPTS), r.randint(1, LONGEST)
            ids = r.sample(range(BLOCKS), chunks * PER)
            what, background = key(prompt + 1, chunks), r.random() < 0.3
            asked = what
            if r.random() < 0.4:
                content(cache, prompt, chunks, ids)
                if background:
                    future = connected.submit_store(what, ids)
                    connected.flush_inflight_stores(20)
                    stored = future.result()
                else:
                    stored = connected.store(what, ids)
                counts["stored"] += stored.stored
                counts["refused"] += stored.refused
            else:
                chunks = connected.context.prefetch(what) // TOKENS if r.random() < 0.7 else chunks
                what, ids = key(prompt + 1, chunks), ids[: chunks * PER]
                if background:
                    found = (
                        connected.submit_retrieve(what, ids).result(20)
                        if r.random() < 0.5
                        else connected.retrieve(what, ids)
                    )
                else:
                    found = connected.retrieve(what, ids)
                if found:
                    content(expected, prompt, chunks, ids)
                    if cache.blocks(ids) != expected.blocks(ids):
                        raise AssertionError(f"wrong bytes: prompt {prompt}, {chunks} chunks, {ids}")
                counts["retrieved"] += found // TOKENS
                counts["missed"] += not found
                connected.context.free_lookup_locks(asked)
        except (ServerError, ServerTimeoutError) as error:
            counts[error.code if isinstance(error, ServerError) else "timeout"] += 1
            if connected is not None and not (isinstance(error, ServerError) and error.code == "expired"):
                connected.close()
                connected = None
    if connected is not None:
        connected.close()
    os.write(out, (json.dumps(counts) + "\n").encode())


def start(endpoint: str, seed: int, out: int) -> int:
    """A worker in a process of its own; its number."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until the child has its handler
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        return pid
    status = 1
    try:
        work(endpoint, seed, out)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def run(seconds: float, workers: int = 8, seed: int = 0, kill_server: bool = True) -> dict[str, float]:
    """What became of it; raises where something was wrong."""
    r, total = Random(seed), Counter[str]()
    read, write = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        options = ("--liveness", str(LIVENESS), "--read-limit", "5", "--write-limit", "5", f"--disk={folder}/disk")
        server = Server(Path(folder), *options, mib=1)
        living = {start(server.endpoint, at, write): at for at in range(workers)}
        begin = time.monotonic()
        killed_server = not kill_server
        try:
            while time.monotonic() - begin < seconds:
                time.sleep(r.uniform(0.05, 0.4))
                pid = r.choice(list(living))
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                if not os.WIFSIGNALED(status):
                    raise AssertionError(f"a worker ended by itself with {status}")
                at = living.pop(pid)
                total["killed"] += 1
                living[start(server.endpoint, at + workers * total["killed"] * 4, write)] = at
                if not killed_server and time.monotonic() - begin > seconds / 2:
                    killed_server = True
                    server.end(signal.SIGKILL)
                    total["servers killed"] += 1
                    server = Server(Path(folder), *options, mib=1)
            for pid in living:
                os.kill(pid, signal.SIGTERM)
            for pid in list(living):
                _, status = os.waitpid(pid, 0)
                del living[pid]
                if status:
                    raise AssertionError(f"a worker ended with {status}")
        except BaseException:
            server.end(signal.SIGKILL)
            kvraw.sweep_shared_memory()
            raise
        finally:
            for pid in living:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os.close(write)
        with os.fdopen(read) as lines:
            for line in lines:
                total.update(json.loads(line))
        with server:
            # Of those that were killed the locks are gone within the limit.
            until(lambda: stats(server.endpoint)["clients"] == 0, LIVENESS + 3)
            last = stats(server.endpoint)
            assert last["locked"] == last["tickets"] == last["writing"] == 0, last
            assert last["object_bytes"] == last["objects"] * CHUNK, last
            status, _, err = server.end()
            assert status == 0, err
        kvraw.sweep_shared_memory()
        assert server.segments() == []
        return {
            **total,
            **{
                f"server {name}": last[name]
                for name in ("stored", "hits", "evicted", "dead", "expired", "disk_loaded", "disk_damaged")
            },
        }


def main() -> int:
    """Run it; 0 where nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("KVRAW_TEST_SERVE_SECONDS", "10")))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(run(options.seconds, options.workers, options.seed), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
