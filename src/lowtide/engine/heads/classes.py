"""The head that gives logits of labels at tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from lowtide.engine.heads.head import Head, ScoreOutput, Scores, is_one_of
from lowtide.engine.heads.own_head import own_head
from lowtide.ops.linear_logprobs import NOTHING_MORE, Want
from lowtide.ragged import OWN_TOKEN, ScoreRule

TOKEN_CLASSIFIERS = frozenset(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values())


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


class TokenClasses(Head):
    """Token classification: logits of labels at each scored token."""

    numbers = "logits"
    number = "logit"
    models = "token classifiers"
    auto_class = AutoModelForTokenClassification
    new_module = "classifier"
    task_type = "TOKEN_CLS"
    pipeline = "token-classification"
    virtual_tokens = False

    @classmethod
    def why_not(cls, model: nn.Module) -> str | None:
        return None if is_one_of(model, TOKEN_CLASSIFIERS) else f"has no head for {cls.pipeline}"

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
