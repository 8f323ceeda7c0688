"""What the trainers over prompts and completions share: their config, and their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from datasets import Dataset, IterableDataset
from torch import nn

from lowtide.data.batches.collate import CompletionCollator
from lowtide.data.preference import PreferenceOptions, prepare_pairs
from lowtide.engine.forward import embedding_weight
from lowtide.option import option
from lowtide.ragged import NEXT_TOKEN, ScoreRule
from lowtide.run.engine import Engine, check_prefixes
from lowtide.run.options.training import TrainingConfig
from lowtide.trainers.method import MethodTrainer, Prepared


@dataclass
class CompletionConfig(TrainingConfig):
    """What the configs of these trainers have in common beyond `TrainingConfig`."""

    without_effect: ClassVar[dict[str, str]] = {
        **TrainingConfig.without_effect,
        "label_smoothing_factor": "it smooths the targets of supervised fine-tuning, as in TRL. The losses of "
        "preferences that can be smoothed have `label_smoothing`",
    }

    learning_rate: float = option(1e-6, "The initial learning rate.")


class CompletionTrainer(MethodTrainer):
    """A trainer over rows of a prompt and one or two completions."""

    columns: ClassVar[tuple[str, ...]] = ("chosen_ids", "rejected_ids")
    """The completions of a prepared row."""
    values: ClassVar[tuple[str, ...]] = ()
    """The columns that become row values."""
    scores_prompt: ClassVar[bool] = False
    score_rule: ScoreRule = NEXT_TOKEN
    """Which positions of a completion are scored."""

    def prepare(self, dataset: Dataset | IterableDataset, name: str) -> Prepared:
        assert self.tokenizer is not None
        batch_size = self.args.per_device_train_batch_size
        return prepare_pairs(dataset, self.tokenizer, self.data_options(), batch_size=batch_size, name=name)

    def data_options(self) -> PreferenceOptions:
        """The options of data, as preparation takes them."""
        args: Any = self.args
        names = ("max_length", "truncation_mode", "max_prompt_length", "max_completion_length", "eos_token")
        return PreferenceOptions(
            **{name: getattr(args, name) for name in names if hasattr(args, name)},
            num_proc=args.dataset_num_proc,
            vocab_size=self.vocabulary,
        )

    def check_model(self, model: nn.Module) -> None:
        self.vocabulary = embedding_weight(model).shape[0]

    def collator(self, args: Any, engine: Engine) -> Callable:
        return CompletionCollator(
            self.columns,
            sharing=check_prefixes(engine, args.prefix_sharing),
            scores_prompt=self.scores_prompt,
            score_rule=self.score_rule,
            values=(*self.values, "number"),
        )

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        assert self._signature_columns is not None
        self._signature_columns += ["prompt_ids", *self.columns, *self.values, "ref_logprobs", "number"]
