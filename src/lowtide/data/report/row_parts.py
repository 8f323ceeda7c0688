"""A row of a dataset as the model will see it: its segments, and what of each is context, scored or dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.token_rows import IGNORED
from lowtide.data.encode.truncation import kept_range
from lowtide.data.options import PrepareOptions
from lowtide.data.prepare import prepare

CONTEXT, SCORED, DROPPED = KINDS = ("context", "scored", "dropped")


@dataclass(frozen=True)
class Part:
    """Tokens side by side of one kind."""

    kind: str
    tokens: int
    text: str


def segments_of(row: Dataset, tokenizer: PreTrainedTokenizerBase, options: PrepareOptions) -> list[list[Part]]:
    """The parts of each segment that a dataset of one row becomes. What a limit on its length cuts is dropped.

    Raises:
        ValueError: the row can't be used, or nothing of it is scored.
    """
    unlimited = replace(options, max_length=None, num_proc=None)
    prepared, _ = prepare(row, tokenizer, unlimited, batch_size=1, packing=False, name="shown")
    [whole] = list(cast(Any, prepared))
    ends = np.cumsum(whole.get("seq_lengths") or [len(whole["input_ids"])]).tolist()
    return [
        list(_parts(whole["input_ids"][start:end], whole["labels"][start:end], tokenizer, options))
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _parts(
    token_ids: Sequence[int], labels: Sequence[int], tokenizer: PreTrainedTokenizerBase, options: PrepareOptions
) -> Iterator[Part]:
    first, last = (int(each[0]) for each in kept_range(np.array([len(token_ids)]), None, options.truncation))
    scored = [label != IGNORED and place > first for place, label in enumerate(labels)]
    left_out = not any(scored[first:last])  # a segment without anything scored left is not computed

    def kind(place: int) -> str:
        if left_out or not first <= place < last:
            return DROPPED
        return SCORED if scored[place] else CONTEXT

    for name, places in groupby(range(len(token_ids)), key=kind):
        run = list(places)
        yield Part(name, len(run), str(tokenizer.decode([token_ids[place] for place in run])))
