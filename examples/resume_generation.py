"""Generation that survives the loss of its KV cache: ``python examples/resume_generation.py [--device cpu|cuda]``.

A small Llama with random weights generates. Half-way its KV cache, laid out in scattered blocks as a serving engine
would, is stored to host memory and wiped; then it is loaded into other blocks and generation goes on. Tokens and logits
must equal those of a run that was never interrupted. A connector does the same with an engine's own tensors.

Needs torch and transformers (``pip install kvraw[transformers]``).
"""

from __future__ import annotations

import argparse
import inspect
from dataclasses import dataclass

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvraw

BLOCK_SIZE = 16  # tokens per block of the paged cache
CHUNK_BLOCKS = 2  # blocks per chunk in host memory
NUM_BLOCKS = 24  # blocks of the paged cache; the sequence takes a few of them
PROMPT, BEFORE, AFTER = 58, 20, 24  # tokens: the prompt, generated before the interruption, and after it

# The argument of a model's forward that takes the cache: named `past_key_values` up to some transformers 5.x.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


@dataclass(frozen=True)
class Outcome:
    """(Tokens, the logits they were chosen from) without and with an interruption, and how the cache was moved."""

    expected: tuple[torch.Tensor, torch.Tensor]
    resumed: tuple[torch.Tensor, torch.Tensor]
    explanation: str

    @property
    def same(self) -> bool:
        """Whether tokens and logits are equal, bit for bit."""
        return all(torch.equal(a, b) for a, b in zip(self.expected, self.resumed, strict=True))


def make_model(device: str) -> LlamaForCausalLM:
    """A Llama with grouped-query attention and random weights, wide enough that the context decides what comes next."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval().to(device)


@torch.no_grad()  # type: ignore[untyped-decorator]
def generate(
    model: LlamaForCausalLM, cache: DynamicCache, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy generation after `tokens`, which the cache does not hold yet: `count` tokens and their logits."""
    chosen, logits = [], []
    for _ in range(count):
        out = model(tokens[None], use_cache=True, **{CACHE: cache})
        logits.append(out.logits[0, -1])
        tokens = logits[-1].argmax(keepdim=True)
        chosen.append(tokens)
    return torch.cat(chosen), torch.stack(logits)


def pages_from_cache(cache: DynamicCache, block_ids: torch.Tensor) -> list[torch.Tensor]:
    """A paged cache with a sequence in these blocks: per layer one [2, NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim].

    All other places are NaN, the unused end of the last block included.
    """
    pages = []
    for keys, values, *_ in cache:  # each [1, kv_heads, tokens, head_dim]
        kv = torch.cat((keys, values)).transpose(1, 2)  # [2, tokens, kv_heads, head_dim]
        room = kv.new_full((2, len(block_ids) * BLOCK_SIZE, *kv.shape[2:]), torch.nan)
        room[:, : kv.shape[1]] = kv
        layer = kv.new_full((2, NUM_BLOCKS, BLOCK_SIZE, *kv.shape[2:]), torch.nan)
        layer[:, block_ids] = room.unflatten(1, (-1, BLOCK_SIZE))
        pages.append(layer)
    return pages


def cache_from_pages(pages: list[torch.Tensor], block_ids: torch.Tensor, tokens: int) -> DynamicCache:
    """The sequence that lies in these blocks, as the model takes it."""
    cache = DynamicCache()
    for at, layer in enumerate(pages):
        kv = layer[:, block_ids].flatten(1, 2)[:, :tokens].transpose(1, 2)
        cache.update(kv[:1], kv[1:], at)
    return cache


def move_through_host(pages: list[torch.Tensor], source: torch.Tensor, target: torch.Tensor) -> str:
    """Store the source blocks to host memory, wipe the paged cache, and load them into the target blocks."""
    paged = kvraw.PagedCache.from_tensors(pages, axes="PBTHD")
    # On a GPU both copies are enqueued on the stream that the model runs on, and so everything happens in order: the
    # model's writes, the store, the wipe, the load, the model's next step. On the host they are done on return.
    stream = torch.cuda.current_stream(pages[0].device) if pages[0].is_cuda else None
    size = paged.chunk_bytes(CHUNK_BLOCKS * BLOCK_SIZE)
    count = -(-len(source) // CHUNK_BLOCKS)  # the last chunk may stay partly unused
    with kvraw.HostPool(count * (size + kvraw.HostPool.ALIGNMENT)) as pool:
        chunks = pool.chunks(count, size)
        stored = kvraw.store(paged, chunks, source.tolist(), stream=stream)
        for layer in pages:
            layer.fill_(torch.nan)
        kvraw.load(paged, chunks, target.tolist(), stream=stream)
    return stored.explain()  # closing the pool waited for the copies


def resume(device: str) -> Outcome:
    """Generate without and with an interruption."""
    model = make_model(device)
    prompt = torch.randint(model.config.vocab_size, (PROMPT,), device=device)
    all_tokens, all_logits = generate(model, DynamicCache(), prompt, BEFORE + AFTER)

    cache = DynamicCache()
    tokens, _ = generate(model, cache, prompt, BEFORE)
    held = cache.get_seq_length()  # the newest token is not in the cache yet
    blocks = torch.randperm(NUM_BLOCKS)
    needed = -(-held // BLOCK_SIZE)
    source, target = blocks[:needed], blocks[needed : 2 * needed]
    pages = pages_from_cache(cache, source)
    explanation = move_through_host(pages, source, target)
    resumed = generate(model, cache_from_pages(pages, target, held), tokens[-1:], AFTER)
    return Outcome((all_tokens[BEFORE:], all_logits[BEFORE:]), resumed, explanation)


def main(arguments: list[str] | None = None) -> int:
    """Run on a device and say what came of it; 0 where nothing was lost."""
    parser = argparse.ArgumentParser(description="Resume generation from a KV cache that went through host memory.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    outcome = resume(parser.parse_args(arguments).device)
    print(outcome.explanation)
    print("uninterrupted:", *outcome.expected[0].tolist())
    print("resumed:      ", *outcome.resumed[0].tolist())
    print("tokens and logits are equal" if outcome.same else "tokens or logits DIFFER")
    return 0 if outcome.same else 1


if __name__ == "__main__":
    raise SystemExit(main())
