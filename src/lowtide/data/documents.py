"""Texts of several documents taken apart, for pretraining: a row for each document."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from datasets import Dataset, IterableDataset

from lowtide.data.formats.conversation import quoted
from lowtide.data.sources.titles import entitled, title_of

IDS = "input_ids"


def documents_of(
    dataset: Dataset | IterableDataset, field: str, separator: str | None, name: str = "train"
) -> Dataset | IterableDataset:
    """The documents of a dataset.

    Args:
        dataset: rows of texts, or of token ids, which are taken as they are.
        field: the column of texts.
        separator: what stands between the documents of a text; None where a row is a document.
        name: "train", or what an evaluation set is called.

    Raises:
        ValueError: there is no such column; names those that there are.
    """
    source, columns = title_of(dataset, name), _columns(dataset)
    if IDS in columns:
        return dataset
    if field not in columns:
        raise ValueError(
            f"{source} has the columns {quoted(columns)}, and none of texts: name it by dataset_text_field, which is "
            f"{field!r}"
        )
    if separator is None:
        return entitled(dataset.select_columns([field]), source)
    apart = functools.partial(_apart, field=field, separator=separator)
    return entitled(dataset.map(apart, batched=True, remove_columns=columns), source)


def _columns(dataset: Dataset | IterableDataset) -> list[str]:
    return list(dataset.column_names or next(iter(dataset), {}))


def _apart(batch: Mapping[str, Sequence[Any]], field: str, separator: str) -> dict[str, list[Any]]:
    """Documents without the white space around them; empty ones are left out. What is no text is refused later."""
    parts = [part for text in batch[field] for part in (text.split(separator) if isinstance(text, str) else [text])]
    stripped = [part.strip() if isinstance(part, str) else part for part in parts]
    return {field: [part for part in stripped if part is None or part]}


def texts_of(dataset: Dataset | IterableDataset, field: str, most: int) -> Iterator[str]:
    """The texts of the first rows, at most so many."""
    for row in islice(dataset.with_format(None), most):
        if isinstance(row[field], str):
            yield row[field]
