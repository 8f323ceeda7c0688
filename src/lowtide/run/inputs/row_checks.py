"""What is refused of prepared rows, and of a collator that is not the method's own, before anything is run on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import dropwhile, islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset

from lowtide.data.batches.completion_rounds import has_rounds
from lowtide.ragged import WEIGHT, RaggedBatch

MASKS = ("completion_mask", "assistant_masks")
LOOKED_AT = 10_000
"""Rows among which a packed one of several segments is looked for."""


def check_collator(
    collate: Callable[[Sequence[Any]], RaggedBatch], own: Callable, dataset: Any, count: int, title: str, name: str
) -> None:
    """Refuses a collator that loses what the method needs of a row.

    Args:
        collate: makes a batch of a list of rows by it.
        own: the method's own collator, which loses nothing.
        dataset: prepared rows, of which `count` are collated.
        title: what the collator is called; `name` is what messages call the dataset.

    Raises:
        ValueError: it cannot read the rows, or does not give back its completions or the bounds of its segments.
    """
    rows = _telling_rows(dataset, count)
    if not rows:
        return
    remedy = "leave data_collator out, and the method's own is used"
    try:
        with torch.random.fork_rng(devices=[]):
            found = collate(rows)
    except Exception as error:
        raise ValueError(
            f"the data_collator {title} makes no batch of {len(rows)} rows of {name}, which have "
            f"{', '.join(rows[0])}: {remedy} ({type(error).__name__}: {error})"
        ) from error
    weighted = list(islice((row for row in _first(dataset) if row.get("loss_weights")), count))
    if weighted and WEIGHT not in collate(weighted).score_values:
        raise ValueError(
            f"the data_collator {title} leaves out the weights of messages that {name} has (loss_weights): {remedy}, "
            "or make them 0 or 1"
        )
    if not {"prompt_ids", "seq_lengths"} & rows[0].keys():
        return
    expected = own(rows)
    missing = expected.row_values.keys() - found.row_values.keys()
    if missing:
        raise ValueError(
            f"the data_collator {title} returns no {', '.join(sorted(missing))} of the rows' completions, which cannot "
            f"be told from each other then: {remedy}"
        )
    if "seq_lengths" in rows[0] and len(found.segments) != len(expected.segments):
        raise ValueError(
            f"the data_collator {title} makes {len(found.segments)} of the {len(expected.segments)} segments of "
            f"{len(rows)} rows of {name}, so that they would see each other: {remedy}, or prepare rows of one segment "
            "each (packing=False, and turns='whole' for conversations)"
        )
    if found.completions != expected.completions:
        raise ValueError(
            f"the data_collator {title} does not say which segments are of which of the {expected.completions} "
            f"completions of a row (`row` of `RaggedBatch.from_segments`): {remedy}"
        )
    if any(map(has_rounds, rows)) and _of_completions(found) != _of_completions(expected):
        raise ValueError(
            f"the data_collator {title} does not keep the turns of completions of {name} apart, each of which has a "
            f"context of its own (the columns ..._labels, ..._seq_lengths and ..._prefix_length): {remedy}, or set "
            "turns='whole'"
        )


def _of_completions(batch: RaggedBatch) -> list[tuple[int, int, int]]:
    """Of each segment of a completion its row, its place, and how many scores it has."""
    return [
        (part.row, part.completion, part.score_stop - part.score_start)
        for part in batch.segments
        if part.completion >= 0
    ]


def check_budget(
    budget: int,
    lengths: np.ndarray | None,
    name: str,
    bin_tokens: int | None = None,
    *,
    why_whole: Callable[[], str | None],
) -> None:
    """Where rows cannot be run in pieces, the token budget must hold the longest.

    Args:
        lengths: [rows], tokens of each row of a dataset; None where they are not known.
        name: what messages call the dataset.
        bin_tokens: the tokens of a packed row.
        why_whole: what keeps rows from being run in pieces, as a clause; None if nothing does.

    Raises:
        ValueError: it does not; says how many tokens it needs.
    """
    longest = max(bin_tokens or 0, 0 if lengths is None or not len(lengths) else int(lengths.max()))
    if longest > budget and (reason := why_whole()):
        raise ValueError(
            f"tokens_per_microbatch={budget} is below the longest row of {name}, {longest} tokens, which is not run in "
            f"pieces, since {reason}: raise it to at least {longest}, or lower max_length"
        )


def check_masks(dataset: Any, name: str) -> None:
    """Refuses rows whose masks would be left unread, for want of a preparation that makes labels of them.

    Raises:
        ValueError: names the masks.
    """
    columns = getattr(dataset, "column_names", None) or list(next(_first(dataset), {}))
    masks = [each for each in MASKS if each in columns]
    if masks and "labels" not in columns:
        raise ValueError(
            f"{name} has {' and '.join(masks)} and no labels, and skip_prepare_dataset=True makes none, so "
            "every token would be scored. Add a 'labels' column (-100 where nothing is scored), or drop "
            "skip_prepare_dataset"
        )
    if "attention_mask" in columns or ("position_ids" in columns and "seq_lengths" not in columns):
        _check_unread(dataset, name)


def _check_unread(dataset: Any, name: str) -> None:
    """Refuses rows with padding, or packed ones without their bounds: nothing reads their masks and positions."""
    for number, row in enumerate(islice(_first(dataset), LOOKED_AT // 10)):
        given = (row.get(column) for column in ("attention_mask", "position_ids"))
        mask, positions = (np.asarray(() if values is None else values).ravel() for values in given)
        hidden = not mask.all()
        restarts = "seq_lengths" not in row and (positions != np.arange(positions.size)).any()
        if hidden or restarts:
            what = "an attention_mask with zeros" if hidden else "position_ids that do not count on from 0"
            raise ValueError(
                f"{name}, row {number} (the first is 0), has {what}, and with skip_prepare_dataset=True rows are taken "
                "whole: drop skip_prepare_dataset, which leaves padding out, or remove the padding. Of packed rows "
                "give the segments' lengths in `seq_lengths`"
            )


def _telling_rows(dataset: Any, count: int) -> list[Mapping[str, Any]]:
    """Rows that follow one another; where some have several segments, from the first of these on."""

    def is_plain(row: Mapping[str, Any]) -> bool:
        lengths = [value for name, value in row.items() if name.endswith("seq_lengths")]
        return bool(lengths) and all(len(each or ()) < 2 for each in lengths)

    return list(islice(dropwhile(is_plain, _first(dataset)), count))


def _first(dataset: Any) -> Iterator[Mapping[str, Any]]:
    """The first rows, as far as they are mappings; none of what may be read only once."""
    if isinstance(dataset, Dataset | IterableDataset) or hasattr(dataset, "__getitem__"):
        return islice((row for row in dataset if isinstance(row, Mapping)), LOOKED_AT)
    return iter(())
