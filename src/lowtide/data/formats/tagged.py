"""Rows of words with a label each, for token classification: their columns, and the labels that there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import ClassLabel, Dataset, IterableDataset

from lowtide.data.batches.token_rows import IGNORED
from lowtide.data.formats.labels import column_of, distinct_labels, names_of_found, numbers_of

TEXT_COLUMNS = ("tokens", "words")
LABEL_COLUMNS = ("ner_tags", "tags", "labels")
IDS = "input_ids"


@dataclass(frozen=True)
class TagFormat:
    """The columns of a dataset of labelled words, or of token ids with labels."""

    text: str
    """The words, or `input_ids`."""
    labels: str
    names: tuple[str, ...] | None = None
    """Of the numbers in the labels' column, where the dataset says them (`datasets.ClassLabel`)."""

    @property
    def is_tokenized(self) -> bool:
        return self.text == IDS

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text, self.labels)

    @property
    def title(self) -> str:
        return f"{'token ids' if self.is_tokenized else 'words'} with labels ({self.text}, {self.labels})"


def detect_tags(
    dataset: Dataset | IterableDataset, columns: Sequence[str], text: str | None, labels: str | None, source: str
) -> TagFormat:
    """The format of a dataset.

    Args:
        columns: of the dataset.
        text: the column of the words, if a user named it; likewise `labels`.
        source: what messages call the dataset.

    Raises:
        ValueError: there is no such column; names those that there are.
    """
    found_text = column_of(columns, text, "text_column_name", (*TEXT_COLUMNS, IDS), "words", source)
    wanted = ("labels",) if found_text == IDS else LABEL_COLUMNS
    found_labels = column_of(columns, labels, "label_column_name", wanted, "labels", source)
    feature = (dataset.features or {}).get(found_labels)
    inner = getattr(feature, "feature", None)
    return TagFormat(found_text, found_labels, tuple(inner.names) if isinstance(inner, ClassLabel) else None)


def label_names(dataset: Dataset | IterableDataset, tags: TagFormat, source: str) -> tuple[str, ...]:
    """All labels of a dataset: as it names them, or as they are found in its rows, in alphabetical order. Numbers
    without names are called as transformers does, LABEL_0 and so on.

    Raises:
        ValueError: it is a stream, whose labels are not known beforehand.
    """
    if tags.names is not None:
        return tags.names
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"{source} is a stream, whose labels are not known before its end: list them in `tag_names`, or give its "
            f"column {tags.labels!r} the feature List(ClassLabel(names=[...]))"
        )
    return names_of_found(distinct_labels(dataset, tags.labels))


def label_numbers(tags: TagFormat, labels: Sequence[str], row: Sequence[Any]) -> dict[Any, int] | None:
    """From a label as the rows have it, names or numbers, to its number in `labels`, the model's.

    Args:
        row: the labels of a row, which say which of the two the rows have.

    Returns:
        None where the row has no label that says it.
    """
    label = next((each for each in row if isinstance(each, str | int) and each != IGNORED), None)
    return None if label is None else numbers_of(labels, tags.names, texts=isinstance(label, str))
