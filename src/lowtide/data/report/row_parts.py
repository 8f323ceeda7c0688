"""A row of a dataset as the model will see it: its segments, and what of each is context, scored or dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.token_rows import IGNORED, PREFIX, PREFIX_LENGTH, SEGMENTS
from lowtide.data.encode.truncation import kept_range
from lowtide.data.options import PrepareOptions
from lowtide.data.prepare import prepare

SHOWN_BEFORE = 12
"""Tokens that are shown of what a segment goes on from."""
CONTEXT, SCORED, DROPPED = KINDS = ("context", "scored", "dropped")


@dataclass(frozen=True)
class Part:
    """Tokens side by side of one kind."""

    kind: str
    tokens: int
    text: str


@dataclass(frozen=True)
class ShownSegment:
    """A segment, and where it goes on from another."""

    parts: list[Part]
    prefix: int = -1
    """The segment that it goes on from; -1 where it goes on from none."""
    seen: int = 0
    """From how many of its tokens."""
    before: str = ""
    """The last of the text that it goes on from."""

    @property
    def counts(self) -> dict[str, int]:
        """Its tokens by kind, of those kinds that it has."""
        found = {kind: sum(part.tokens for part in self.parts if part.kind == kind) for kind in KINDS}
        return {kind: count for kind, count in found.items() if count}

    @property
    def where(self) -> str:
        """Where it goes on from another, up to `before`; empty where it goes on from none."""
        if self.prefix < 0:
            return ""
        return f"goes on behind the first {self.seen:,} tokens of segment {self.prefix + 1}, which end with "


def segments_of(row: Dataset, tokenizer: PreTrainedTokenizerBase, options: PrepareOptions) -> list[ShownSegment]:
    """The segments that a dataset of one row becomes. What a limit on its length cuts is dropped.

    Raises:
        ValueError: the row can't be used, or nothing of it is scored.
    """
    sharing = options.prefix_sharing and options.truncation_mode == "keep_start"  # rounds that lose their beginnings
    unlimited = replace(options, max_length=None, num_proc=None, prefix_sharing=sharing)
    prepared, _ = prepare(row, tokenizer, unlimited, batch_size=1, packing=False, name="shown")
    [whole] = list(cast(Any, prepared))
    ends = np.cumsum(whole.get(SEGMENTS) or [len(whole["input_ids"])]).tolist()
    starts = [0, *ends[:-1]]
    alone = [-1] * len(ends)
    found = []
    for start, end, prefix, seen in zip(
        starts, ends, whole.get(PREFIX) or alone, whole.get(PREFIX_LENGTH) or alone, strict=True
    ):
        before = whole["input_ids"][starts[prefix] : starts[prefix] + seen] if prefix >= 0 else []
        labels = [IGNORED] * len(before) + whole["labels"][start:end]
        parts = list(_parts(before + whole["input_ids"][start:end], labels, len(before), tokenizer, options))
        found.append(ShownSegment(parts, prefix, len(before), str(tokenizer.decode(before[-SHOWN_BEFORE:]))))
    return found


def _parts(
    token_ids: Sequence[int],
    labels: Sequence[int],
    start: int,
    tokenizer: PreTrainedTokenizerBase,
    options: PrepareOptions,
) -> Iterator[Part]:
    """The parts of a row from its token `start` on."""
    first, last = (int(each[0]) for each in kept_range(np.array([len(token_ids)]), None, options.truncation))
    scored = [label != IGNORED and place > first for place, label in enumerate(labels)]
    left_out = not any(scored[first:last])  # a segment without anything scored left is not computed

    def kind(place: int) -> str:
        if left_out or not first <= place < last:
            return DROPPED
        return SCORED if scored[place] else CONTEXT

    for name, places in groupby(range(start, len(token_ids)), key=kind):
        run = list(places)
        yield Part(name, len(run), str(tokenizer.decode([token_ids[place] for place in run])))
