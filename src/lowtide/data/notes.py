"""What preparation notes down beside every row, and what it adds up to.

The notes are columns of the cached dataset, so that the ledger of a start that finds its dataset in the cache is
the ledger of the start that made it. They are read a chunk at a time from the memory-mapped file; what stays is the
length of each row that is trained on, and, if there are others, its number: four bytes a row each.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from jaxtyping import Bool, Int

from lowtide.data.mapped import mapped_files, release_pages
from lowtide.data.token_rows import TokenRows, list_column

CUT_AWAY = "no scored token left after truncation"
DROP_REASONS = ("kept", "no tokens", "no scored token", CUT_AWAY)
"""Why a row is not trained on; the index is what is noted down."""

TOKEN_FEATURES = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
NOTES = {"scored": Value("int32"), "cut": Value("int32"), "dropped": Value("int8"), "merged": Value("bool")}
NOTED_FEATURES = Features({**TOKEN_FEATURES, **NOTES})


@dataclass(frozen=True)
class Statistics:
    """The notes on all rows of a prepared dataset, added up."""

    lengths: Int[np.ndarray, " kept"]
    """The tokens of each row that is trained on."""
    numbers: Int[np.ndarray, " kept"] | None
    """The numbers of these rows; None if they are all."""
    scored: int
    tokens_cut: int
    rows_cut: int
    rows_dropped: dict[str, int]
    tokens_dropped: int
    merged: int
    """Rows whose prompt and completion merge tokens where they meet."""


def noted_table(whole: TokenRows, kept: TokenRows) -> pa.Table:
    """Rows with their notes, from the rows as they were and as truncation leaves them."""
    scored_before, scored = whole.scored_counts(), kept.scored_counts()
    dropped = np.select([whole.lengths == 0, scored_before == 0, scored == 0], [1, 2, 3], default=0)
    cut = whole.lengths - kept.lengths
    is_kept = dropped == 0
    merged = np.zeros(len(whole), dtype=bool) if whole.merged is None else whole.merged
    rest = kept.cut(np.zeros_like(kept.lengths), np.where(is_kept, kept.lengths, 0))
    return pa.table(
        {
            "input_ids": list_column(rest.token_ids, rest.offsets),
            "labels": list_column(rest.labels, rest.offsets),
            "scored": pa.array(scored, pa.int32()),
            "cut": pa.array(np.where(is_kept, cut, whole.lengths), pa.int32()),
            "dropped": pa.array(dropped, pa.int8()),
            "merged": pa.array(merged & is_kept, pa.bool_()),
        }
    )


def add_up(prepared: Dataset) -> Statistics:
    """Add up the notes of a prepared dataset."""
    table, files = prepared.data.table, mapped_files(prepared)
    lengths, numbers = (np.empty(table.num_rows, dtype=np.int32) for _ in range(2))
    count = 0
    sums: Counter[str] = Counter()
    reasons = np.zeros(len(DROP_REASONS), dtype=np.int64)
    first = 0
    for batch in table.to_batches():
        notes = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in NOTES}
        is_kept: Bool[np.ndarray, " rows"] = notes["dropped"] == 0
        sums["scored"] += int(notes["scored"][is_kept].sum())
        sums["cut"] += int(notes["cut"][is_kept].sum(dtype=np.int64))
        sums["rows_cut"] += int(np.count_nonzero(notes["cut"][is_kept]))
        sums["dropped"] += int(notes["cut"][~is_kept].sum(dtype=np.int64))
        sums["merged"] += int(np.count_nonzero(notes["merged"]))
        reasons += np.bincount(notes["dropped"], minlength=len(reasons))
        here = np.flatnonzero(is_kept)
        lengths[count : count + len(here)] = np.diff(batch.column("input_ids").offsets.to_numpy())[here]
        numbers[count : count + len(here)] = first + here
        count += len(here)
        first += batch.num_rows
        release_pages(files)
    return Statistics(
        lengths=lengths[:count],
        numbers=numbers[:count] if count < first else None,
        scored=sums["scored"],
        tokens_cut=sums["cut"],
        rows_cut=sums["rows_cut"],
        rows_dropped={reason: int(count) for reason, count in zip(DROP_REASONS[1:], reasons[1:], strict=True) if count},
        tokens_dropped=sums["dropped"],
        merged=sums["merged"],
    )
