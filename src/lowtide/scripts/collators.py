"""TRL's collators by their names: from tokenized rows to a `RaggedBatch`, which has no padding.

A trainer has the collator that its method needs; these are for scripts that pass one, or make batches by hand. The
arguments that are about padding (`pad_token_id`, `pad_to_multiple_of`, `padding_free`, `return_position_ids`) are taken
and have nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.collate import CompletionCollator
from lowtide.ragged import IGNORE, RaggedBatch

Row = Mapping[str, Any]
MASKS = ("completion_mask", "assistant_masks")


@dataclass
class DataCollatorForLanguageModeling:
    """Rows with `input_ids` to a batch; `SFTTrainer` takes it.

    The tokens that are scored are those whose `labels` are not -100, or without labels all of them; of these, only
    those that a `completion_mask` or `assistant_masks` marks with 1. Packed rows (`seq_lengths`) are as many segments.
    """

    pad_token_id: int | None = None
    padding_free: bool = True
    return_position_ids: bool = False
    pad_to_multiple_of: int | None = None
    max_length: int | None = None
    """Most tokens of a row that is kept."""
    completion_only_loss: bool = True
    """Score only what `completion_mask` marks, where there is one."""
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        _only_torch(self)

    def __call__(self, examples: Sequence[Row]) -> RaggedBatch:
        return RaggedBatch.from_rows([self._row(row) for row in examples])

    def _row(self, row: Row) -> dict[str, Any]:
        masks = [row[name] for name in MASKS if name in row and (name != MASKS[0] or self.completion_only_loss)]
        labels = list(row.get("labels", row["input_ids"]))
        for mask in masks:
            labels = [label if kept else IGNORE for label, kept in zip(labels, mask, strict=True)]
        made = {"input_ids": row["input_ids"], "labels": labels}
        if "seq_lengths" in row:
            return made | {"seq_lengths": row["seq_lengths"]}
        return {name: values[: self.max_length] for name, values in made.items()}


@dataclass
class _OfCompletions:
    """What the collators of prompts and completions have in common."""

    pad_token_id: int | None = None
    max_length: int | None = None
    """Most tokens of a prompt with a completion."""
    truncation_mode: str = "keep_start"
    """Which end of them is kept: keep_start or keep_end."""
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        _only_torch(self)
        if self.truncation_mode not in ("keep_start", "keep_end"):
            raise ValueError(f"truncation_mode={self.truncation_mode!r} is not one of keep_start, keep_end")

    @property
    def is_default(self) -> bool:
        """Whether a trainer's own collator does the same: that of its method, which knows more of it."""
        return self.max_length is None

    def collated(self, rows: Sequence[Row], completions: tuple[str, ...], values: tuple[str, ...]) -> RaggedBatch:
        fits = self.max_length is None or all(
            len(row["prompt_ids"]) + len(row[name]) <= self.max_length for row in rows for name in completions
        )
        if not fits:
            raise ValueError(
                f"{type(self).__name__}: a row is longer than max_length={self.max_length}, and a prompt that several "
                "completions share cannot be cut for one of them: set max_length in the trainer's config, which cuts "
                "rows when they are prepared"
            )
        return CompletionCollator(completions, values=values)(rows)


@dataclass
class DataCollatorForPreference(_OfCompletions):
    """Rows with `prompt_ids`, `chosen_ids` and `rejected_ids` to a batch, in which a prompt stands once.

    The trainers over pairs take it, for what their own collator does.
    """

    def __call__(self, examples: Sequence[Row]) -> RaggedBatch:
        if "prompt_ids" not in examples[0]:
            examples = [{"prompt_ids": [], **row} for row in examples]
        return self.collated(examples, ("chosen_ids", "rejected_ids"), ("margin", "number"))


@dataclass
class DataCollatorForUnpairedPreference(_OfCompletions):
    """Rows with `prompt_ids`, `completion_ids` and `label` to a batch; `KTOTrainer` and `BCOTrainer` take it, for
    what their own collator does.

    A mismatched completion for KTO's baseline may be there as `kl_completion_ids`, or TRL's `KL_completion_ids`.
    """

    def __call__(self, examples: Sequence[Row]) -> RaggedBatch:
        rows = [{{"KL_completion_ids": BASELINE}.get(name, name): v for name, v in row.items()} for row in examples]
        completions = ("completion_ids", BASELINE) if BASELINE in rows[0] else ("completion_ids",)
        return self.collated(rows, completions, ("label", "number"))


BASELINE = "kl_completion_ids"


@dataclass
class DataCollatorForChatML:
    """Conversations to a batch, of which the last message is scored; `SFTTrainer` with skip_prepare_dataset takes it.

    A row's `prompt`, where it is there, is its text before that message.
    """

    tokenizer: PreTrainedTokenizerBase
    ignore_index: int = IGNORE
    max_length: int | None = None
    """Most tokens of a row, whose end is kept; by default the tokenizer's, at most 1,024."""
    prompt_key: str = "prompt"
    messages_key: str = "messages"

    def __post_init__(self) -> None:
        if self.max_length is None:
            self.max_length = min(self.tokenizer.model_max_length, 1024)

    def __call__(self, examples: Sequence[Row]) -> RaggedBatch:
        return RaggedBatch.from_rows([self._row(row) for row in examples])

    def _row(self, row: Row) -> dict[str, list[int]]:
        messages: Any = row[self.messages_key]
        text: Any = self.tokenizer.apply_chat_template(messages, tokenize=False)
        prompt: Any = row.get(self.prompt_key)
        if prompt is None:
            prompt = self.tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
        whole, before = (self.tokenizer(each, add_special_tokens=False)["input_ids"] for each in (text, prompt))
        labels = [IGNORE] * len(before) + whole[len(before) :]
        kept = slice(max(len(whole) - (self.max_length or len(whole)), 0), None)
        return {"input_ids": whole[kept], "labels": labels[kept]}


def _only_torch(collator: Any) -> None:
    if collator.return_tensors != "pt":
        raise ValueError(
            f"{type(collator).__name__}: return_tensors={collator.return_tensors!r} is not there: batches are of torch"
        )
