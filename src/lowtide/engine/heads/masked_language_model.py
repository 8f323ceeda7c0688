"""The head of a masked language model: log-probabilities of the tokens that stood where masks are.

Only the scored hidden states go through what such models have before the vocabulary (a layer, an activation, a norm),
and meet the vocabulary as those of any language model do.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForMaskedLM

from lowtide.engine.heads.language_model import LanguageModel, is_masked
from lowtide.score_rules import OWN_TOKEN


class MaskedLanguageModel(LanguageModel):
    """Log-probabilities over a vocabulary, of the token itself."""

    models = "masked language models"
    auto_class = AutoModelForMaskedLM
    task_type = "FEATURE_EXTRACTION"
    pipeline = "fill-mask"
    rule = OWN_TOKEN
    virtual_tokens = False
    hides_tokens = True

    @classmethod
    def why_not(cls, model: nn.Module) -> str | None:
        inner: Any = model
        if inner.config.is_encoder_decoder:
            return "is an encoder-decoder, which predicts a target from a source"
        return None if is_masked(model) else "is no masked language model"

    @classmethod
    def usage(cls, where: str) -> list[str]:
        return [
            f'filler = pipeline("{cls.pipeline}", model="{where}")',
            'print(filler(f"Paris is the {filler.tokenizer.mask_token} of France."))',
        ]
