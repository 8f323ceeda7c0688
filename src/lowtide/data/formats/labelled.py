"""Rows of a text, or of a pair of texts, with a label: their columns, what kind of labels these are, and which there
are.

The kinds are those of transformers' `problem_type`, and chosen as there: integers are the numbers of classes, numbers
with fractions are values to be predicted, and lists say of each class whether it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from datasets import ClassLabel, Dataset, IterableDataset

from lowtide.data.formats.labels import column_of, distinct_labels, names_of_found, unnamed

SINGLE, MULTIPLE, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
PROBLEMS = (SINGLE, MULTIPLE, REGRESSION)
"""As transformers names them."""
PAIRS = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence"), ("question1", "question2")),
    ("text", "text_pair"),
)
"""The columns of pairs of texts, as in GLUE."""
IDS = "input_ids"
TEXT_COLUMNS = ("text", "sentence", IDS)
LABEL_COLUMNS = ("label", "labels")


@dataclass(frozen=True)
class LabelFormat:
    """The columns of a dataset of texts with labels."""

    texts: tuple[str, ...]
    """One column or two; or `input_ids`."""
    label: str
    kind: pa.DataType
    """Of a label, or of those in a list of labels."""
    is_list: bool
    names: tuple[str, ...] | None = None
    """Of the numbers in the column of labels, where the dataset says them (`datasets.ClassLabel`)."""

    @property
    def is_tokenized(self) -> bool:
        return self.texts == (IDS,)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.texts, self.label)

    @property
    def title(self) -> str:
        what = "token ids" if self.is_tokenized else "pairs of texts" if len(self.texts) > 1 else "texts"
        return f"{what} with labels ({', '.join(self.columns)})"

    @property
    def has_names(self) -> bool:
        """Whether labels are texts."""
        return pa.types.is_string(self.kind) or pa.types.is_large_string(self.kind)

    @property
    def has_fractions(self) -> bool:
        return pa.types.is_floating(self.kind)


def detect_labelled(
    dataset: Dataset | IterableDataset,
    first_row: Mapping[str, Any],
    texts: Sequence[str] | None,
    label: str | None,
    source: str,
) -> LabelFormat:
    """The format of a dataset.

    Args:
        texts: the columns of texts, if a user named them; likewise `label`.
        source: what messages call the dataset.

    Raises:
        ValueError: there are no such columns, or labels of no kind that is known; names what there is.
    """
    columns = list(first_row)
    pair = next((each for each in PAIRS if {*each} <= {*columns}), None)
    if texts:
        found = tuple(column_of(columns, each, "text_column_names", (), "texts", source) for each in texts)
    elif pair is not None:
        found = pair
    else:
        found = (column_of(columns, None, "text_column_names", TEXT_COLUMNS, "texts", source),)
    label = column_of(columns, label, "label_column_name", LABEL_COLUMNS, "labels", source)
    features = dataset.features
    feature: Any = (features or {}).get(label)
    inner = getattr(feature, "feature", feature)
    kind: Any = pa.array([first_row[label]]).type if features is None else features.arrow_schema.field(label).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    kind = kind.value_type if is_list else kind
    names = tuple(inner.names) if isinstance(inner, ClassLabel) else None
    made = LabelFormat(found, label, kind, is_list, names)
    if not (made.has_names or made.has_fractions or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        held = "values of several kinds" if "json" in str(kind) else f"{kind} values"  # datasets keeps those as JSON
        raise ValueError(f"{source}: the column {label!r} holds {held}; labels are texts, numbers, or lists of these")
    return made


def problem_of(labels: LabelFormat, asked: str | None, source: str, *, said: str | None = None) -> str:
    """The kind of problem that labels pose: what is asked for, else what the model's config says if they can be that,
    else as transformers chooses it.

    Raises:
        ValueError: the labels do not fit the kind that was asked for.
    """
    classes = MULTIPLE if labels.is_list else SINGLE
    if labels.has_names or labels.names is not None:
        found = (classes,)
    else:
        found = (REGRESSION,) if labels.has_fractions and not labels.is_list else (classes, REGRESSION)
    if asked is not None and asked not in found:
        holds = f"{'lists of ' if labels.is_list else ''}{labels.kind} values"
        raise ValueError(
            f"problem_type={asked!r} does not fit the labels of {source}, whose column {labels.label!r} holds {holds}: "
            f"these are of {' or '.join(found)}. Convert the column, or leave problem_type out"
        )
    return asked or next((each for each in found if each == said), found[0])


def label_names(
    dataset: Dataset | IterableDataset,
    labels: LabelFormat,
    problem: str,
    given: Sequence[str] | None,
    first_row: Mapping[str, Any],
    source: str,
) -> tuple[str, ...]:
    """All labels of a dataset: as a user or the dataset names them, or as they are found in its rows. Those without
    names are called as transformers does, LABEL_0 and so on; a regression has one for each number that it predicts.

    Raises:
        ValueError: they are those of a stream, which are not known beforehand.
    """
    if given:
        return tuple(given)
    if problem == REGRESSION:
        return unnamed(len(first_row[labels.label]) if labels.is_list else 1)
    if labels.names is not None:
        return labels.names
    if labels.is_list and labels.has_fractions:
        return unnamed(len(first_row[labels.label]))
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"{source} is a stream, whose labels are not known before its end: list them in `class_names`, or give its "
            f"column {labels.label!r} the feature ClassLabel(names=[...])"
        )
    vector = vector_length(dataset, labels, first_row)
    return unnamed(vector) if vector else names_of_found(distinct_labels(dataset, labels.label))


def vector_length(dataset: Dataset | IterableDataset, labels: LabelFormat, first_row: Mapping[str, Any]) -> int:
    """The length of lists of integers that say by 0 and 1 of each class whether it holds; 0 where they hold the labels
    themselves.

    They are read so where all lists, of a stream the first, hold 0 and 1 alone and are equally long, above 1.
    """
    if not labels.is_list or labels.has_names or labels.names is not None:
        return 0
    rows: Any = dataset.with_format(None)[labels.label] if isinstance(dataset, Dataset) else [first_row[labels.label]]
    lengths = {len(each or ()) for each in rows}
    found = distinct_labels(dataset, labels.label) if isinstance(dataset, Dataset) else {*rows[0]}
    return max(lengths) if len(lengths) == 1 and max(lengths) > 1 and found <= {0, 1} else 0
