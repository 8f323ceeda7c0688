"""What a dataset is called in messages: the file that it was read from, or which dataset of a trainer it is."""

from __future__ import annotations

from typing import TypeVar
from weakref import WeakKeyDictionary

from datasets import Dataset, IterableDataset

Rows = TypeVar("Rows", bound=Dataset | IterableDataset)
SOURCES: WeakKeyDictionary[Dataset | IterableDataset, str] = WeakKeyDictionary()
"""The files, folders and names that datasets were read from."""


def entitled(dataset: Rows, source: object) -> Rows:
    """The dataset, which messages call by its source from now on."""
    SOURCES[dataset] = str(source)
    return dataset


def title_of(dataset: object, name: str) -> str:
    """What messages call a dataset.

    Args:
        name: "train", or what an evaluation set is called; for a dataset of no known source.
    """
    known = isinstance(dataset, Dataset | IterableDataset) and SOURCES.get(dataset)
    return known or f"the {name} dataset"
