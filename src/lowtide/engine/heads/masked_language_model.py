"""The head of a masked language model: log-probabilities of the tokens that stood where masks are.

Only the scored hidden states go through what such models have before the vocabulary (a layer, an activation, a norm),
and meet the vocabulary as those of any language model do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, PreTrainedModel

from lowtide.engine.heads.head import Scores, acting_as
from lowtide.engine.heads.head_parts import head_parts
from lowtide.engine.heads.language_model import LanguageModel, TokenOutput, is_masked, reading, within
from lowtide.engine.heads.own_head import own_head
from lowtide.ragged import OWN_TOKEN, ScoreRule


class MaskedLanguageModel(LanguageModel):
    """Log-probabilities over a vocabulary, of the token itself."""

    models = "masked language models"
    auto_class = AutoModelForMaskedLM
    task_type = "FEATURE_EXTRACTION"
    pipeline = "fill-mask"
    virtual_tokens = False
    hides_tokens = True

    @classmethod
    def why_not(cls, model: nn.Module) -> str | None:
        inner: Any = model
        if inner.config.is_encoder_decoder:
            return "is an encoder-decoder, which predicts a target from a source"
        return None if is_masked(model) else "is no masked language model"

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> TokenOutput:
        names, fused = reading(model, head_parts(model), scores_alone(scores))
        return TokenOutput(**dict(zip(names, decoded(model, hidden, scores, fused), strict=True)))

    @classmethod
    def score_rule(cls, model: PreTrainedModel) -> ScoreRule:
        return OWN_TOKEN

    @classmethod
    def usage(cls, where: str) -> list[str]:
        return [
            f'filler = pipeline("{cls.pipeline}", model="{where}")',
            'print(filler(f"Paris is the {filler.tokenizer.mask_token} of France."))',
        ]


def scores_alone(scores: Scores) -> Scores:
    """The same scores among hidden states of theirs alone, in their order."""
    return replace(scores, index=torch.arange(len(scores.index), device=scores.index.device))


def decoded(
    model: PreTrainedModel, hidden: Tensor, scores: Scores, function: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What a function gives of that which meets the vocabulary, [scores, hidden], within the head's own calls."""
    first, *rest = head_parts(model).modules

    def met(x: Tensor) -> tuple[Tensor, ...]:
        return within(rest, function, x.flatten(0, -2))

    with acting_as(first, met):
        return own_head(model, hidden.index_select(0, scores.index)[:, None])
