"""TRL's collators of rows with images by their names: called, they give padded tensors and pixels as TRL's do.

Trainers make images ready themselves, of the same rows: given one of these, a trainer uses its own collator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import ProcessorMixin

from lowtide.data.formats.images import in_parts, take_images
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import IGNORE
from lowtide.scripts.collators import Collator, Row, columns_of, padded
from lowtide.scripts.rows import maybe_apply_chat_template

MESSAGES = ("messages", "prompt", "completion", "chosen", "rejected")


@dataclass
class _OfImages(Collator):
    """What they have in common."""

    processor: ProcessorMixin
    max_length: int | None = None
    """Most tokens of a row; the rest is cut off. To a trainer give `max_length` of its config."""
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    @property
    def is_default(self) -> bool:
        return self.max_length is None

    def ragged(self, examples: Sequence[Row]) -> RaggedBatch:
        raise ValueError(
            f"{type(self).__name__}(max_length={self.max_length}): a trainer prepares rows with images itself: set "
            "max_length in its config, and leave the collator's out"
        )

    def texts_of(self, examples: Sequence[Row]) -> tuple[list[dict[str, Any]], list[list[Any]]]:
        """(the rows as texts by the processor's template, the pictures of each)."""
        rows, pictures = [], []
        for example in examples:
            row, stored = take_images(example)
            row |= {name: in_parts(row[name]) for name in MESSAGES if isinstance(row.get(name), list)}
            rows.append({**row, **maybe_apply_chat_template(row, self.processor)})
            pictures.append([datasets.Image().decode_example(dict(each)) for each in stored])
        return rows, pictures

    def processed(self, texts: Sequence[str], pictures: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        """What the processor makes of texts and their pictures."""
        call: Any = self.processor
        images = list(pictures) if any(pictures) else None
        how = {"padding": True, "padding_side": "right", "add_special_tokens": False, "return_tensors": "pt"}
        return dict(call(images=images, text=list(texts), **how))

    def joined(self, before: Mapping[str, Tensor], tails: Sequence[str]) -> dict[str, Tensor]:
        """What was processed with a text after each, with a `completion_mask`; all that is of tokens is padded anew."""
        kept = before["attention_mask"].bool()
        tokenizer: Any = getattr(self.processor, "tokenizer", self.processor)
        ends = [
            torch.tensor(tokenizer(tail, add_special_tokens=False)["input_ids"], dtype=torch.long) for tail in tails
        ]
        made = dict(before)
        for name, values in before.items():
            if values.shape != kept.shape:
                continue  # of images
            after = ends if name == "input_ids" else [torch.full_like(end, name == "attention_mask") for end in ends]
            made[name] = self._filled(name, [row[own] for row, own in zip(values, kept, strict=True)], after)
        prompts = [torch.zeros_like(row[own]) for row, own in zip(before["input_ids"], kept, strict=True)]
        made["completion_mask"] = self._filled("completion_mask", prompts, [torch.ones_like(end) for end in ends])
        return made

    def _filled(self, name: str, prompts: Sequence[Tensor], ends: Sequence[Tensor]) -> Tensor:
        rows = [torch.cat(pair)[: self.max_length] for pair in zip(prompts, ends, strict=True)]
        return padded(rows, self.fill if name == "input_ids" else 0, self.pad_to_multiple_of)

    @property
    def fill(self) -> int:
        """The token in places that hold none."""
        tokenizer: Any = getattr(self.processor, "tokenizer", self.processor)
        return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


@dataclass
class DataCollatorForVisionLanguageModeling(_OfImages):
    """Rows with images, and `messages`, a text, or `prompt` and `completion`, for `SFTTrainer`.

    Called, returns `input_ids`, `attention_mask` and `labels`, [rows, longest], and what the processor makes of images.
    Every token of a row is scored, or with `completion_only_loss` those of the completion.
    """

    completion_only_loss: bool = False
    dataset_text_field: str = "text"

    def torch_call(self, examples: Sequence[Row]) -> dict[str, Any]:
        rows, pictures = self.texts_of(examples)
        field = "text" if "messages" in examples[0] else self.dataset_text_field
        if field not in rows[0]:
            before = self.processed([row["prompt"] for row in rows], pictures)
            made = self.joined(before, [row["completion"] for row in rows])
            scored = made.pop("completion_mask") if self.completion_only_loss else made["attention_mask"]
            made.pop("completion_mask", None)
        else:
            if self.completion_only_loss:
                raise ValueError("completion_only_loss=True scores completions, and rows of one text have none")
            made = self.joined(self.processed([row[field] for row in rows], pictures), [""] * len(rows))
            scored = made["attention_mask"]
            del made["completion_mask"]
        return made | {"labels": made["input_ids"].masked_fill(scored == 0, IGNORE)}


@dataclass
class DataCollatorForVisionPreference(_OfImages):
    """Rows with images, `prompt`, `chosen` and `rejected`; the trainers over pairs take it for their own collator.

    Called, returns `input_ids`, `attention_mask` and `completion_mask`, [2 * rows, longest], all chosen ones first, and
    what the processor makes of images, likewise twice.
    """

    def torch_call(self, examples: Sequence[Row]) -> dict[str, Any]:
        rows, pictures = self.texts_of(examples)
        before = self.processed([row["prompt"] for row in rows] * 2, pictures * 2)
        return self.joined(before, [row[name] for name in ("chosen", "rejected") for row in rows])


@dataclass
class DataCollatorForVisionUnpairedPreference(_OfImages):
    """Rows with images, `prompt`, `completion` and `label`; `KTOTrainer` and `BCOTrainer` take it for their own
    collator.

    Called, returns `input_ids`, `attention_mask` and `completion_mask`, [rows, longest], what the processor makes of
    images, and `label`; with `calculate_kl` also with `KL_` in front the prompts with the completion of the row before.
    """

    calculate_kl: bool = True

    def torch_call(self, examples: Sequence[Row]) -> dict[str, Any]:
        rows, pictures = self.texts_of(examples)
        before = self.processed([row["prompt"] for row in rows], pictures)
        completions = [row["completion"] for row in rows]
        made = self.joined(before, completions) | columns_of(examples, "label")
        if not self.calculate_kl:
            return made
        mismatched = self.joined(before, [*completions[-1:], *completions[:-1]])
        own = [name for name, values in mismatched.items() if name not in before or values is not before[name]]
        return made | {f"KL_{name}": mismatched[name] for name in own}
