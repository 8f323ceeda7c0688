"""A batch of encoded preferences to the columns that are cached: what truncation leaves of each part, and the notes.

A pair is one row with the parts prompt, chosen, rejected and what other sides it has; a labelled completion has prompt
and completion. The prompt stands there once, as it is computed. Beside a completion of several turns stand its rounds
(see `completion_rounds`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Features, List, Value
from jaxtyping import Bool, Int

from lowtide.data.batches.completion_rounds import first_turns, rounds_of_sides
from lowtide.data.batches.token_rows import IGNORED, TokenRows, list_column
from lowtide.data.encode.sides import EncodedSides, merged_prompts, prompt_lengths, share_prompts
from lowtide.data.encode.truncation import Truncation, cut_rounds, first_round_lengths, kept_ranges
from lowtide.data.report.doubts import DOUBT_NOTES, doubt_column
from lowtide.data.report.row_stats import CUT_AWAY, CUT_PART, NOTES

SAME = "chosen equals rejected"
TOO_LONG = "longer than max_length"
REASONS = ("kept", SAME, "no scored token", CUT_AWAY, TOO_LONG)
"""Why a row is not trained on; the index is what is noted down."""
UNPAIRED_PARTS = ("prompt", "completion")
WHOLE_COMPLETION = "whole_completion_ids"
"""The completion as long as any prompt leaves room for it: what is left of it depends on the prompt that it follows."""


def pair_parts(sides: Sequence[str]) -> tuple[str, ...]:
    """The parts of a pair with these sides."""
    return ("prompt", *sides)


def token_columns(parts: Sequence[str]) -> list[str]:
    return [f"{part}_ids" for part in parts]


def noted_features(parts: Sequence[str], **more: Value | List) -> Features:
    """The columns of cached rows with these parts: tokens, notes, and `more`."""
    columns = {name: List(Value("int32")) for name in token_columns(parts)}
    cut = {CUT_PART + part: Value("int32") for part in parts}
    return Features({**columns, **more, **NOTES, **DOUBT_NOTES, **cut})


def pair_table(encoded: EncodedSides, truncation: Truncation, *, margins: bool) -> pa.Table:
    """Pairs with their notes."""
    whole = share_prompts(encoded.sides)
    kept, repeated = _truncated(whole, truncation)
    whole_scored, scored = ([_scored(side) for side in sides] for sides in (whole, kept))
    same = [equal_rows(*whole[:2]), np.minimum.reduce(whole_scored) == 0]
    dropped = np.select([*same, np.minimum.reduce(scored) == 0, equal_rows(*kept[:2])], [1, 2, 3, 1], default=0)
    table = _noted(pair_parts(encoded.names), whole, kept, np.add.reduce(scored), dropped, repeated)
    return _with_margins(table, encoded) if margins else table


def whole_pair_table(encoded: EncodedSides, max_length: int | None, *, margins: bool) -> pa.Table:
    """Pairs for a reward model, with their notes: nothing is cut, and a side is scored at its last token."""
    sides = encoded.sides
    longest = np.maximum.reduce([side.lengths for side in sides])
    too_long = longest > (max_length or np.inf)
    empty = np.minimum.reduce([side.lengths for side in sides]) == 0
    dropped = np.select([equal_rows(*sides[:2]), empty, too_long], [1, 2, REASONS.index(TOO_LONG)], default=0)
    table = _noted(pair_parts(encoded.names), sides, sides, np.full(len(dropped), len(sides)), dropped)
    return _with_margins(table, encoded) if margins else table


def unpaired_table(encoded: EncodedSides, truncation: Truncation, *, whole_completions: bool) -> pa.Table:
    """Labelled completions with their notes; those of a pair one after the other."""
    tables = [_completion_table(side, truncation, whole_completions=whole_completions) for side in encoded.sides]
    rows = len(encoded.rows)
    if len(tables) == 1:
        labels = [row.label for row in encoded.rows]
        return tables[0].append_column("label", pa.array(labels, pa.bool_()))
    alternating = np.arange(2 * rows).reshape(2, rows).T.ravel()
    labels = np.tile([True, False], rows)
    return pa.concat_tables(tables).take(alternating).append_column("label", pa.array(labels, pa.bool_()))


def _completion_table(side: TokenRows, truncation: Truncation, *, whole_completions: bool) -> pa.Table:
    [kept], repeated = _truncated([side], truncation)
    scored = _scored(kept)
    dropped = np.select([_scored(side) == 0, scored == 0], [2, 3], default=0)
    table = _noted(UNPAIRED_PARTS, [side], [kept], scored, dropped, repeated)
    if whole_completions:
        starts, stops = first_turns(side)
        lengths = np.minimum(stops - starts, _most_of_a_completion(truncation))
        lengths = np.where(dropped == 0, lengths, 0)
        completion = side.cut(starts, starts + lengths)
        table = table.append_column(WHOLE_COMPLETION, list_column(completion.token_ids, completion.offsets))
    return table


def _most_of_a_completion(truncation: Truncation) -> int:
    limits = (truncation.max_length, truncation.max_completion_length)
    return min((limit for limit in limits if limit is not None), default=np.iinfo(np.int32).max)


def _truncated(sides: Sequence[TokenRows], truncation: Truncation) -> tuple[list[TokenRows], list[Any]]:
    """What is kept of sides, and how many tokens of its prompt each row of them repeats (see `cut_rounds`)."""
    ranges = kept_ranges([first_round_lengths(side) for side in sides], prompt_lengths(sides[0]), truncation)
    cut = [
        cut_rounds(side, *kept, truncation) if any(side.rounds or ()) else (side.cut(*kept), 0)
        for side, kept in zip(sides, ranges, strict=True)
    ]
    return [side for side, _ in cut], [repeated for _, repeated in cut]


def _scored(side: TokenRows) -> Int[np.ndarray, " rows"]:
    """How many tokens of each completion are scored: all, but for the first where no prompt comes before it, and for
    what is context of later turns."""
    ignored = np.append(0, np.cumsum(side.labels == IGNORED))
    prompts = prompt_lengths(side)
    contexts = ignored[side.offsets[1:]] - ignored[side.offsets[:-1] + prompts]
    unpredicted = (prompts == 0) & (np.append(side.labels, IGNORED)[side.offsets[:-1]] != IGNORED)
    return side.lengths - np.where(side.lengths > 0, prompts + unpredicted + contexts, 0)


def equal_rows(one: TokenRows, other: TokenRows) -> Bool[np.ndarray, " rows"]:
    """Which rows have the same tokens in both."""
    alike = one.lengths == other.lengths
    zeros, lengths = np.zeros_like(one.lengths), np.where(alike, one.lengths, 0)
    one, other = one.cut(zeros, lengths), other.cut(zeros, lengths)
    differing = np.zeros(len(one.token_ids) + 1, dtype=np.int64)
    np.cumsum(one.token_ids != other.token_ids, out=differing[1:])
    return alike & (np.diff(differing[one.offsets]) == 0)


def _noted(
    parts: Sequence[str],
    whole: Sequence[TokenRows],
    kept: Sequence[TokenRows],
    scored: Int[np.ndarray, " rows"],
    dropped: Int[np.ndarray, " rows"],
    repeated: Sequence[Any] = (),
) -> pa.Table:
    """The parts of the kept rows, and the notes on all.

    Args:
        repeated: of each side, how many of its tokens are the prompt's.
    """
    is_kept = dropped == 0
    before, after = _part_lengths(whole), _part_lengths(kept)
    triples = zip(before, after, [0, *(repeated or [0] * len(kept))], strict=True)
    cut = [np.where(is_kept, had - has + again, had) for had, has, again in triples]
    starts = [np.zeros_like(after[0]), *map(prompt_lengths, kept)]
    columns = {}
    for name, side, start, length in zip(token_columns(parts), [kept[0], *kept], starts, after, strict=True):
        part = side.cut(start, start + np.where(is_kept, length, 0))
        columns[name] = list_column(part.token_ids, part.offsets)
    for name, side in zip(token_columns(parts)[1:], kept, strict=True):
        columns |= rounds_of_sides(name, side, is_kept)
    return pa.table(
        {
            **columns,
            "scored": pa.array(scored, pa.int32()),
            "cut": pa.array(np.add.reduce(cut), pa.int32()),
            "dropped": pa.array(dropped, pa.int8()),
            "merged": pa.array(merged_prompts(whole[0]) & is_kept, pa.bool_()),
            "doubts": doubt_column(whole),
            **{CUT_PART + part: pa.array(count, pa.int32()) for part, count in zip(parts, cut, strict=True)},
        }
    )


def _part_lengths(sides: Sequence[TokenRows]) -> list[Int[np.ndarray, " rows"]]:
    """The tokens of the shared prompt, and of each completion."""
    prompts = prompt_lengths(sides[0])
    return [prompts, *(side.lengths - prompts for side in sides)]


def _with_margins(table: pa.Table, encoded: EncodedSides) -> pa.Table:
    return table.append_column("margin", pa.array([row.margin for row in encoded.rows], pa.float32()))
