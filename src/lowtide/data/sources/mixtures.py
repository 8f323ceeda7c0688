"""Several datasets as one: those of the list `datasets` of a run file, or of TRL's `DatasetMixtureConfig`.

Without shares the datasets stand one after the other. `fraction` gives each its share of the mixture, as in TRL 1.16
(`trl.scripts.utils.get_dataset`): shares are normalized to sum to one, and the mixture is as large as it can be
without a row standing in it twice; the first rows of each dataset are kept.

Where we differ: files and folders are read by `load_rows`, so that a `path` may be a `.jsonl` file; a stream with
shares is drawn at random from its datasets until one of them ends, where TRL refuses; the split into training and
test rows depends on `seed` alone, so that all ranks make the same one.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    concatenate_datasets,
    interleave_datasets,
)

from lowtide.data.formats.conversation import quoted
from lowtide.data.formats.text_columns import TEXT_COLUMNS, in_the_file
from lowtide.data.sources.columns import column_names, with_columns
from lowtide.data.sources.load import load_rows
from lowtide.data.sources.titles import entitled, title_of
from lowtide.parsing import parse_json
from lowtide.spelling import nearest

__all__ = ["DatasetConfig", "load_mixture"]

logger = logging.getLogger(__name__)

MIXTURE = "the mixture of `datasets`"
"""What messages call it."""


@dataclass
class DatasetConfig:
    """One dataset of a mixture. The names are those of `datasets.load_dataset`, as in TRL."""

    path: str
    """A file, a folder, or a dataset's name on the hub."""
    name: str | None = None
    """Which configuration of a dataset on the hub."""
    data_dir: str | None = None
    """The folder of a dataset's files."""
    data_files: str | list[str] | dict[str, str] | None = None
    """The files of a dataset, or those of each split."""
    split: str = "train"
    """Which split."""
    columns: list[str] | dict[str, str] | None = None
    """The columns that are kept; or those that get other names, by these names (`{"prompt": "User Question"}`). None
    keeps all."""
    fraction: float | None = None
    """The dataset's share of the mixture, relative to those of the others. `weight` is another name of it."""


def load_mixture(
    datasets: Sequence[Any],
    *,
    streaming: bool = False,
    test_split_size: float | None = None,
    seed: int = 42,
    texts: Collection[str] = TEXT_COLUMNS,
) -> DatasetDict | IterableDatasetDict:
    """Load several datasets as one, with the splits "train" and, where it is asked for, "test".

    Args:
        datasets: For each a path, a mapping with the fields of `DatasetConfig` or its JSON, or an object with them.
        streaming: Read rows as they are asked for.
        test_split_size: The share (below 1) or the number of rows that are taken for "test".
        seed: Of the split, and of the order in which a stream draws from its datasets.
        texts: Columns of CSV files that are read as text, by the names that `columns` gives them.

    Raises:
        ValueError: an entry, a column or a share that can't be used; the message names the entry.
        FileNotFoundError: nothing is there.
    """
    entries = [_entry(each, f"datasets[{number}]") for number, each in enumerate(datasets)]
    if not entries:
        raise ValueError("`datasets` is empty: name at least one dataset by its `path`.")
    shares = _shares(entries)
    parts = [_load(entry, f"datasets[{n}]", texts, streaming=streaming) for n, entry in enumerate(entries)]
    _warn_of_columns(entries, parts)
    mixture = entitled(_mixed(parts, shares, seed), MIXTURE)
    if test_split_size is not None:
        return split_off(mixture, test_split_size, seed)
    if isinstance(mixture, IterableDataset):
        return IterableDatasetDict({"train": mixture})
    return DatasetDict({"train": mixture})


def split_off(rows: Dataset | IterableDataset, test_split_size: float, seed: int = 42) -> DatasetDict:
    """Take rows for evaluation out of a dataset, at random: the splits "train" and "test".

    Args:
        test_split_size: The share (below 1) or the number of rows that are taken for "test".

    Raises:
        ValueError: it is a stream, or has too few rows.
    """
    if isinstance(rows, IterableDataset):
        raise ValueError(
            f"test_split_size={test_split_size} needs the number of rows, which a stream does not tell: give rows for "
            "evaluation as a dataset of their own, or set streaming=False"
        )
    size = int(test_split_size) if test_split_size >= 1 and test_split_size % 1 == 0 else test_split_size
    try:
        splits = rows.train_test_split(test_size=size, seed=seed)
    except ValueError as error:
        raise ValueError(
            f"test_split_size={size} cannot be taken from {len(rows)} rows: give a share below 1, or a "
            "number of rows that leaves some to train on"
        ) from error
    return DatasetDict({name: entitled(part, title_of(rows, str(name))) for name, part in splits.items()})


def _entry(given: Any, title: str) -> DatasetConfig:
    """An entry of the list, in one form."""
    if isinstance(given, str) and not given.startswith("{"):
        return DatasetConfig(given)
    if isinstance(given, str):
        try:
            given = parse_json(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"{title} is neither a path nor JSON ({error}): {given}") from error
    if isinstance(given, Mapping):
        values = dict(given)
    elif dataclasses.is_dataclass(given):
        values = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    else:
        raise ValueError(f"{title} is a {type(given).__name__}; it must be a path, or a mapping with a `path`.")
    if "weight" in values:
        values.setdefault("fraction", values.pop("weight"))
    names = [field.name for field in dataclasses.fields(DatasetConfig)]
    for name in values:
        if name not in names:
            hint = nearest(str(name), [*names, "weight"])
            raise ValueError(f"{title} has the key {name!r}{hint}: the keys are {', '.join(names)}.")
    if not isinstance(values.get("path"), str):
        raise ValueError(f"{title} has no `path`; it must name a file, a folder or a dataset on the hub.")
    columns = values.get("columns")
    if columns is not None and (isinstance(columns, str) or not all(isinstance(each, str) for each in columns)):
        raise ValueError(f"{title}: columns is {columns!r}; it must be a list of names, or a mapping of them.")
    return DatasetConfig(**values)


def _shares(entries: Sequence[DatasetConfig]) -> list[float] | None:
    """The share of each dataset, together 1; None where the datasets are taken whole."""
    given = [entry.fraction for entry in entries]
    if all(share is None for share in given):
        return None
    shares = []
    for number, share in enumerate(given):
        if share is None:
            raise ValueError(
                f"datasets[{number}] has no `fraction`, and others have one: give all of them one, or none."
            )
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < math.inf:
            raise ValueError(f"datasets[{number}]: fraction is {share!r}; it must be a number from 0 on.")
        shares.append(float(share))
    if sum(shares) == 0:
        raise ValueError("every `fraction` of `datasets` is 0: give at least one dataset a share.")
    return [share / sum(shares) for share in shares]


def _load(entry: DatasetConfig, title: str, texts: Collection[str], *, streaming: bool) -> Dataset | IterableDataset:
    renamed = entry.columns if isinstance(entry.columns, Mapping) else None
    try:
        rows = load_rows(
            entry.path,
            split=entry.split,
            name=entry.name,
            streaming=streaming,
            texts=in_the_file(texts, renamed),
            data_dir=entry.data_dir,
            data_files=entry.data_files,
        )
    except ValueError as error:
        raise ValueError(f"{title}: {error}") from error
    if entry.columns is None:
        return rows
    if isinstance(entry.columns, Mapping):
        return with_columns(rows, entry.columns, f"{title}: columns")
    columns = column_names(rows)
    missing = [column for column in entry.columns if column not in columns]
    if missing:
        raise ValueError(
            f"{title}: {entry.path} has no column {quoted(missing)}{nearest(missing[0], columns)}: its columns are "
            f"{quoted(columns)}."
        )
    return rows.select_columns(entry.columns)


def _warn_of_columns(entries: Sequence[DatasetConfig], parts: Sequence[Dataset | IterableDataset]) -> None:
    """Say which columns only some of the datasets have: rows of the others hold null there."""
    columns = [set(column_names(part)) for part in parts]
    partial = sorted(set.union(*columns) - set.intersection(*columns))
    if partial:
        having = ", ".join(f"{e.path}: {quoted(sorted(c))}" for e, c in zip(entries, columns, strict=True))
        logger.warning(
            "the datasets have different columns (%s): rows of those without %s hold null there. Choose what all have "
            "in common by `columns`.",
            having,
            quoted(partial),
        )


def _mixed(parts: Sequence[Any], shares: Sequence[float] | None, seed: int) -> Dataset | IterableDataset:
    try:
        if shares is None:
            if len(parts) > 1 and isinstance(parts[0], IterableDataset):
                logger.warning(
                    "the streams of `datasets` are read one after the other, so that max_steps may end before the "
                    "later ones begin: give each a `fraction`, and rows are drawn from all of them."
                )
            return concatenate_datasets(list(parts))
        wanted = [(part, share) for part, share in zip(parts, shares, strict=True) if share > 0]
        if isinstance(parts[0], IterableDataset):
            return interleave_datasets(
                [part for part, _ in wanted], probabilities=[share for _, share in wanted], seed=seed
            )
        most = min(len(part) / share for part, share in wanted)
        return concatenate_datasets([part.select(range(round(share * most))) for part, share in wanted])
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"the datasets of `datasets` can't be put together: {str(error).strip().splitlines()[0]} Choose columns "
            "that have the same kind of values in all of them by `columns`."
        ) from error
