"""Published models whose KV caches the demo builds: one row each, numbers from the model's ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from kvraw.layouts.geometry import Geometry

__all__ = ["MODELS", "Model"]


@dataclass(frozen=True, slots=True)
class Model:
    """The numbers of a model that decide its KV cache, on one rank, as vLLM lays it out.

    Attributes
    ----------
    name : str
        Name on the command line.
    config : str
        Repository whose published ``config.json`` the numbers are from.
    layers, heads, head_size : int
        Layers, KV heads of one rank, elements per head (of the latent and the rope part together, for MLA).
    tensor_parallel : int
        Ranks that share the KV heads.
    format, planes : int
        Cache format: 1 is [2, blocks, block_size, heads, head_size] per layer, 3 the one-plane form of MLA.
    block_size, element_size : int
        Tokens per block, bytes per element (bf16).
    """

    name: str
    config: str
    layers: int
    heads: int
    head_size: int
    tensor_parallel: int = 1
    format: int = 1
    planes: int = 2
    block_size: int = 16
    element_size: int = 2

    def geometry(self, blocks: int) -> Geometry:
        """The cache's counts, with this many blocks."""
        return Geometry(
            self.layers, blocks, self.block_size, self.heads, self.head_size, self.element_size, planes=self.planes
        )


MODELS = MappingProxyType(
    {
        row.name: row
        for row in (
            # num_hidden_layers 32, num_key_value_heads 8, hidden_size 4096 / num_attention_heads 32
            Model("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 32, 8, 128),
            # num_hidden_layers 80, num_key_value_heads 8, hidden_size 8192 / num_attention_heads 64
            Model("llama-3.1-70b", "meta-llama/Llama-3.1-70B", 80, 2, 128, tensor_parallel=4),
            # num_hidden_layers 64, num_key_value_heads 8, head_dim 128
            Model("qwen3-32b", "Qwen/Qwen3-32B", 64, 8, 128),
            # num_hidden_layers 61, kv_lora_rank 512 + qk_rope_head_dim 64; FlashMLA takes blocks of 64 tokens
            Model("deepseek-v3", "deepseek-ai/DeepSeek-V3", 61, 1, 576, format=3, planes=1, block_size=64),
            # num_hidden_layers 24, num_key_value_heads 8, head_dim 64
            Model("gpt-oss-20b", "openai/gpt-oss-20b", 24, 8, 64),
        )
    }
)
