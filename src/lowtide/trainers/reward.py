"""Reward modelling: `RewardConfig` and `RewardTrainer`, with TRL's names."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedModel

from lowtide.data.preference import prepare_pairs
from lowtide.engine.forward import causal_model
from lowtide.engine.heads.value import Value
from lowtide.methods.reward import REWARD, RewardOptions
from lowtide.option import option
from lowtide.trainers.completions import CompletionConfig, CompletionTrainer
from lowtide.trainers.method import Prepared


@dataclass
class RewardConfig(RewardOptions, CompletionConfig):
    """Options of reward modelling: `RewardOptions`, `TrainingConfig` and `TrainingArguments`."""

    without_effect: ClassVar[dict[str, str]] = {
        name: why for name, why in CompletionConfig.without_effect.items() if name != "pad_token"
    }

    learning_rate: float = option(1e-4, "The initial learning rate.")


class RewardTrainer(CompletionTrainer):
    """Trains a model that gives one value a row, higher for what people chose (arXiv 2203.02155).

    The arguments are those of `MethodTrainer`; a model given by name gets a value head in place of its own. Rows are
    described in `docs/reward.md`.
    """

    method, config, head = REWARD, RewardConfig, Value
    values = ("margin",)
    plain_completions = 2

    @classmethod
    def adapters(cls, peft_config: Any) -> Any:
        """With the value head among what is trained: it is new, and nothing else would train it."""
        task = getattr(peft_config, "task_type", None)
        if task not in (None, "CAUSAL_LM") or "score" in (getattr(peft_config, "modules_to_save", None) or []):
            return peft_config
        peft_config = copy.copy(peft_config)
        peft_config.task_type = "SEQ_CLS"  # for which PEFT trains the head whole
        return peft_config

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        inner = causal_model(model)
        self._set_padding(inner)
        self.pad_id, self.score_rule = Value.pad_id(inner), Value.score_rule(inner)

    def _set_padding(self, model: PreTrainedModel) -> None:
        """Tells model and tokenizer the token that rows are padded with: without it the model runs a row at a time,
        and with another than the tokenizer's it would read at padding."""
        if self.tokenizer is None:
            return
        args: Any = self.args
        token = args.pad_token or self.tokenizer.pad_token or args.eos_token or self.tokenizer.eos_token
        if token is None:
            return
        if token not in self.tokenizer.get_vocab():
            raise ValueError(
                f"pad_token {token!r} is not in the tokenizer's vocabulary: give a token of it, or leave it out"
            )
        self.tokenizer.pad_token = token
        model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    def prepare(self, dataset: Dataset | IterableDataset, name: str) -> Prepared:
        assert self.tokenizer is not None
        return prepare_pairs(
            dataset,
            self.tokenizer,
            self.data_options(),
            batch_size=self.args.per_device_train_batch_size,
            name=name,
            whole=True,
            margins=True,
        )
