"""A row of a dataset as the model will see it: its segments, and what of each is context, scored or dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.completion_rounds import completion_rounds
from lowtide.data.batches.token_rows import IGNORED, PREFIX, PREFIX_LENGTH, SEGMENTS
from lowtide.data.encode.truncation import kept_range, kept_ranges
from lowtide.data.options import PreferenceOptions, PrepareOptions
from lowtide.data.preference import prepare_pairs, prepare_unpaired
from lowtide.data.prepare import prepare

SHOWN_BEFORE = 12
"""Tokens that are shown of what a segment goes on from."""
NO_LIMIT = 2**31 - 1
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
    name: str = ""
    """Of a part of a row of preferences: "prompt", "chosen" and so on."""
    after: str = ""
    """What it goes on from, by name; empty where it goes on from none, or from the segment `prefix`."""

    def title(self, place: int, of: int) -> str:
        """Its name, or which of a row's so many segments it is, counted from 1."""
        return self.name or f"segment {place} of {of}"

    @property
    def counts(self) -> dict[str, int]:
        """Its tokens by kind, of those kinds that it has."""
        found = {kind: sum(part.tokens for part in self.parts if part.kind == kind) for kind in KINDS}
        return {kind: count for kind, count in found.items() if count}

    @property
    def where(self) -> str:
        """Where it goes on from another, up to `before`; empty where it goes on from none."""
        if self.prefix < 0 and not self.after:
            return ""
        after = self.after or f"segment {self.prefix + 1}"
        return f"goes on behind the first {self.seen:,} tokens of {after}, which end with "


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

    def kept(token_ids: Sequence[int]) -> range:
        return range(*(int(each[0]) for each in kept_range(np.array([len(token_ids)]), None, options.truncation)))

    found = []
    for start, end, prefix, seen in zip(
        starts, ends, whole.get(PREFIX) or alone, whole.get(PREFIX_LENGTH) or alone, strict=True
    ):
        before = whole["input_ids"][starts[prefix] : starts[prefix] + seen] if prefix >= 0 else []
        labels = [IGNORED] * len(before) + whole["labels"][start:end]
        token_ids = before + whole["input_ids"][start:end]
        scored = [label != IGNORED for label in labels]
        parts = list(_parts(token_ids, scored, len(before), kept(token_ids), tokenizer))
        found.append(ShownSegment(parts, prefix, len(before), str(tokenizer.decode(before[-SHOWN_BEFORE:]))))
    return found


def pair_of(
    row: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: PreferenceOptions,
    *,
    whole: bool = False,
    scores_prompt: bool = False,
) -> list[ShownSegment]:
    """The prompt that a pair of a dataset of one row becomes, and its completions.

    Args:
        whole: whether a side is read at its end, by a reward model, and a pair with a side that is too long dropped.
        scores_prompt: whether the prompt is scored too.

    Raises:
        ValueError: the row can't be used, or is dropped for another reason than its length.
    """
    prepared, _ = prepare_pairs(row, tokenizer, _unlimited(options), batch_size=1, name="shown", whole=whole)
    [pair] = list(cast(Any, prepared))
    if whole:
        return _read_at_ends(pair, options, tokenizer)
    return _completed(pair, {name: f"{name}_ids" for name in options.sides}, options, tokenizer, scores_prompt)


def singles_of(row: Dataset, tokenizer: PreTrainedTokenizerBase, options: PreferenceOptions) -> list[ShownSegment]:
    """The prompt and the completion that a dataset of one row becomes; of a pair that is taken apart, both of each.

    Raises:
        ValueError: the row can't be used.
    """
    prepared, _ = prepare_unpaired(row, tokenizer, _unlimited(options), batch_size=1, name="shown")
    found: list[ShownSegment] = []
    for each in list(cast(Any, prepared)):
        name = "desirable completion" if each["label"] else "undesirable completion"
        found += _completed(each, {name: "completion_ids"}, options, tokenizer)
    return found


def _unlimited(options: PreferenceOptions) -> PreferenceOptions:
    """Options that cut nothing, and take rows as these do: some limits keep turns from being taken apart."""
    limits = ("max_length", "max_prompt_length", "max_completion_length")
    far = {name: NO_LIMIT for name in limits if getattr(options, name) is not None}
    return replace(options, **far, num_proc=None)


def _read_at_ends(
    pair: Mapping[str, list[int]], options: PreferenceOptions, tokenizer: PreTrainedTokenizerBase
) -> list[ShownSegment]:
    """What a reward model sees of a pair: a value is read at the last token of each side."""
    prompt = pair["prompt_ids"]
    sides = {name: prompt + pair[f"{name}_ids"] for name in options.sides}
    longest = max(map(len, sides.values()))
    kept = range(longest if options.max_length is None or longest <= options.max_length else 0)
    parts = {"prompt": list(_parts(prompt, [False] * len(prompt), 0, kept, tokenizer))}
    for name, token_ids in sides.items():
        scored = [False] * (len(token_ids) - 1) + [True]
        parts[name] = list(_parts(token_ids, scored, len(prompt), kept, tokenizer))
    seen = {name: 0 if name == "prompt" else len(prompt) for name in parts}
    return _behind(prompt, [(name, seen[name], each) for name, each in parts.items()], tokenizer)


def _completed(
    row: Mapping[str, Any],
    sides: Mapping[str, str],
    options: PreferenceOptions,
    tokenizer: PreTrainedTokenizerBase,
    scores_prompt: bool = False,
) -> list[ShownSegment]:
    """The prompt of a prepared row and its completions, by their names and their columns."""
    prompt = row["prompt_ids"]
    rounds = [(name, each) for name, column in sides.items() for each in completion_rounds(row, column)]
    rows = [prompt[: each.seen] + list(each.token_ids) for _, each in rounds]
    lengths = [np.array([len(each)]) for each in rows]
    ranges = kept_ranges(lengths, np.array([len(prompt)]), options.truncation)
    kept = [range(int(start[0]), int(stop[0])) for start, stop in ranges]
    scored = [[False] * each.seen + [label != IGNORED for label in each.labels] for _, each in rounds]
    left = {name for (name, _), own, places in zip(rounds, scored, kept, strict=True) if any(_learned(own, places))}
    kept = kept if left == {*sides} else [range(0)] * len(kept)  # a pair is dropped with one of its sides
    shown = [("prompt", 0, list(_parts(prompt, [scores_prompt] * len(prompt), 0, kept[0], tokenizer)))]
    for number, ((name, each), token_ids, own, places) in enumerate(zip(rounds, rows, scored, kept, strict=True)):
        of_side = [place for place, (side, _) in enumerate(rounds) if side == name]
        told = f", segment {of_side.index(number) + 1} of {len(of_side)}" if len(of_side) > 1 else ""
        shown.append((name + told, each.seen, list(_parts(token_ids, own, each.seen, places, tokenizer))))
    return _behind(prompt, shown, tokenizer)


def _behind(
    prompt: list[int], shown: Sequence[tuple[str, int, list[Part]]], tokenizer: PreTrainedTokenizerBase
) -> list[ShownSegment]:
    """Segments by their names, which go on from so many tokens of the prompt; the first is the prompt."""
    found = []
    for name, seen, parts in shown if prompt else shown[1:]:
        before = str(tokenizer.decode(prompt[:seen][-SHOWN_BEFORE:]))
        found.append(ShownSegment(parts, seen=seen, before=before, name=name, after="the prompt" if seen else ""))
    return found


def _parts(
    token_ids: Sequence[int],
    scored: Sequence[bool],
    start: int,
    kept: range,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[Part]:
    """The parts of a row from its token `start` on."""
    learned = _learned(scored, kept)
    left_out = not any(learned) and any(scored)  # a segment without anything scored left is not computed

    def kind(place: int) -> str:
        if left_out or place not in kept:
            return DROPPED
        return SCORED if learned[place] else CONTEXT

    for name, places in groupby(range(start, len(token_ids)), key=kind):
        run = list(places)
        yield Part(name, len(run), str(tokenizer.decode([token_ids[place] for place in run])))


def _learned(scored: Sequence[bool], kept: range) -> list[bool]:
    """Which tokens are learned; the first that is kept has nothing to be predicted from."""
    return [each and place in kept and place > kept.start for place, each in enumerate(scored)]
