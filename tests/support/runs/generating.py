"""Tiny models that generate, what they are asked, and what the scorer says of what they wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.engine.forward import install, score
from lowtide.ragged import RaggedBatch
from lowtide.rollout.generators.generator import Completion, Request
from tests.support.models.architectures import FIRST_TOKEN, VOCAB, build


def writer(
    name: str = "llama", *, dtype: torch.dtype = torch.float64, padding_free: bool = True, **changes: Any
) -> Any:
    """A model of `tests.support.models.architectures` prepared to generate. In float64 nothing depends on rounding."""
    model: Any = build(name, **changes).to(dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the fused products of experts know no float64
    install(model, padding_free=padding_free)
    return model


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 * seed + length)
    return torch.randint(FIRST_TOKEN, VOCAB, (length,), generator=generator).tolist()


def some_requests() -> list[Request]:
    """Prompts shorter and longer than the windows of the tiny models, down to one token."""
    asked = ((3, 2), (17, 3), (9, 1), (10, 2), (1, 2))
    return [Request(prompt(length), count, seed=length) for length, count in asked]


def token_ids(completions: Sequence[Sequence[Completion]]) -> list[list[list[int]]]:
    return [[each.token_ids for each in group] for group in completions]


def written_logprobs(completions: Sequence[Sequence[Completion]], *, plain: bool = True) -> Tensor:
    """Of all tokens, end to end."""
    rows = [each.plain_logprobs if plain else each.logprobs for group in completions for each in group]
    return torch.tensor([value for row in rows for value in row])


def scored(model: nn.Module, requests: Sequence[Request], completions: Sequence[Sequence[Completion]]) -> Tensor:
    """The log-probabilities of the same tokens by the engine's scorer."""
    segments, labels, prefix, row = [], [], [], []
    for number, (request, group) in enumerate(zip(requests, completions, strict=True)):
        own = len(segments)
        segments.append(list(request.prompt_ids))
        labels.append([-100] * len(request.prompt_ids))
        prefix.append(-1)
        row.append(number)
        for each in group:
            segments.append(each.token_ids)
            labels.append(each.token_ids)
            prefix.append(own)
            row.append(number)
    batch = RaggedBatch.from_segments(segments, labels, prefix=prefix, row=row)
    training = model.training
    with torch.no_grad():
        found = score(model.eval(), batch).scored
    model.train(training)
    return found.float()
