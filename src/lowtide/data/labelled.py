"""Texts with labels to token rows with labels, for sequence classification. Caching and the ledger are those of
supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.values import LABEL, NUMBER
from lowtide.data.cache.cached_map import map_cached, reading
from lowtide.data.cache.fingerprint import combine, rows_fingerprint
from lowtide.data.encode.labelled_rows import LabelEncoder
from lowtide.data.formats.columns import check_read
from lowtide.data.formats.labelled import (
    IDS,
    MULTIPLE,
    REGRESSION,
    LabelFormat,
    detect_labelled,
    label_names,
    problem_of,
    vector_length,
)
from lowtide.data.formats.labels import unnamed
from lowtide.data.options import LabelOptions
from lowtide.data.report.doubts import DOUBT_NOTES, warn_of_absent_labels, warn_of_doubts
from lowtide.data.report.ledger import Ledger, padding_share
from lowtide.data.report.row_stats import add_up
from lowtide.data.sources.stream import map_stream
from lowtide.data.sources.titles import title_of

__all__ = ["FoundLabels", "LabelOptions", "found_labels", "prepare_labelled"]


@dataclass(frozen=True)
class FoundLabels:
    """What the labels of a dataset are."""

    names: tuple[str, ...]
    problem: str
    """As transformers' `problem_type` names it."""


def found_labels(
    dataset: Dataset | IterableDataset,
    texts: tuple[str, ...] | None,
    label: str | None,
    *,
    names: tuple[str, ...] | None = None,
    problem: str | None = None,
    said: str | None = None,
    name: str = "train",
) -> FoundLabels:
    """The labels of a dataset, as it or a user names them or as they are found in its rows.

    Args:
        texts: the columns of texts, if a user named them; likewise `label`.
        names: of the labels, likewise; and the `problem`.
        said: the problem by the model's config, where none is named.

    Raises:
        ValueError: it has no such columns, its labels are of another kind, or it is a stream without names.
    """
    source = title_of(dataset, name)
    with reading(dataset, source, "input_ids and label") as first_row:
        prepared = {IDS, LABEL, NUMBER} <= {*first_row}  # as a plan hands them on
        texts, label = ((IDS,), LABEL) if prepared else (texts, label)
        labels = detect_labelled(dataset, first_row, texts, label, source)
        problem = problem_of(labels, problem, source, said=said)
        found = label_names(dataset, labels, problem, names, first_row, source)
        if len(found) < 2 and problem != REGRESSION:
            if not prepared:
                raise ValueError(
                    f"all rows of {source} have the same label ({', '.join(found) or 'none'}), and a classifier tells "
                    f"at least two apart: name all labels in `class_names`, or set problem_type='{REGRESSION}'"
                )
            found = unnamed(2)
        return FoundLabels(found, problem)


def prepare_labelled(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    options: LabelOptions,
    *,
    batch_size: int,
    name: str = "train",
) -> tuple[Dataset | IterableDataset, Ledger | None]:
    """Prepare texts with labels.

    Args:
        dataset: rows of a text or two, or of `input_ids`, with a label.
        tokenizer: the model's tokenizer. It is not changed.
        options: what the result depends on.
        batch_size: rows in the padded batches that the ledger compares with.
        name: what the dataset is called in progress bars and in the ledger.

    Returns:
        A dataset with the columns `input_ids`, `label` and `number`, and `second_text` of pairs that the tokenizer
        tells apart; and its ledger, or None for a stream.

    Raises:
        ValueError: a row that cannot be used, or labels of another kind than the model's.
    """
    source = options.source or title_of(dataset, name)
    with reading(dataset, source, "input_ids and label") as first_row:
        labels = detect_labelled(dataset, first_row, options.text_column_names, options.label_column_name, source)
        problem_of(labels, options.problem, source)
        vectors = vector_length(dataset, labels, first_row) == len(options.labels)
        encoder = LabelEncoder(tokenizer, labels, options, source, vectors)
        more = ("attention_mask",) if labels.is_tokenized and "attention_mask" in first_row else ()
        check_read(list(first_row), (*labels.columns, *more), source)
        rows: Any = dataset.with_format(None).select_columns([*labels.columns, *more])
        if isinstance(rows, IterableDataset):
            return map_stream(rows, encoder, encoder.features, source), None
        prepared = _map(rows, encoder, options, labels, name)
    statistics = add_up(prepared)
    warn_of_doubts(source, statistics.doubts, statistics.kept)
    ledger = statistics.ledger(
        name=name,
        batch_size=batch_size,
        padding_avoided=padding_share(statistics.lengths, batch_size),
        read_as=labels.title,
    )
    prepared = prepared.select_columns(list(encoder.features))
    if options.problem != REGRESSION:
        ledger = replace(ledger, scored_by_label=_counts(prepared, options))
        if name == "train" and NUMBER not in first_row:
            warn_of_absent_labels(source, ledger.scored_by_label or {})
    return prepared, ledger


def _map(rows: Dataset, encoder: LabelEncoder, options: LabelOptions, labels: LabelFormat, name: str) -> Dataset:
    known = rows_fingerprint(rows, encoder.tokenizer, options, options.truncation)
    fingerprint = combine(
        "labelled", known, *labels.columns, labels.names, encoder.vectors, encoder.tells_apart, *DOUBT_NOTES
    )
    features = encoder.noted
    return map_cached(rows, encoder, features=features, fingerprint=fingerprint, num_proc=options.num_proc, name=name)


def _counts(prepared: Dataset, options: LabelOptions) -> dict[str, int]:
    """How many rows have each label."""
    counts = np.zeros(len(options.labels), dtype=np.int64)
    for part in prepared.with_format("arrow").select_columns([LABEL]).iter(batch_size=10_000):
        column: Any = part[LABEL].combine_chunks()  # type: ignore[index]
        if options.problem == MULTIPLE:
            counts += column.flatten().to_numpy().reshape(len(column), -1).astype(np.int64).sum(0)
        else:
            counts += np.bincount(column.to_numpy(), minlength=len(counts))
    return dict(zip(options.labels, counts.tolist(), strict=True))
