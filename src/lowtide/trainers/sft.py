"""Supervised fine-tuning: `SFTConfig` and `SFTTrainer`, with TRL's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from lowtide.data.prepare import PrepareOptions, prepare
from lowtide.engine.forward import embedding_weight
from lowtide.methods.sft import SFT, SFTOptions
from lowtide.option import COUNT, option
from lowtide.run.inputs.arguments import check_arguments
from lowtide.run.options.training import TrainingConfig
from lowtide.trainers.method import MethodTrainer, Prepared


@dataclass
class SFTConfig(SFTOptions, TrainingConfig):
    """Options of supervised fine-tuning: those of `SFTOptions`, `TrainingConfig` and `TrainingArguments`."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingConfig._VALID_DICT_FIELDS, "dataset_kwargs"]

    max_seq_length: int | None = option(None, "The older name of `max_length`.", COUNT)

    def check(self) -> None:
        """Takes older names for the present ones, then checks as `SFTOptions` does."""
        if self.max_seq_length is not None:
            if self.max_length not in (1024, self.max_seq_length):
                raise ValueError(
                    f"SFTConfig: max_length={self.max_length} and its older name max_seq_length="
                    f"{self.max_seq_length} contradict each other: keep max_length"
                )
            self.max_length, self.max_seq_length = self.max_seq_length, None
        if self.loss_type == "chunked_nll":  # TRL's older name of the same
            self.loss_type = "nll"
        super().check()


class SFTTrainer(MethodTrainer):
    """Fine-tunes a causal language model on texts, conversations, or prompts with completions.

    Args:
        compute_loss_func: as `transformers.Trainer` calls it, on dense logits of padded batches.
        preprocess_logits_for_metrics: what is kept of the logits for `compute_metrics`.
        formatting_func: called with a row, returns its text or its messages.

    The others are those of `MethodTrainer`; formats of rows are in `docs/sft.md`. A `data_collator` of another
    library may return `input_ids` and `labels`.
    """

    method, config = SFT, SFTConfig
    plain_completions = 0

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module,
        args: SFTConfig | TrainingArguments | None = None,
        data_collator: Callable | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable | None = None,
        **older: Any,
    ):
        check_arguments(self.config.__name__, formatting_func=formatting_func)
        self._formatting_func = formatting_func
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_metrics,
            callbacks,
            optimizers,
            optimizer_cls_and_kwargs,
            quantization_config,
            peft_config,
            **older,
        )
        self.compute_loss_func, self.preprocess_logits_for_metrics = compute_loss_func, preprocess_logits_for_metrics
        self.objective = self.with_own_loss(self.inner_objective)

    def check_model(self, model: nn.Module) -> None:
        self._options = _prepare_options(self.args, self._formatting_func, model)

    def bin_tokens(self, args: Any) -> int | None:
        return args.max_length if args.packing else None

    def prepare(self, dataset: Dataset | IterableDataset, name: str) -> Prepared:
        args: Any = self.args
        training = name == "train"
        packing = args.packing if training or args.eval_packing is None else args.eval_packing
        options = self._options if training else dataclasses.replace(self._options, shuffle=False)
        assert self.tokenizer is not None
        return prepare(
            dataset,
            self.tokenizer,
            options,
            batch_size=args.per_device_train_batch_size,
            packing=packing,
            name=name,
        )


def _prepare_options(args: Any, formatting_func: Callable | None, model: nn.Module) -> PrepareOptions:
    return PrepareOptions(
        dataset_text_field=args.dataset_text_field,
        formatting_func=formatting_func,
        assistant_only_loss=args.assistant_only_loss,
        completion_only_loss=args.completion_only_loss,
        eos_token=args.eos_token,
        max_length=args.max_length,
        truncation_mode=args.truncation_mode,
        max_prompt_length=args.max_prompt_length,
        max_completion_length=args.max_completion_length,
        packing_strategy=args.packing_strategy,
        shuffle=args.shuffle_dataset,
        seed=args.seed,
        vocab_size=embedding_weight(model).shape[0],
        num_proc=args.dataset_num_proc,
    )
