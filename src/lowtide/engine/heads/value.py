"""The head that gives one number at a token: a reward model's reward, or a value function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from lowtide.engine.heads.head import Head, ScoreOutput, Scores
from lowtide.engine.heads.vision_value import register_reward_model
from lowtide.ops.linear_logprobs import NOTHING_MORE, Want
from lowtide.score_rules import LastToken, ScoreRule


@dataclass(frozen=True)
class TokenValues:
    """The values at the scored tokens, at least in float32."""

    values: Float[Tensor, " scores"]


@dataclass
class ValueOutput(ScoreOutput):
    """What a value head gives."""

    token_values: Tensor
    """[scores]; outputs are dicts, whose method `values` others call."""
    loss: Tensor | None = None
    entropies: Tensor | None = None
    top1: Tensor | None = None
    aux_loss: Tensor | None = None

    @property
    def scored(self) -> Tensor:
        return self.token_values

    @property
    def stats(self) -> TokenValues:
        return TokenValues(self.token_values)


class Value(Head):
    """Sequence classification with one label."""

    numbers = "values"
    number = "value"
    models = "reward models"
    auto_class = AutoModelForSequenceClassification
    config_values: ClassVar = {"num_labels": 1}
    new_module = "score"
    task_type = "SEQ_CLS"
    pipeline = "text-classification"
    virtual_tokens = False

    @classmethod
    def loader(cls, config: PretrainedConfig | None) -> Any:
        register_reward_model(config)
        return cls.auto_class

    @classmethod
    def why_not(cls, model: nn.Module) -> str | None:
        labels = getattr(getattr(model, "config", None), "num_labels", None)
        if hasattr(model, "score") and labels == 1:
            return None
        found = f"{labels} labels" if hasattr(model, "score") else "no `score` head"
        return f"has {found}; a reward model gives one value, and reward models require `num_labels=1`"

    @classmethod
    def check(cls, model: PreTrainedModel) -> None:
        """All can be run: the head is called as it is."""

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> ValueOutput:
        values = cast(Any, model).score(hidden.index_select(0, scores.index)).squeeze(-1)
        return ValueOutput(values.to(torch.promote_types(values.dtype, torch.float32)))

    @classmethod
    def dense_stats(
        cls,
        logits: Float[Tensor, "lines 1"],
        index: Int[Tensor, " scores"],
        target: Int[Tensor, " scores"],
        longest: int,
        want: Want = NOTHING_MORE,
    ) -> TokenValues:
        return TokenValues(logits.squeeze(-1)[index // longest].float())

    @classmethod
    def output_of(cls, stats: TokenValues, **more: Tensor | None) -> ValueOutput:
        return ValueOutput(stats.values, **more)

    @classmethod
    def pad_id(cls, model: PreTrainedModel) -> int | None:
        return model.config.get_text_config().pad_token_id

    @classmethod
    def score_rule(cls, model: PreTrainedModel) -> ScoreRule:
        return LastToken(cls.pad_id(model))

    @classmethod
    def usage(cls, where: str) -> list[str]:
        return [
            f'scorer = pipeline("{cls.pipeline}", model="{where}", function_to_apply="none")',
            'print(scorer("The answer is 4.")[0]["score"])  # higher is better',
        ]
