"""SGLang's published package on the CPU, with kvraw by its entry point and nothing else."""

from __future__ import annotations

import pytest

from tests.engines.environments import HERE, Environment

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

CALLED = (
    "transfer_hicache_all_layer transfer_hicache_one_layer transfer_hicache_all_layer_staged_lf_pf "
    "transfer_kv_all_layer_lf_ph transfer_kv_per_layer_ph_lf transfer_kv_direct transfer_kv_all_layer_direct_lf_pf "
    "transfer_kv_per_layer_direct_pf_lf transfer_hicache_all_layer_mla transfer_hicache_one_layer_mla "
    "transfer_hicache_all_layer_mla_staged_lf_pf"
)


@pytest.mark.parametrize("when", ["", "late"])
def test_host_pools(sglang: Environment, when: str) -> None:
    """Each layout and backend of its pools, whether its modules were imported ahead of its plugins or not."""
    text = sglang.run("-W", "ignore", str(HERE / "in_sglang.py"), *filter(None, [when]), SGLANG_LOGGING_CONFIG_PATH="")
    assert "all bytes equal" in text
    assert {name.rpartition(".")[2] for name in sglang.counted} >= set(CALLED.split())
