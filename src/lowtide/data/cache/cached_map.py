"""Rows through one `datasets.map`, cached as Arrow under a fingerprint of everything that it depends on.

What is read back is memory-mapped, and the pages of what was read are given back batch by batch, so that neither a
million rows nor a second start costs memory or time. Every kind of preparation begins and ends here.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, is_caching_enabled
from transformers import PreTrainedTokenizerBase

from lowtide.compat.datasets import fingerprint_of
from lowtide.data.cache.fingerprint import cache_file, combine
from lowtide.data.cache.mapped import mapped_files, release_pages
from lowtide.data.sources.sampling import sampled_rows

logger = logging.getLogger(__name__)

BATCH_BYTES = 2 << 20
MOST_ROWS = 10_000

Preparer = Callable[[Mapping[str, Sequence[Any]], Sequence[int]], pa.Table]
"""Makes noted rows of a batch of columns, whose rows have these numbers in the dataset."""


@contextmanager
def reading(dataset: Dataset | IterableDataset, source: str, wanted: str) -> Iterator[dict[str, Any]]:
    """Gives a dataset's first row, to be looked at while the dataset is prepared to have the columns `wanted`.

    Raises:
        ValueError: the dataset has no rows, has a transform, or holds text that is not UTF-8.
    """
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise ValueError(
            f"{source} has a transform (Dataset.with_transform() or set_transform()), which would be run once and "
            "kept. Apply it with map() first, or set dataset_kwargs={'skip_prepare_dataset': True} and let it return "
            f"trainer-ready rows, which have {wanted}."
        )
    try:
        row = next(iter(dataset.with_format(None)), None)
        if row is None:
            raise ValueError(f"{source} has no rows.")
        yield dict(row)
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} holds text that is not UTF-8 ({error}). Convert it first.") from error


def with_end_token(tokenizer: PreTrainedTokenizerBase, eos_token: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer itself, or a copy of it with another end token."""
    if eos_token is None or eos_token == tokenizer.eos_token:
        return tokenizer
    if eos_token not in tokenizer.get_vocab():
        raise ValueError(f"eos_token {eos_token!r} is not in the tokenizer's vocabulary.")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = eos_token
    return tokenizer


def map_cached(
    rows: Dataset, prepare: Preparer, *, features: Features, fingerprint: str, num_proc: int | None, name: str
) -> Dataset:
    """The noted rows that `prepare` makes, from the cache if they are there; of a sample of the rows where that is
    enough (see `sampling`)."""
    there = is_caching_enabled() and Path(cache_file(fingerprint)).exists()
    chosen = None if there else sampled_rows(rows)
    if chosen is not None:
        rows, prepare = rows.select(chosen), _Numbered(prepare, chosen)
        fingerprint = combine(fingerprint, fingerprint_of(rows))
    batch_rows = _rows_in_a_batch(rows)
    return rows.map(
        _ReleasingPages(prepare, mapped_files(rows)),
        batched=True,
        batch_size=batch_rows,
        writer_batch_size=batch_rows,
        with_indices=True,
        remove_columns=rows.column_names,
        features=features,
        num_proc=num_proc or None,  # 0 is no process beside this one, which older datasets refuse
        new_fingerprint=fingerprint,
        cache_file_name=cache_file(fingerprint),
        desc=f"Preparing {name}",
    )


def warn_merged(source: str, merged: int, rows: int) -> None:
    """Say that prompts end inside tokens, if some do."""
    if merged:
        logger.warning(
            "%s: in %s of %s rows the prompt's last tokens merge with the completion's first. The completion is "
            "scored from where the tokens differ, after a context that generation will not see; end the prompt on "
            "a token boundary.",
            source,
            f"{merged:,}",
            f"{rows:,}",
        )


@dataclass(frozen=True)
class _Numbered:
    """Prepares some rows of a dataset under the numbers that they have there."""

    prepare: Preparer
    numbers: np.ndarray

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> pa.Table:
        return self.prepare(batch, self.numbers[numbers].tolist())


@dataclass(frozen=True)
class _ReleasingPages:
    """What `datasets.map` calls, in this process or in another."""

    prepare: Preparer
    files: tuple[str, ...]
    """The files that the rows are mapped from."""

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> pa.Table:
        table = self.prepare(batch, numbers)
        release_pages(self.files)
        return table


def _rows_in_a_batch(rows: Dataset) -> int:
    """How many rows are tokenized in one go: tokenizers take some hundred bytes for each token until it is done."""
    row_bytes = rows.data.nbytes // len(rows.data)
    return min(max(BATCH_BYTES // max(row_bytes, 1), 1), MOST_ROWS)
