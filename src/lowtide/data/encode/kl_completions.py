"""The mismatched completions with which KTO estimates its KL term: each prompt with another row's completion.

As in TRL 1.16 (`KTOTrainer._prepare_dataset`), the completions of a block of consecutive rows, which is one device's
batch, are rotated by one: a row gets the completion of the row before it, the first of a block that of the last. What
a row gets is the other row's completion as long as there is room for it after its own prompt.

Where we differ: a block of a single row would get its own completion, and its divergence would be no estimate of
anything. It gets that of the row before it, if there is one.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset, List, Value
from jaxtyping import Int

from lowtide.data.batches.token_rows import list_column, range_index
from lowtide.data.cache.fingerprint import cache_file
from lowtide.data.cache.mapped import mapped_files, release_pages
from lowtide.data.encode.preference_rows import WHOLE_COMPLETION

logger = logging.getLogger(__name__)

KL_COLUMN = "kl_completion_ids"
KL_FEATURE = List(Value("int32"))
ROWS_AT_A_TIME = 1000


def previous_in_block(rows: int, block: int) -> Int[np.ndarray, " rows"]:
    """Whose completion each of `rows` rows gets, in blocks of `block` rows."""
    previous = np.arange(rows) - 1
    firsts = np.arange(0, rows, block)
    lasts = np.minimum(firsts + block, rows) - 1
    previous[firsts] = np.where(lasts > firsts, lasts, np.maximum(firsts - 1, 0))
    return previous


def add_kl_completions(rows: Dataset, block: int, max_length: int | None, fingerprint: str) -> Dataset:
    """The rows, in this order, with the column `kl_completion_ids` in place of the whole completions."""
    files = mapped_files(rows)
    completions = rows.select_columns([WHOLE_COMPLETION]).with_format("arrow")
    previous = previous_in_block(len(rows), block)

    def add(table: pa.Table, numbers: list[int]) -> pa.Table:
        given = completions[previous[numbers]][WHOLE_COMPLETION].combine_chunks()
        starts, lengths = given.offsets.to_numpy()[:-1], given.value_lengths().to_numpy()
        if max_length is not None:
            prompts = table["prompt_ids"].combine_chunks().value_lengths().to_numpy()
            lengths = np.minimum(lengths, max_length - prompts)
        index, offsets = range_index(starts, lengths)
        column = list_column(given.values.to_numpy()[index], offsets)
        release_pages(files)
        return table.drop_columns([WHOLE_COMPLETION]).append_column(KL_COLUMN, column)

    features = rows.features.copy()
    del features[WHOLE_COMPLETION]
    features[KL_COLUMN] = KL_FEATURE
    with_kl = rows.with_format("arrow").map(
        add,
        batched=True,
        batch_size=ROWS_AT_A_TIME,
        with_indices=True,
        features=features,
        new_fingerprint=fingerprint,
        cache_file_name=cache_file(fingerprint),
        desc="Adding KL completions",
    )
    return with_kl.with_format(None)


def add_kl_to_stream(rows: IterableDataset, block: int | None, max_length: int | None, source: str) -> IterableDataset:
    """The same for a stream of `source`, some blocks at a time; without a block the stream as it is."""
    if block is None:
        return rows
    assert rows.features is not None
    features = rows.features.copy()
    del features[WHOLE_COMPLETION]
    features[KL_COLUMN] = KL_FEATURE
    return rows.map(
        _Rotation(block, max_length, source),
        batched=True,
        with_indices=True,
        batch_size=block * -(-ROWS_AT_A_TIME // block),
        remove_columns=[WHOLE_COMPLETION],
        features=features,
    )


@dataclass
class _Rotation:
    """What `datasets` calls with some blocks of a stream, one after the other."""

    block: int
    max_length: int | None
    source: str
    before: list[int] | None = None
    """The last completion so far, for a block of a single row."""

    def __call__(self, batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        completions, before = batch[WHOLE_COMPLETION], self.before if numbers[0] else None
        given = [completions[other] for other in previous_in_block(len(completions), self.block)]
        if len(completions) == 1 and before is not None:
            given = [before]
        elif len(completions) == 1:
            logger.warning(
                "%s: the baseline of row %s is estimated from its own completion, since no other row comes before it "
                "in the stream. Give more rows, or set loss_type='apo_zero_unpaired', which has no baseline.",
                self.source,
                numbers[0],
            )
        self.before = completions[-1]
        rooms = [None if self.max_length is None else self.max_length - len(each) for each in batch["prompt_ids"]]
        return {KL_COLUMN: [each[:room] for each, room in zip(given, rooms, strict=True)]}
