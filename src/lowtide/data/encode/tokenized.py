"""Rows that come as token ids: their labels, from what the dataset gives beside the ids."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Int

from lowtide.data.batches.token_rows import IGNORED, TokenRows, flatten
from lowtide.data.formats.reading import RowPlace, TokenSample
from lowtide.data.report.doubts import Doubt, rows_with

COLUMNS = ("labels", "completion_mask", "assistant_masks")


def encode_tokenized(samples: Sequence[TokenSample], place: RowPlace, *, mask_prompts: bool) -> TokenRows:
    """Lay out tokenized rows. Given labels are taken as they are; else what the masks leave is scored.

    Raises:
        ValueError: a row lacks a column that others in the batch have, or holds a number of more than 63 bits.
    """
    token_ids, offsets = _flat([sample.input_ids for sample in samples], "input_ids", place)
    labels, completion, assistant = (_column(samples, name, place) for name in COLUMNS)
    prompts = None if completion is None else _leading_zeros(completion != 0, offsets)
    scored = np.ones(len(token_ids), dtype=bool)
    if completion is not None and mask_prompts:
        scored &= completion != 0
    if assistant is not None:
        scored &= assistant != 0
    if labels is None:
        return TokenRows(token_ids, np.where(scored, token_ids, IGNORED), offsets, prompts)
    rows = TokenRows(token_ids, labels, offsets, prompts)
    if scored.all():
        return rows
    return replace(rows, doubts=Doubt.OTHER_MASK * rows_with((labels != IGNORED) != scored, offsets))


def _column(samples: Sequence[TokenSample], name: str, place: RowPlace) -> Int[np.ndarray, " tokens"] | None:
    given = [getattr(sample, name) for sample in samples]
    missing = [index for index, values in enumerate(given) if values is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise place.error(missing[0], f"{name!r} is null, and other rows have it.")
    return _flat(given, name, place)[0]


def _flat(lists: Sequence[Sequence[int]], name: str, place: RowPlace) -> tuple[np.ndarray, np.ndarray]:
    """The values of a column laid out, and where each row begins."""
    try:
        return flatten(lists)
    except OverflowError:
        row = next(row for row, values in enumerate(lists) if any(abs(value) >= 2**63 for value in values))
        raise place.error(row, f"{name!r} has a number of more than 63 bits.") from None


def _leading_zeros(mask: Bool[np.ndarray, " tokens"], offsets: Int[np.ndarray, " rows+1"]) -> Int[np.ndarray, " rows"]:
    """How many tokens of each row come before its first True."""
    ones = np.append(np.flatnonzero(mask), len(mask))
    first = ones[np.searchsorted(ones, offsets[:-1])]
    return np.minimum(first, offsets[1:]) - offsets[:-1]
