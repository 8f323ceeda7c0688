"""The phases of a run whose policy writes: prompts run through it, keys and values are held, the reference scores.

The generator itself draws tokens, which tensors without values cannot; so prompts and the reference are traced, and
keys, values and the logits of a token are made as large as they get. Those of completions are counted as if none ended
early, which is an upper bound. What reward functions and reward models take is not counted.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from lowtide.compat.torch import without_modes
from lowtide.data.batches.values import REFERENCE
from lowtide.data.prompts import PROMPT_IDS
from lowtide.engine.forward import causal_model, embedding_weight, score_shared
from lowtide.planner.tracing.trace import StorageTrace
from lowtide.ragged import IGNORE, RaggedBatch
from lowtide.step.runner import StepRunner

LOGITS = 3
"""How many times the logits of a token are there at most while it is drawn."""


def trace_rollout(
    runner: StepRunner, batch: RaggedBatch, dataset: Dataset, trace: StorageTrace, layers: int
) -> RaggedBatch:
    """The phases before a step; the batch that it then learns from.

    Args:
        batch: a micro-batch, on fake tensors.
        dataset: prepared prompts, of which the longest are written for.
        layers: of the model that is traced.
    """
    options: Any = runner.options
    with without_modes():
        prompts = _longest(options, dataset)
    count = len(prompts) * options.num_generations
    training = runner.model.training
    runner.model.eval()
    with torch.no_grad(), trace.during("generate"):
        held = _keys(runner, sum(map(len, prompts)), count, trace, layers)
        _run_prompts(runner, prompts, batch)
        vocabulary = embedding_weight(runner.model).shape[0]
        logits = [torch.empty(count, vocabulary) for _ in range(LOGITS)]
        del logits, held
    runner.model.train(training)
    if runner.reference is None or not options.compares:
        return batch
    with trace.during("score"):
        referred = runner.reference(batch)
    return replace(batch, score_values={**batch.score_values, REFERENCE: referred})


def _longest(options: Any, dataset: Dataset) -> list[list[int]]:
    """The prompts of this rank that may be written for together, as long as the data has them."""
    count = max(options.written_at_a_time // options.num_generations // max(options.world_size, 1), 1)
    lengths = sorted((len(ids) for ids in dataset[PROMPT_IDS]), reverse=True)
    budget, chosen = options.tokens_per_generation_batch, []
    for length in islice(cycle(lengths), count):
        taken = sum(chosen) + len(chosen) * options.num_generations * options.max_completion_length
        each = length + options.num_generations * options.max_completion_length
        if chosen and budget is not None and taken + each > budget:
            break
        chosen.append(length)
    return [[1] * length for length in chosen]


def _keys(runner: StepRunner, prompt_tokens: int, count: int, trace: StorageTrace, layers: int) -> list[Tensor]:
    """Keys and values of all layers, and what one of them takes more as it grows."""
    config: Any = causal_model(runner.model).config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = next(p.dtype for p in runner.model.parameters())
    options: Any = runner.options
    own = count * options.max_completion_length
    found = [torch.empty(own // 2, heads, dim, dtype=dtype)]
    for layer in range(layers):
        pieces = [torch.empty(tokens, heads, dim, dtype=dtype) for tokens in (prompt_tokens, own) for _ in range(2)]
        trace.belongs(pieces, "keys", layer)
        found += pieces
    return found


def _run_prompts(runner: StepRunner, prompts: list[list[int]], like: RaggedBatch) -> None:
    """The prompts through the model, of whose last tokens alone anything is read."""
    with without_modes():
        batch = RaggedBatch.from_segments(prompts, [[IGNORE] * len(prompt) for prompt in prompts])
    fake = like.token_ids.fake_mode  # type: ignore[attr-defined]
    score_shared(runner.model, batch.map(fake.from_tensor), padding_free=runner.padding_free)
