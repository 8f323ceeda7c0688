"""The heads that give logits of labels: of tokens, and of whole texts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from lowtide.engine.heads.head import Head, ScoreOutput, Scores, at_least_float32, is_one_of
from lowtide.engine.heads.own_head import own_head
from lowtide.score_rules import FIRST_TOKEN, OWN_TOKEN, LastToken, ScoreRule

TOKEN_CLASSIFIERS = frozenset(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values())
TEXT_CLASSIFIERS = frozenset(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values())


LOGITS = "logits"
"""The statistic of the logits of all labels, [scores, labels], at least in float32."""


class Classes(Head):
    """Logits of labels, by the model's own head."""

    numbers = "logits"
    statistic = LOGITS
    number = "logit"
    new_module = "classifier"
    virtual_tokens = False
    classifiers: ClassVar[Collection[str]]
    """The names of the classes that have such a head."""

    @classmethod
    def why_not(cls, model: nn.Module) -> str | None:
        return None if is_one_of(model, cls.classifiers) else f"has no head for {cls.pipeline}"

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> ScoreOutput:
        states = cls.states(model, hidden, scores)
        logits = cast(Any, model).score(states) if reads_last(model) else own_head(model, states[:, None])
        return ScoreOutput(stats={LOGITS: at_least_float32(logits.flatten(0, -2))})

    @classmethod
    def states(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> Float[Tensor, "scores hidden"]:
        """What the model's head is given: the hidden states of the scores."""
        return hidden.index_select(0, scores.index)


class TokenClasses(Classes):
    """Token classification: logits of labels at each scored token."""

    models = "token classifiers"
    auto_class = AutoModelForTokenClassification
    rule = OWN_TOKEN
    classifiers = TOKEN_CLASSIFIERS
    task_type = "TOKEN_CLS"
    pipeline = "token-classification"

    @classmethod
    def distances(cls, found: Float[Tensor, " scores"], expected: Float[Tensor, " scores"]) -> Tensor:
        """As shares of what logits vary by, which for a new head is next to nothing."""
        wide = at_least_float32(expected)
        return super().distances(found, wide) / wide.std().clamp_min(torch.finfo(torch.float32).tiny)

    @classmethod
    def predictions(cls, output: ScoreOutput) -> Tensor:
        """[scores]: the number of the likeliest label."""
        return output.stats[LOGITS].argmax(-1)

    @classmethod
    def usage(cls, where: str) -> list[str]:
        return [
            f'tagger = pipeline("{cls.pipeline}", model="{where}", aggregation_strategy="simple")',
            'print(tagger("Ada Lovelace lived in London."))',
        ]


class SequenceClasses(Classes):
    """Sequence classification: logits of labels of a whole text. An encoder reads them at its first token, or off the
    mean of its hidden states; a decoder at its last token."""

    models = "text classifiers"
    auto_class = AutoModelForSequenceClassification
    classifiers = TEXT_CLASSIFIERS
    of_lines = True
    task_type = "SEQ_CLS"
    pipeline = "text-classification"

    @classmethod
    def means(cls, model: nn.Module) -> bool:
        return getattr(getattr(model, "config", None), "classifier_pooling", None) == "mean"

    @classmethod
    def states(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> Float[Tensor, "scores hidden"]:
        if not cls.means(model):
            return super().states(model, hidden, scores)
        if scores.lengths is None:
            raise ValueError(
                f"{type(model).__name__} reads the mean of a text's hidden states (classifier_pooling='mean'), which "
                "lie on several ranks where sequences are split: leave sp_size and cp_size out"
            )
        first, length = scores.index[:, None], scores.lengths[:, None]
        place = torch.arange(len(hidden), device=hidden.device)
        return ((place >= first) & (place < first + length)).div(length).to(hidden.dtype) @ hidden

    @classmethod
    def distances(cls, found: Float[Tensor, " scores"], expected: Float[Tensor, " scores"]) -> Tensor:
        """As shares of the logits, which for a new head are next to nothing."""
        wide = at_least_float32(expected)
        return super().distances(found, wide) / wide.abs().mean().clamp_min(torch.finfo(torch.float32).tiny)

    @classmethod
    def predictions(cls, output: ScoreOutput) -> Tensor:
        """[scores, labels]: the logits, as transformers' Trainer hands them on."""
        return output.stats[LOGITS]

    @classmethod
    def pad_id(cls, model: PreTrainedModel) -> int | None:
        return model.config.get_text_config().pad_token_id if reads_last(model) else None

    @classmethod
    def score_rule(cls, model: PreTrainedModel) -> ScoreRule:
        return LastToken(cls.pad_id(model)) if reads_last(model) else FIRST_TOKEN

    @classmethod
    def usage(cls, where: str) -> list[str]:
        return [
            f'classifier = pipeline("{cls.pipeline}", model="{where}")',
            'print(classifier("The room was clean and quiet."))',
        ]


def reads_last(model: nn.Module) -> bool:
    """Whether a model's logits of labels are read at the last token, by a layer on all of them: decoders'."""
    return hasattr(model, "score")
