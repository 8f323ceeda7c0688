"""The head that gives one number at a token: a reward model's reward, or a value function."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from lowtide.engine.heads.head import Head, ScoreOutput, Scores, at_least_float32
from lowtide.engine.heads.vision_value import register_reward_model
from lowtide.score_rules import LastToken, ScoreRule

TURNS_READ = "lowtide_turns"
"""In a reward model's config: how the answers of conversations were taken that its values were learned on."""
STEP_SEPARATOR = "step_separator"
"""In the same place of a process reward model: what stands behind each step."""
TURNS_FILE = f"{TURNS_READ}.json"
"""The same in a folder of adapters, which has no config of a model."""
VALUES = "values"
"""The statistic of the value at each score, at least in float32."""


class Value(Head):
    """Sequence classification with one label."""

    numbers = "values"
    statistic = VALUES
    of_lines = single = True
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
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> ScoreOutput:
        values = cast(Any, model).score(hidden.index_select(0, scores.index)).squeeze(-1)
        return ScoreOutput(stats={VALUES: at_least_float32(values)})

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
