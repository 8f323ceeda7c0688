"""Pretraining: a language model learns to predict the next token of documents, from random weights or going on from a
model.

The documents are packed end to end and never see each other. The unit of steps is tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from transformers.trainer_utils import SchedulerType

from lowtide.data.documents import documents_of
from lowtide.methods.method import Method
from lowtide.methods.shared.beginning import BeginningOptions
from lowtide.methods.shared.likelihood import likelihood
from lowtide.methods.shared.perplexity import with_perplexity
from lowtide.methods.shared.rows import Preparation, Prepared, Texts
from lowtide.option import COUNT, NOT_NEGATIVE, Range, option


@dataclass(kw_only=True)
class PretrainOptions(BeginningOptions):
    """The options of pretraining."""

    learning_rate: float = option(3e-4, "The highest learning rate.")
    weight_decay: float = option(0.1, "Of AdamW.", NOT_NEGATIVE)
    adam_beta2: float = option(0.95, "Of AdamW.", Range(least=0, below=1))
    lr_scheduler_type: str = option(
        "warmup_stable_decay",
        "The schedule of the learning rate: by default it rises, stays, and falls at the end.",
        choices=[each.value for each in SchedulerType],
    )
    warmup_steps: float = option(0.01, "Steps in which it rises; below 1 a share of all.", NOT_NEGATIVE)
    decay_steps: float = option(
        0.1, "Steps in which it falls at the end, with warmup_stable_decay; below 1 a share of all.", NOT_NEGATIVE
    )
    # data
    dataset_text_field: str = option("text", "Column that holds the texts.")
    document_separator: str | None = option(
        None, "What stands between the documents of a text, such as '<|endoftext|>'. None: each row is a document."
    )
    dataset_num_proc: int | None = option(None, "Processes that prepare the dataset.", NOT_NEGATIVE)
    eos_token: str | None = option(None, "Token that ends a document, in place of the tokenizer's own.")
    max_length: int | None = option(1024, "Tokens of a packed row, or most of a row without packing.", COUNT)
    shuffle_dataset: bool = option(True, "Shuffle the documents once, before they are packed.")
    packing: bool = option(True, "Put documents into rows of `max_length` tokens; they never see each other.")
    packing_strategy: str = option(
        "wrapped",
        "How documents are put into rows: end to end, or best fit decreasing with overflow cut (bfd) or kept.",
        choices=["wrapped", "bfd_split", "bfd"],
    )
    eval_packing: bool | None = option(None, "Pack the evaluation set. None does as `packing`.")
    # steps
    tokens_per_step: int | None = option(
        None, "Tokens of an optimizer step, on all ranks: sets gradient_accumulation_steps.", COUNT
    )
    max_tokens: int | None = option(None, "Tokens to train on in all: sets max_steps.", COUNT)
    label_smoothing_factor: float = option(0.0, "Share of the uniform distribution in each target.")
    token_metrics: bool = option(True, "Log `entropy` and `mean_token_accuracy`; off, they cost nothing.")
    router_aux_loss_coef: float | None = option(
        None,
        "Weight of a mixture of experts' load-balancing loss. None takes the model's own; 0 leaves it out.",
        NOT_NEGATIVE,
    )

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.check_beginning()
        if self.packing and self.max_length is None:
            raise ValueError("packing=True needs max_length, the capacity of a row: set it to a number of tokens")
        for name in ("tokens_per_step", "max_tokens"):
            if getattr(self, name) is not None and not self.packing:
                raise ValueError(
                    f"{name}={getattr(self, name)} counts full rows, and packing=False leaves rows as long as their "
                    "texts: set packing=True, or count by gradient_accumulation_steps and max_steps"
                )
        if self.document_separator == "":
            raise ValueError("document_separator='' separates nothing: leave it out, and each row is a document")

    def settle(self: Any) -> None:
        """Sets rows and steps from tokens.

        Raises:
            ValueError: they do not come out even, or contradict steps that were asked for.
        """
        if self.tokens_per_step is not None:
            self.gradient_accumulation_steps = self._agreed("gradient_accumulation_steps", self._accumulated())
        if self.max_tokens is not None:
            rows = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.data_ranks
            self.max_steps = self._agreed("max_steps", math.ceil(self.max_tokens / (rows * self.max_length)))

    def _accumulated(self: Any) -> int:
        """Batches of a rank in a step of `tokens_per_step`."""
        of_ranks = self.max_length * self.data_ranks
        rows, rest = divmod(self.tokens_per_step, of_ranks)
        if rest:
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} is no multiple of max_length x ranks = {of_ranks}: take "
                f"{max(rows, 1) * of_ranks} or {(rows + 1) * of_ranks}"
            )
        size = self.per_device_train_batch_size
        if self._asked("per_device_train_batch_size") is None:
            size = self.per_device_train_batch_size = math.gcd(rows, size)
        if rows % size:
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} is {rows} rows of {self.max_length} tokens on each rank, "
                f"which per_device_train_batch_size={size} does not divide: take one that does"
            )
        return rows // size

    def _agreed(self: Any, name: str, found: int) -> int:
        """A number that follows from tokens, where no other was asked for."""
        asked = self._asked(name)
        if asked not in (None, found):
            tokens = "max_tokens" if name == "max_steps" else "tokens_per_step"
            raise ValueError(f"{tokens}={getattr(self, tokens)} makes {name} {found}, and {name}={asked}: keep one")
        return found

    def _asked(self: Any, name: str) -> Any:
        """An option that was set by hand; None where it was left, or set to its default, as files of runs have all."""
        value, default = self.requested.get(name), self.__dataclass_fields__[name].default
        return None if value == default else value


class Documents(Texts):
    """Texts, each a document or several, packed."""

    formats, takes_images = False, False

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        options = how.options
        apart = documents_of(dataset, options.dataset_text_field, options.document_separator, name)
        return super().prepare(apart, replace(how, formatting_func=None), name)


METHOD = Method("pretrain", "pretraining", PretrainOptions, Documents(), likelihood, derived_metrics=with_perplexity)
