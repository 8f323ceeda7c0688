"""`python -m bench.attention`: what unequal segments cost a layer, beside equal ones.

One llama layer, forward and backward, over 200 short segments of unequal lengths, and over as many tokens in
segments of one length, which need no gathering and go through attention in one call. That length is the one at which
a token has as many keys to attend to on average, so that both do the same work. What the first takes beyond the
second is the overhead of raggedness: gathering, several calls, padding within groups; planning comes once a batch
and is timed apart. Target: below 15% of the layer's time.
"""

import argparse
import statistics
import sys
import time

import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from lowtide.ops.attention.attention_grouped import grouping
from lowtide.ops.attention.attention_plan import NAME, PLAN
from lowtide.ops.attention.varlen_attention import AttentionPlan
from lowtide.ragged import RaggedBatch

TARGET = 0.15
SEGMENTS = 200


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--mean", type=int, default=24, help="mean length of a segment")
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=int(options.hidden * 8 / 3) // 16 * 16,
        num_attention_heads=options.hidden // 32,
        num_key_value_heads=options.hidden // 64,
        attn_implementation=NAME,
    )
    layer, rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)
    lengths = torch.randint(2, 2 * options.mean - 1, (SEGMENTS,)).tolist()
    alike = round(sum(length**2 for length in lengths) / sum(lengths))
    ragged, equal = batch_of(lengths), batch_of([alike] * (sum(lengths) // alike))
    start = time.perf_counter()
    AttentionPlan.build(ragged)
    planning = time.perf_counter() - start
    # Turns alternate, so that a machine that slows down slows both.
    seconds = {"ragged": [], "equal": []}
    for _ in range(options.repeat):
        for name, batch in (("ragged", ragged), ("equal", equal)):
            seconds[name].append(pass_seconds(layer, rotary, batch, options.hidden) / batch.tokens)
    per_token = {name: statistics.median(values) for name, values in seconds.items()}
    overhead = per_token["ragged"] / per_token["equal"] - 1
    groups = len(grouping(AttentionPlan.build(ragged)).groups)
    console = Console()
    console.print(f"{SEGMENTS} segments, {ragged.tokens:,} tokens, {len(set(lengths))} lengths in {groups} groups")
    for name, value in per_token.items():
        console.print(f"{name:>7}: {value * 1e6:.2f} us a token, forward and backward of one layer")
    console.print(f"planning, once a batch: {planning * 1e3:.1f} ms")
    console.print(
        f"overhead {overhead:.1%}, target below {TARGET:.0%}: {'reached' if overhead < TARGET else 'NOT reached'}"
    )
    return 0 if overhead < TARGET else 1


def batch_of(lengths: list[int]) -> RaggedBatch:
    return RaggedBatch.from_segments([[1] * length for length in lengths])


def pass_seconds(layer: torch.nn.Module, rotary: torch.nn.Module, batch: RaggedBatch, hidden: int) -> float:
    """Seconds of one forward and backward of the layer over the batch."""
    x: Tensor = torch.randn(1, batch.tokens, hidden, requires_grad=True)
    positions = rotary(x, batch.position_ids[None])
    plan = AttentionPlan.build(batch)
    start = time.perf_counter()
    layer(x, position_embeddings=positions, **{PLAN: plan}).sum().backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
