"""TRL's collators by name: called, they give padded tensors as TRL's do; a trainer asks them for a `RaggedBatch`.

A trainer has the collator that its method needs; these are for scripts that pass one, or make batches by hand. To a
trainer the arguments that are about padding (`pad_token_id`, `pad_to_multiple_of`, `padding_free`,
`return_position_ids`) make no difference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowtide.compat.templates.jinja import limit_templates
from lowtide.data.batches.collate import CompletionCollator
from lowtide.data.batches.completion_rounds import completion_rounds
from lowtide.data.batches.shared_rounds import whole_rounds
from lowtide.data.batches.token_rows import PREFIX, PREFIX_LENGTH, SEGMENTS
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import IGNORE

limit_templates()
Row = Mapping[str, Any]
MASKS = ("completion_mask", "assistant_masks")


class Collator(ABC):
    """What all of them have in common: padded tensors when called, a `RaggedBatch` for trainers."""

    is_default = False
    """Whether a trainer's own collator does the same: that of its method, which knows more of it."""

    def __call__(self, examples: Sequence[Row], return_tensors: str | None = None) -> dict[str, Any]:
        only_torch(self, return_tensors or "pt")
        return self.torch_call(examples)

    @abstractmethod
    def torch_call(self, examples: Sequence[Row]) -> dict[str, Any]:
        """Rows as padded tensors, [rows, longest]."""

    @abstractmethod
    def ragged(self, examples: Sequence[Row]) -> RaggedBatch:
        """Rows as a batch without padding."""

    @property
    def of_trainer(self) -> Callable[[Sequence[Row]], Any] | None:
        """What a trainer collates with; None for its method's own collator.

        A class derived from one of these may return other tensors, so that its own call is what counts.
        """
        calls = (type(self).__call__, type(self).torch_call)
        if not all(each.__module__.startswith("lowtide.") for each in calls):
            return self
        return None if self.is_default else self.ragged


@dataclass
class DataCollatorForLanguageModeling(Collator):
    """Tokenized rows (`input_ids`); `SFTTrainer` takes it.

    The tokens that are scored are those whose `labels` are not -100. Rows without labels are scored where a
    `completion_mask` or `assistant_masks` is 1, or without such a mask everywhere. Packed rows (`seq_lengths`) are as
    many segments to a trainer and with `padding_free`.

    Called, returns `input_ids`, `labels` and `attention_mask`, [rows, longest]; with `padding_free` one sequence
    [1, tokens] with `position_ids`, and the bounds that variable-length attention takes, in place of the mask.
    """

    pad_token_id: int | None = None
    padding_free: bool = False
    return_position_ids: bool = False
    """Return `position_ids` beside the mask."""
    pad_to_multiple_of: int | None = None
    max_length: int | None = None
    """Most tokens of a row that is kept."""
    completion_only_loss: bool = True
    """Score only what `completion_mask` marks, where there is one and no labels."""
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        only_torch(self, self.return_tensors)

    def torch_call(self, examples: Sequence[Row]) -> dict[str, Any]:
        rows = [whole_rounds(self._row(row)) for row in examples]
        restarts = self.padding_free or self.return_position_ids
        lengths = [row.get(SEGMENTS, [len(row["input_ids"])]) if restarts else [] for row in rows]
        positions = self.get_position_ids_from_packed_seq_lengths(lengths)
        tokens, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
        if self.padding_free:
            return self._flat(torch.cat(tokens), torch.cat(labels), torch.cat(positions))
        made = with_mask(tokens, self.pad_token_id or 0, self.pad_to_multiple_of)
        made |= {"labels": padded(labels, IGNORE, self.pad_to_multiple_of)}
        return made | ({"position_ids": padded(positions, 0, self.pad_to_multiple_of)} if restarts else {})

    def ragged(self, examples: Sequence[Row]) -> RaggedBatch:
        return RaggedBatch.from_rows([self._row(row) for row in examples])

    @staticmethod
    def get_position_ids_from_packed_seq_lengths(batch_seq_lengths: Sequence[Sequence[int]]) -> list[Tensor]:
        """Of each packed row the positions of its tokens, which restart in each of its segments."""
        places = [[place for length in row for place in range(length)] for row in batch_seq_lengths]
        return [torch.tensor(row, dtype=torch.long) for row in places]

    def _flat(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> dict[str, Any]:
        """One sequence, of which a segment's first token has no label; a place that pads is a segment of its own."""
        labels = labels.masked_fill(positions == 0, IGNORE)
        fills = {"input_ids": self.pad_token_id or 0, "labels": IGNORE, "position_ids": 0}
        given = zip(fills.items(), (tokens, labels, positions), strict=True)
        made = {name: padded([each], fill, self.pad_to_multiple_of) for (name, fill), each in given}
        starts = (made["position_ids"][0] == 0).nonzero().flatten()
        bounds = torch.cat([starts, torch.tensor([made["input_ids"].shape[1]])]).int()
        longest, segment = int(bounds.diff().max()), torch.arange(len(starts), dtype=torch.int32)
        return {
            **made,
            **{"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest},
            "seq_idx": segment.repeat_interleave(bounds.diff())[None],
        }

    def _row(self, row: Row) -> dict[str, Any]:
        labels = list(row.get("labels", row["input_ids"]))
        masks = [row[name] for name in MASKS if name in row and (name != MASKS[0] or self.completion_only_loss)]
        for mask in masks if "labels" not in row else ():
            labels = [label if kept else IGNORE for label, kept in zip(labels, mask, strict=True)]
        made = {"input_ids": list(row["input_ids"]), "labels": labels}
        if SEGMENTS in row:
            return made | {name: row[name] for name in (SEGMENTS, PREFIX, PREFIX_LENGTH) if name in row}
        return {name: values[: self.max_length] for name, values in made.items()}


@dataclass
class _OfCompletions(Collator):
    """What the collators of prompts and completions have in common."""

    pad_token_id: int | None = None
    max_length: int | None = None
    """Most tokens of a prompt with a completion."""
    truncation_mode: str = "keep_start"
    """Which end of them is kept: keep_start or keep_end."""
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        only_torch(self, self.return_tensors)
        if self.truncation_mode not in ("keep_start", "keep_end"):
            raise ValueError(f"truncation_mode={self.truncation_mode!r} is not one of keep_start, keep_end")

    @property
    def is_default(self) -> bool:
        return self.max_length is None

    def padded_rows(self, rows: Sequence[Row], completions: Sequence[str]) -> dict[str, Tensor]:
        """The prompts with the first completions of all rows, then with the second ones."""
        pairs = [(list(row.get("prompt_ids", ())), list(row[name])) for name in completions for row in rows]
        whole = slice(None)
        if self.max_length is not None:
            whole = slice(self.max_length) if self.truncation_mode == "keep_start" else slice(-self.max_length, None)
        tokens = [torch.tensor((prompt + tail)[whole]) for prompt, tail in pairs]
        masks = [torch.tensor(([0] * len(prompt) + [1] * len(tail))[whole]) for prompt, tail in pairs]
        made = with_mask(tokens, self.pad_token_id or 0, self.pad_to_multiple_of)
        if "prompt_ids" not in rows[0]:
            return made
        return made | {"completion_mask": padded(masks, 0, self.pad_to_multiple_of)}

    def collated(self, rows: Sequence[Row], completions: tuple[str, ...], values: tuple[str, ...]) -> RaggedBatch:
        fits = self.max_length is None or all(
            own.seen + len(own.token_ids) <= self.max_length
            for row in rows
            for name in completions
            for own in completion_rounds(row, name)
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
    """Rows with `chosen_ids`, `rejected_ids` and in most cases `prompt_ids`; the trainers over pairs take it, for what
    their own collator does.

    Called, returns `input_ids` and `attention_mask`, [2 * rows, longest], all chosen ones first; of rows with a prompt
    `completion_mask`; and what there is of `margin`, `ref_chosen_logps` and `ref_rejected_logps`, [rows].
    """

    def torch_call(self, examples: Sequence[Row]) -> dict[str, Any]:
        made = self.padded_rows(examples, ("chosen_ids", "rejected_ids"))
        return made | columns_of(examples, "ref_chosen_logps", "ref_rejected_logps", "margin")

    def ragged(self, examples: Sequence[Row]) -> RaggedBatch:
        """A batch in which a prompt stands once."""
        if "prompt_ids" not in examples[0]:
            examples = [{"prompt_ids": [], **row} for row in examples]
        return self.collated(examples, ("chosen_ids", "rejected_ids"), ("margin", "number"))


@dataclass
class DataCollatorForUnpairedPreference(_OfCompletions):
    """Rows with `prompt_ids`, `completion_ids` and `label`; `KTOTrainer` and `BCOTrainer` take it, for what their own
    collator does.

    A mismatched completion for KTO's baseline may be there as `KL_completion_ids`, or `kl_completion_ids`.

    Called, returns `input_ids`, `attention_mask` and `completion_mask`, [rows, longest], the same with `KL_` in front
    of the mismatched ones, and `label`, `ref_logps` and `ref_KL_logps`, [rows].
    """

    def torch_call(self, examples: Sequence[Row]) -> dict[str, Any]:
        made: dict[str, Any] = dict(self.padded_rows(examples, ("completion_ids",)))
        for name in (BASELINE, THEIR_BASELINE):
            if name in examples[0]:
                made |= {f"KL_{each}": values for each, values in self.padded_rows(examples, (name,)).items()}
        return made | columns_of(examples, "ref_logps", "ref_KL_logps", "label")

    def ragged(self, examples: Sequence[Row]) -> RaggedBatch:
        rows = [{{THEIR_BASELINE: BASELINE}.get(name, name): v for name, v in row.items()} for row in examples]
        completions = ("completion_ids", BASELINE) if BASELINE in rows[0] else ("completion_ids",)
        return self.collated(rows, completions, ("label", "number"))


BASELINE, THEIR_BASELINE = "kl_completion_ids", "KL_completion_ids"


@dataclass
class DataCollatorForChatML(Collator):
    """Conversations, of which the last message is scored; `SFTTrainer` with skip_prepare_dataset takes it.

    A row's `prompt`, where it is there, is its text before that message.

    Called, returns `input_ids`, `attention_mask` and `labels`, and of the texts before the last message `prompts` and
    `prompt_attention_mask`: all [rows, longest], padded on the left.
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

    def torch_call(self, examples: Sequence[Row]) -> dict[str, Any]:
        fill: Any = self.tokenizer.pad_token_id or 0
        rows = [self._row(row) for row in examples]
        tokens, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
        befores = [row[: int((label == IGNORE).sum())] for row, label in zip(tokens, labels, strict=True)]
        prompts = with_mask(befores, fill, left=True)
        made = with_mask(tokens, fill, left=True) | {"labels": padded(labels, self.ignore_index, left=True)}
        return made | {"prompts": prompts["input_ids"], "prompt_attention_mask": prompts["attention_mask"]}

    def ragged(self, examples: Sequence[Row]) -> RaggedBatch:
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


def padded(rows: Sequence[Tensor], fill: int, multiple: int | None = None, *, left: bool = False) -> Tensor:
    """[rows, longest], of at least as many places as are a multiple of `multiple`."""
    longest = max(map(len, rows))
    longest += -longest % (multiple or 1)
    made = torch.full((len(rows), longest), fill, dtype=torch.long)
    for line, row in zip(made, rows, strict=True):
        line[longest - len(row) if left else 0 :][: len(row)] = row
    return made


def with_mask(
    tokens: Sequence[Tensor], fill: int, multiple: int | None = None, *, left: bool = False
) -> dict[str, Tensor]:
    masks = [torch.ones_like(each) for each in tokens]
    return {
        "input_ids": padded(tokens, fill, multiple, left=left),
        "attention_mask": padded(masks, 0, multiple, left=left),
    }


def columns_of(rows: Sequence[Row], *names: str) -> dict[str, Tensor]:
    """Those columns of numbers that the rows have."""
    return {name: torch.tensor([row[name] for row in rows]) for name in names if name in rows[0]}


def only_torch(collator: Any, return_tensors: str) -> None:
    if return_tensors != "pt":
        name = type(collator).__name__
        raise ValueError(f"{name}: return_tensors={return_tensors!r} is not there: batches are of torch")
