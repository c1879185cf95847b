"""A worker of LMCache's multiprocess mode, with kvraw's in place of its own, against LMCache's server.

Run in an environment with LMCache: ``lmcache_server.py URL [own]``. It stores blocks, wipes them, retrieves them and
compares all bytes, and prints its messages and how often kvraw was called; with ``own``, LMCache's own copies are used.
Runs store the same bytes, so that one retrieves what another stored.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import Any

import torch
import zmq
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transfer_context import worker_transfer
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from kvraw.adapters import lmcache_multiprocess as ours

LAYERS, BLOCKS, BLOCK, CHUNKS, WAIT = 4, 96, 16, 3, 20.0
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "kv_first": ((2, BLOCKS, BLOCK, 2, 64), "NHD"),
    "blocks_first": ((BLOCKS, 2, BLOCK, 2, 64), "NHD"),
    "mla": ((BLOCKS, BLOCK, 64), "NHD"),
}
calls: Counter[str] = Counter()
sent: list[tuple[str, Any]] = []


def count() -> None:
    """Count what is called, from here on."""

    def counted(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return call(*args, **options)

        setattr(owner, name, wrapper)

    for name in ("compute_kv_layout", "gather_paged_kv_to_cpu", "scatter_cpu_to_paged_kv"):
        counted(ours, name)
    counted(ours.SharedPool, "bytes_of")


def recorded(client: Any) -> Any:
    """A client whose messages of the protocol are noted, by name and size of the payload."""

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            call = getattr(client, name)

            def wrapper(*args: Any) -> Any:
                sent.append((name, [len(a) for a in args if isinstance(a, bytes)]))
                return call(*args)

            return wrapper

    return Recorder()


def there_and_back(client: Any, kind: str, instance: int, chunk: int) -> dict[str, Any]:
    """Store, wipe, retrieve and compare all bytes of three chunks; then again with the first chunk left alone."""
    shape, order = SHAPES[kind]
    generator = torch.Generator().manual_seed(7)
    per, caches = chunk // BLOCK, {}
    for layer in range(LAYERS):
        caches[f"layer.{layer}"] = torch.randn(shape, generator=generator).to(torch.bfloat16)
    want = {name: t.clone() for name, t in caches.items()}
    ids = torch.randperm(BLOCKS, generator=generator)[: CHUNKS * per].tolist()
    context = worker_transfer.EngineDrivenTransferContext(instance, recorded(client))
    context.register(caches, f"model-{kind}", 1, per, WAIT, layout_hints={"kv_layout": order})
    tokens = tuple(range(CHUNKS * chunk))

    def key(request: str, worker: int | None) -> Any:
        options = {"request_id": request, "num_kv_readers": 1}
        return IPCCacheServerKey(f"model-{kind}", 1, worker, tokens, 0, len(tokens), **options)

    name = f"{kind}-{instance}"
    event = context.create_recorded_event()
    assert context.submit_store(name, key(name, 0), caches, [ids], event, per).result(timeout=WAIT)
    client.end_session(name).result(timeout=WAIT)
    for skip in (0, chunk):
        for t in caches.values():
            t.zero_()
        name = f"{kind}-{instance}-{skip}"
        client.lookup(key(name, None), 1).result(timeout=WAIT)
        hits, limit = None, time.monotonic() + WAIT
        while hits is None and time.monotonic() < limit:
            hits = client.query_prefetch_status(name).result(timeout=WAIT)
            time.sleep(0.01)
        assert hits == CHUNKS, hits
        assert context.submit_retrieve(name, key(name, 0), caches, [ids], event, per, skip).result(timeout=WAIT)
        client.end_session(name).result(timeout=WAIT)
        kept = torch.zeros(BLOCKS, dtype=torch.bool)
        kept[ids[skip // BLOCK :]] = True
        for layer, t in caches.items():
            along = [BLOCKS if n == BLOCKS else 1 for n in shape]
            right = torch.where(kept.view(along), want[layer], torch.zeros_like(t))
            assert torch.equal(t.view(torch.int16), right.view(torch.int16)), (kind, layer, skip)
    way = type(context.engine_driven_context)
    context.unregister().result(timeout=WAIT)
    context.close()
    return {"way": way.__name__, "module": way.__module__, "messages": list(sent)}


def main() -> None:
    own = "own" in sys.argv
    if not own:
        count()
        ours.install()
    zctx = zmq.Context()
    client = RequestClientFactory.create(sys.argv[1], context=zctx)
    chunk = client.get_chunk_size().result(timeout=WAIT)
    runs = {}
    for at, kind in enumerate(SHAPES):
        sent.clear()
        runs[kind] = there_and_back(client, kind, 100 * (1 + own) + at, chunk)
    client.close()
    ours.uninstall()
    sys.stdout.write(f"RESULT {json.dumps({'runs': runs, 'calls': dict(calls)})}\n")


if __name__ == "__main__":
    main()
