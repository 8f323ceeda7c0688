"""Labelled words to token rows with labels, for token classification. Caching and the ledger are those of supervised
fine-tuning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from datasets import Dataset, Features, IterableDataset
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.token_rows import IGNORED
from lowtide.data.batches.values import DOCUMENT
from lowtide.data.cache.cached_map import map_cached, reading
from lowtide.data.cache.fingerprint import combine, rows_fingerprint
from lowtide.data.encode.tagged_rows import NOTED_TAGS, TAG_FEATURES, TagEncoder
from lowtide.data.formats.columns import check_read
from lowtide.data.formats.tagged import TagFormat, detect_tags, label_names
from lowtide.data.options import TagOptions
from lowtide.data.report.doubts import DOUBT_NOTES, warn_of_absent_labels, warn_of_doubts
from lowtide.data.report.ledger import Ledger, padding_share
from lowtide.data.report.row_stats import add_up, warn_of_dropped
from lowtide.data.sources.stream import map_stream
from lowtide.data.sources.titles import title_of

__all__ = ["TagOptions", "labels_of", "prepare_tags"]


def labels_of(
    dataset: Dataset | IterableDataset, text_column: str | None, label_column: str | None, name: str = "train"
) -> tuple[str, ...]:
    """All labels of a dataset, as it names them or as they are found in its rows.

    Raises:
        ValueError: it has no such columns, or is a stream without names.
    """
    source = title_of(dataset, name)
    with reading(dataset, source, "input_ids and labels") as first_row:
        tags = detect_tags(dataset, list(first_row), text_column, label_column, source)
        return label_names(dataset, tags, source)


def prepare_tags(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    options: TagOptions,
    *,
    batch_size: int,
    name: str = "train",
) -> tuple[Dataset | IterableDataset, Ledger | None]:
    """Prepare labelled words.

    Args:
        dataset: rows of words and labels, or of `input_ids` and `labels`.
        tokenizer: the model's tokenizer, a fast one. It is not changed.
        options: what the result depends on.
        batch_size: rows in the padded batches that the ledger compares with.
        name: what the dataset is called in progress bars and in the ledger.

    Returns:
        A dataset with the columns of `TAG_FEATURES`, a row for each window; and its ledger, or None for a stream.

    Raises:
        ValueError: a row that cannot be used, an option that cannot work, or a dataset with nothing to train on.
    """
    source = options.source or title_of(dataset, name)
    with reading(dataset, source, "input_ids and labels") as first_row:
        tags = detect_tags(dataset, list(first_row), options.text_column_name, options.label_column_name, source)
        encoder = TagEncoder(tokenizer, tags, options, source)
        more = ("attention_mask",) if tags.is_tokenized and "attention_mask" in first_row else ()
        check_read(list(first_row), (*tags.columns, *more), source)
        rows = dataset.with_format(None).select_columns([*tags.columns, *more])
        if isinstance(rows, IterableDataset):
            return map_stream(rows, encoder, TAG_FEATURES, source), None
        prepared = _map(rows, encoder, options, tags, name)
    statistics = add_up(prepared)
    if statistics.kept == 0:
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in statistics.rows_dropped.items())
        longer = "" if options.max_length is None else f", or raise max_length (it is {options.max_length})"
        raise ValueError(
            f"{source} has nothing to train on: every row was dropped ({reasons}). Look at its labels{longer}."
        )
    warn_of_dropped(source, statistics)
    warn_of_doubts(source, statistics.doubts, statistics.kept)
    ledger = statistics.ledger(
        name=name,
        batch_size=batch_size,
        padding_avoided=padding_share(statistics.lengths, batch_size),
        read_as=tags.title,
    )
    if statistics.numbers is not None:
        prepared = prepared.select(statistics.numbers)
    prepared = prepared.select_columns(list(TAG_FEATURES))
    ledger = replace(ledger, scored_by_label=_scored_by_label(prepared, options.labels))
    if name == "train" and DOCUMENT not in first_row:
        warn_of_absent_labels(source, ledger.scored_by_label or {})
    return prepared, ledger


def _map(rows: Dataset, encoder: TagEncoder, options: TagOptions, tags: TagFormat, name: str) -> Dataset:
    known = rows_fingerprint(rows, encoder.tokenizer, options, options.truncation)
    fingerprint = combine("tags", known, *tags.columns, tags.names, *DOUBT_NOTES)
    features: Features = NOTED_TAGS
    return map_cached(rows, encoder, features=features, fingerprint=fingerprint, num_proc=options.num_proc, name=name)


def _scored_by_label(prepared: Dataset, labels: tuple[str, ...]) -> dict[str, int]:
    counts = np.zeros(len(labels), dtype=np.int64)
    for part in prepared.with_format("arrow").select_columns(["labels"]).iter(batch_size=10_000):
        column = part["labels"].combine_chunks().flatten().to_numpy()  # type: ignore[index]
        counts += np.bincount(column[column != IGNORED], minlength=len(labels))
    return dict(zip(labels, counts.tolist(), strict=True))
