"""Rows whose completions may be written anew: the prompt of a row is what stands before its first scored token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from datasets import Dataset
from jaxtyping import Int

from lowtide.data.batches.collate import RaggedCollator
from lowtide.ragged import PositionRule, RaggedBatch, SegmentImage, Shown
from lowtide.score_rules import IGNORE


@dataclass(frozen=True)
class PromptedCollator(RaggedCollator):
    """Prepared rows (`input_ids`, `labels`) to a `RaggedBatch`."""

    most: int = 0
    """Tokens of a completion that is written in a row's place; 0 where none is."""

    def row_lengths(self, dataset: Dataset) -> Int[np.ndarray, " rows"] | None:
        """The tokens of each row, with its own completion or the longest that may be written; None where rows have no
        labels."""
        if "labels" not in dataset.column_names:
            return None
        table = dataset.with_format("arrow").select_columns(["labels"])
        parts = [self._lengths(part["labels"].combine_chunks()) for part in table.iter(batch_size=1000)]  # type: ignore
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def _lengths(self, labels: pa.ListArray) -> Int[np.ndarray, " rows"]:
        counts = labels.value_lengths().to_numpy().astype(np.int64)
        if not self.most:
            return counts
        starts = np.cumsum(counts) - counts
        places = np.flatnonzero(labels.flatten().to_numpy() != IGNORE)
        first = np.searchsorted(places, starts)  # every row has something scored
        return np.maximum(counts, places[first] - starts + self.most)


def prompts_of(batch: RaggedBatch) -> list[list[int]]:
    """The tokens before what is scored, of each row; a row is one segment. Images stand before it."""
    tokens, firsts = batch.token_ids.tolist(), batch.score_index.tolist()
    return [tokens[part.start : firsts[part.score_start] + 1] for part in batch.segments]


def prompt_images(batch: RaggedBatch, prompts: Sequence[Sequence[int]]) -> list[list[SegmentImage]]:
    """The images among the tokens of the prompts of a batch."""
    pairs = zip(batch.segment_images, prompts, strict=True)
    return [[image for image in images if image.start < len(prompt)] for images, prompt in pairs]


def completed(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], shown: Shown | None = None
) -> RaggedBatch:
    """Prompts with completions, whose tokens are scored, as the rows of a batch.

    Args:
        shown: the images of the prompts; None of text alone.
    """
    pairs = list(zip(prompts, completions, strict=True))
    return RaggedBatch.from_segments(
        [[*prompt, *completion] for prompt, completion in pairs],
        [[IGNORE] * len(prompt) + [*completion] for prompt, completion in pairs],
        shown=shown,
    )


def with_longest(batch: RaggedBatch, epoch: int, most: int, rule: PositionRule | None = None) -> RaggedBatch:
    """The batch with each completion at least so many tokens long, whatever these are: what takes most memory.

    Args:
        rule: how the model counts positions on several axes.
    """
    own, prompts = [part.score_stop - part.score_start for part in batch.segments], prompts_of(batch)
    shown = Shown(prompt_images(batch, prompts), rule)
    return completed(prompts, [[0] * max(most, each) for each in own], shown).to(batch.token_ids.device)
