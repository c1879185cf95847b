"""vLLM's CPU offloading with kvraw's copies, by its configuration alone.

In ``kv_connector_extra_config``: ``"spec_name": "KvrawOffloadingSpec"``, ``"spec_module_path":
"kvraw.adapters.vllm_offload"``, and the options of vLLM's own ``CPUOffloadingSpec``.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvraw.adapters.engines import ENGINES, why_not
from kvraw.adapters.vllm import swap_blocks_batch

__all__ = ["KvrawOffloadingSpec"]


class KvrawOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's ``CPUOffloadingSpec``, whose worker copies by kvraw."""

    def create_worker(self, kv_caches: Any) -> Any:
        """The worker of a rank."""
        worker = super().create_worker(kv_caches)
        reason, log = why_not(ENGINES["vllm"]), logging.getLogger(ENGINES["vllm"].logger)
        if reason:
            log.warning("KvrawOffloadingSpec copies as CPUOffloadingSpec does: %s", reason)
            return worker
        handlers = [held for held in vars(worker).values() if hasattr(held, "_swap_blocks_batch")]
        for handler in handlers:
            handler._swap_blocks_batch = swap_blocks_batch
        if handlers:
            log.info("KvrawOffloadingSpec: stores and loads are kvraw's")
        else:
            log.warning("KvrawOffloadingSpec copies as CPUOffloadingSpec does: its worker has no _swap_blocks_batch")
        return worker
