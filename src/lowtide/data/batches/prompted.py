"""Rows of which a completion may be written anew.

The prompt of a row is what stands before its first scored token. Of a row of several segments, turns that no other
segment contains, it is what stands before that of the segment with the shortest context: what is written is the first
turn, unless `truncation_mode="keep_end"` took more of its context than of another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets import Dataset
from jaxtyping import Int

from lowtide.data.batches.collate import RaggedCollator
from lowtide.data.batches.heaviest import of_segments, row_lengths
from lowtide.data.batches.shared_rounds import tokens_before
from lowtide.data.batches.token_rows import PREFIX, PREFIX_LENGTH, SEGMENTS
from lowtide.ragged import PositionRule, RaggedBatch, SegmentImage, Shown
from lowtide.score_rules import IGNORE

UNSCORED = np.iinfo(np.int64).max


@dataclass(frozen=True)
class PromptedCollator(RaggedCollator):
    """Prepared rows (`input_ids`, `labels`) to a `RaggedBatch`."""

    sharing: bool = True
    """Whether what segments of a row have in common is computed once."""
    most: int = 0
    """Tokens of a completion that is written in a row's place; 0 where none is."""

    def row_lengths(self, dataset: Dataset) -> Int[np.ndarray, " rows"] | None:
        """The tokens of each row, with its own completions or the longest that may be written; None where rows have no
        labels."""
        if "labels" not in dataset.column_names:
            return None
        repeats = PREFIX in dataset.column_names and not self.sharing
        counts = of_segments(dataset, np.add) if repeats else row_lengths(dataset)
        if counts is None or not self.most or not len(counts):
            return counts
        return np.maximum(counts, _prompt_lengths(dataset) + self.most)


def _prompt_lengths(dataset: Dataset) -> Int[np.ndarray, " rows"]:
    """The tokens of the prompt of each row, of which each has something scored."""
    names = [name for name in ("labels", SEGMENTS, PREFIX, PREFIX_LENGTH) if name in dataset.column_names]
    found = []
    for part in dataset.with_format("arrow").select_columns(names).iter(batch_size=1000):
        lists: Any = {name: part[name].combine_chunks() for name in names}  # type: ignore[index]
        flat = {name: each.flatten().to_numpy() for name, each in lists.items()}
        tokens = lists["labels"].value_lengths().to_numpy()
        several = SEGMENTS in flat
        counts = lists[SEGMENTS].value_lengths().to_numpy() if several else np.ones_like(tokens)
        lengths = flat[SEGMENTS].astype(np.int64) if several else tokens.astype(np.int64)
        before = tokens_before(counts, lengths, flat.get(PREFIX), flat.get(PREFIX_LENGTH))
        starts = np.cumsum(lengths) - lengths
        scored = flat["labels"] != IGNORE
        scored[starts[before == 0]] = False  # which nothing predicts
        places = np.append(np.flatnonzero(scored), UNSCORED)
        first = places[np.searchsorted(places, starts)]
        contexts = np.where(first < starts + lengths, before + first - starts, UNSCORED)
        found.append(np.minimum.reduceat(contexts, np.cumsum(counts) - counts))
    return np.concatenate(found)


def _first_turns(batch: RaggedBatch) -> list[tuple[int, int]]:
    """Of each row the segment whose first scored token has the fewest before it, and how many these are."""
    firsts = batch.score_index.tolist()
    found = []
    for numbers in batch.row_segments:
        contexts = [(batch.segments[numbers[0]].length, numbers[0])]  # of a row without a scored token
        for number, part in ((each, batch.segments[each]) for each in numbers):
            if part.score_start < part.score_stop:  # what goes on from another may be scored from its first token on
                own = max(firsts[part.score_start] + 1 - part.start, 0)
                contexts.append((part.after(batch.segments) + own, number))
        length, number = min(contexts)
        found.append((number, length))
    return found


def prompts_of(batch: RaggedBatch) -> list[list[int]]:
    """The tokens before what is written anew of each row."""
    tokens, found = batch.token_ids.tolist(), []
    for number, length in _first_turns(batch):
        part = batch.segments[number]
        before = part.prefix_among(batch.segments)
        seen = [] if before is None else tokens[before.start : before.stop]
        found.append([*seen, *tokens[part.start : part.start + length - len(seen)]])
    return found


def prompt_images(batch: RaggedBatch, prompts: Sequence[Sequence[int]]) -> list[list[SegmentImage]]:
    """The images among the tokens of the prompts of a batch; what they start at is a place in the prompt."""
    found = []
    for number, length in _first_turns(batch) if batch.images else ():
        part = batch.segments[number]
        seen = part.after(batch.segments)
        own = [replace(image, start=image.start + seen) for image in batch.images[number]]
        images = [*part.images_before(batch.segments, batch.images), *own]
        found.append([image for image in images if image.start < length])
    return found or [[] for _ in prompts]


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
    """The batch with completions of so many tokens, whatever these are, in the place of rows that are shorter: what
    takes most memory.

    Args:
        rule: how the model counts positions on several axes.
    """
    prompts = prompts_of(batch)
    images, rows = prompt_images(batch, prompts), []
    for number, (prompt, shown) in enumerate(zip(prompts, images, strict=True)):
        own = sum(batch.segments[each].length for each in batch.row_segments[number])
        longest = own < len(prompt) + most
        rows.append(
            completed([prompt], [[0] * most], Shown([shown], rule)).to(batch.token_ids.device)
            if longest
            else batch.select_rows([number])
        )
    return RaggedBatch.concat(rows)
