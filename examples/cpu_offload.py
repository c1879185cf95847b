"""A CPU offload handler as serving engines have it: ``python examples/cpu_offload.py [--device cpu|cuda]``.

The scheduler submits jobs (blocks of the GPU's cache to blocks in host memory, or back) and polls for those that are
finished; it never waits. Copies run on streams of kvraw's own. Needs torch.
"""

from __future__ import annotations

import argparse
import time

import torch

import kvraw

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 4, 64, 16, 8, 64


class CpuOffloadHandler:
    """Moves blocks between a paged cache and `num_cpu_blocks` blocks of host memory."""

    def __init__(self, kv_caches: list[torch.Tensor], num_cpu_blocks: int) -> None:
        self.cache = kvraw.PagedCache.from_tensors(kv_caches, axes="PBTHD")
        nbytes = self.cache.chunk_bytes(BLOCK_SIZE)
        room = -(-nbytes // kvraw.HostPool.ALIGNMENT) * kvraw.HostPool.ALIGNMENT
        self.pool = kvraw.HostPool(room * num_cpu_blocks, device=self.cache.device)
        self.blocks = self.pool.chunks(num_cpu_blocks, nbytes)
        self.plans = {name: kvraw.TransferPlan(self.cache, name, chunk_tokens=BLOCK_SIZE) for name in ("store", "load")}
        self.jobs: dict[int, kvraw.Transfer] = {}

    def submit(self, job: int, direction: str, gpu_blocks: list[int], cpu_blocks: list[int]) -> None:
        """Start a job; a load is seen by whatever the current stream is given later."""
        stream = torch.cuda.current_stream() if self.cache.device is not None else None
        chunks = [self.blocks[k] for k in cpu_blocks]
        self.jobs[job] = self.plans[direction](chunks, gpu_blocks, stream=stream, side=True)

    def get_finished(self) -> list[int]:
        """Jobs that ended since the last call."""
        finished = [job for job, transfer in self.jobs.items() if transfer.done()]
        for job in finished:
            self.jobs.pop(job).wait()  # raises what the job met
        return finished


def main(arguments: list[str] | None = None) -> int:
    """Offload blocks, overwrite them, load them back elsewhere; 0 where nothing was lost."""
    parser = argparse.ArgumentParser(description="Offload blocks of a KV cache to host memory and load them back.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    device = parser.parse_args(arguments).device
    caches = [torch.randn(2, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE, device=device).half() for _ in range(LAYERS)]
    before = [layer.clone() for layer in caches]
    handler = CpuOffloadHandler(caches, num_cpu_blocks=32)
    jobs = {job: torch.randperm(BLOCKS)[:8].tolist() for job in range(4)}
    for job, blocks in jobs.items():
        handler.submit(job, "store", blocks, list(range(job * 8, job * 8 + 8)))
    pending = set(jobs)
    while pending:
        pending -= set(handler.get_finished())
        time.sleep(0.0001)  # the engine's step
    for layer in caches:
        layer.zero_()
    free = torch.randperm(BLOCKS)
    for job in jobs:
        handler.submit(job, "load", free[job * 8 : job * 8 + 8].tolist(), list(range(job * 8, job * 8 + 8)))
    same = all(
        torch.equal(now[:, free[job * 8 : job * 8 + 8]], was[:, blocks])
        for job, blocks in jobs.items()
        for now, was in zip(caches, before, strict=True)
    )
    while handler.jobs:
        handler.get_finished()
    handler.pool.close()
    print(f"4 jobs out and back: {'every block is the same' if same else 'blocks DIFFER'}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
