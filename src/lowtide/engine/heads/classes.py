"""The heads that give logits of labels: at tokens, or of a whole row."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from lowtide.engine.heads.head import Head, ScoreOutput, Scores
from lowtide.engine.heads.own_head import own_head
from lowtide.ops.linear_logprobs import NOTHING_MORE, Want
from lowtide.ragged import OWN_TOKEN, ScoreRule


@dataclass(frozen=True)
class ClassStats:
    """The logits of all labels at each score, at least in float32."""

    logits: Float[Tensor, "scores labels"]


@dataclass
class ClassOutput(ScoreOutput):
    """What a head of labels gives."""

    label_logits: Tensor
    """[scores, labels]"""
    loss: Tensor | None = None
    entropies: Tensor | None = None
    top1: Tensor | None = None
    aux_loss: Tensor | None = None

    @property
    def scored(self) -> Tensor:
        """[scores]: the largest logit, in place of one number."""
        return self.label_logits.amax(-1)

    @property
    def predictions(self) -> Tensor:
        """[scores]: the number of the likeliest label."""
        return self.label_logits.argmax(-1)

    @property
    def stats(self) -> ClassStats:
        return ClassStats(self.label_logits)


class _Classes(Head):
    """Logits of labels."""

    numbers = "logits"
    number = "logit"
    virtual_tokens = False
    class_names: ClassVar[Collection[str]]
    """Of transformers' models that have this head."""

    @classmethod
    def why_not(cls, model: nn.Module) -> str | None:
        if any(each.__name__ in cls.class_names for each in type(model).__mro__):
            return None
        return f"has no head for {cls.pipeline}"

    @classmethod
    def check(cls, model: PreTrainedModel) -> None:
        """All can be run: the head is called as it is."""

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> ClassOutput:
        return cls.output_of(ClassStats(own_head(model, hidden.index_select(0, scores.index)[:, None]).flatten(0, -2)))

    @classmethod
    def distances(cls, found: Float[Tensor, " scores"], expected: Float[Tensor, " scores"]) -> Tensor:
        """As shares of what logits vary by, which for a new head is next to nothing."""
        wide = expected.to(torch.promote_types(expected.dtype, torch.float32))
        return super().distances(found, wide) / wide.std().clamp_min(torch.finfo(torch.float32).tiny)

    @classmethod
    def output_of(cls, stats: ClassStats, **more: Tensor | None) -> ClassOutput:
        logits = stats.logits
        return ClassOutput(logits.to(torch.promote_types(logits.dtype, torch.float32)), **more)


class TokenClasses(_Classes):
    """Token classification: logits of labels at each scored token."""

    models = "token classifiers"
    auto_class = AutoModelForTokenClassification
    new_module = "classifier"
    task_type = "TOKEN_CLS"
    pipeline = "token-classification"
    class_names = frozenset(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values())

    @classmethod
    def dense_stats(
        cls,
        logits: Float[Tensor, "lines longest labels"],
        index: Int[Tensor, " scores"],
        target: Int[Tensor, " scores"],
        longest: int,
        want: Want = NOTHING_MORE,
    ) -> ClassStats:
        return ClassStats(logits.flatten(0, 1)[index].float())

    @classmethod
    def score_rule(cls, model: PreTrainedModel) -> ScoreRule:
        return OWN_TOKEN

    @classmethod
    def usage(cls, where: str) -> list[str]:
        return [
            f'tagger = pipeline("{cls.pipeline}", model="{where}", aggregation_strategy="simple")',
            'print(tagger("Ada Lovelace lived in London."))',
        ]
