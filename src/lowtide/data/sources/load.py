"""Where rows come from: a file, a folder, a name on the hub, or an object in memory.

Files are read by `datasets.load_dataset`, which converts them to Arrow once and maps that into memory afterwards.
What it says about a broken file is about Arrow, so a file that it can't read is read again here, line by line, to say
which line is at fault.
"""

import contextlib
import glob
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError

from lowtide.compat.datasets import readers_silent
from lowtide.data.formats.conversation import quoted
from lowtide.data.formats.text_columns import TEXT_COLUMNS
from lowtide.data.sources.json_lines import (
    BROKEN,
    LINE_BY_LINE,
    OPENERS,
    check_growth,
    check_lines,
    find_fault,
    first_conflict,
    read_lines,
    unified_features,
)
from lowtide.data.sources.places import READERS, check_place, entries, is_saved, readable_files, reader_of
from lowtide.data.sources.separators import separator_of
from lowtide.data.sources.titles import entitled

FAILURES = (DatasetGenerationError, ValueError, StopIteration, RecursionError)
"""What `load_dataset` raises for files that are there."""
OF_NO_ROWS = ("corresponds to no data", "BatchSize must be greater than 0")
"""What `datasets` says of files without rows; the second of Parquet, which it reads in batches of its groups' sizes."""
NUMBER = re.compile(r"\s*[-+]?\d[\d.,]*\s*")
ROWS_IN_A_RECORD = 10_000
SPLIT_WORDS = {
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
"""The words in a file's name that tell its split. (`datasets` looks at the whole path, so that everything in a folder
called `test-run` would be test data.)"""

logger = logging.getLogger(__name__)

Source = str | Path | Dataset | IterableDataset | DatasetDict | IterableDatasetDict | Sequence[Mapping[str, Any]]


def load_rows(
    source: Source,
    *,
    split: str = "train",
    name: str | None = None,
    streaming: bool = False,
    texts: Collection[str] = TEXT_COLUMNS,
    **places: Any,
) -> Dataset | IterableDataset:
    """Load the rows of a dataset.

    Args:
        source: A JSONL, JSON, CSV, TSV, Parquet or text file (one row `text`), a folder of such files or one that
            `save_to_disk` wrote, a dataset's name on the hub, a list of dicts, or an object of `datasets`, which is
            given back as it is.
        split: Which split, where there are several. A single file is all "train".
        name: Which configuration of a dataset on the hub.
        streaming: Read rows as they are asked for, in place of converting them first.
        texts: Columns of CSV and TSV files that are read as text, as they are written.
        places: `data_dir` and `data_files`, as `datasets.load_dataset` takes them, of a folder, a name on the hub, or
            one of its readers (`json`, `csv`, `parquet`, ...).

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it can't be read; the message names the file, and the line where lines are at fault.
    """
    places = {key: value for key, value in places.items() if value is not None}
    if isinstance(source, Dataset | IterableDataset):
        return source
    if isinstance(source, DatasetDict | IterableDatasetDict):
        return _choose_split(source, split)
    if not isinstance(source, str | Path):
        return _from_list(source)
    path = Path(source).expanduser()
    if not places:
        check_place(source, configured=name is not None)
    if places:
        rows = _from_hub(str(source), split, name, streaming=streaming, **places)
    elif path.is_file():
        if name is not None:
            logger.warning(f"{path} is a file, which has no configuration {name!r}: the name has no effect")
        rows = _from_files(path, {"train": [path]}, split, texts, streaming=streaming)
    elif path.is_dir():
        rows = _from_folder(path, split, name, texts, streaming=streaming)
    else:
        rows = _from_hub(str(source), split, name, streaming=streaming)
    if isinstance(rows, Dataset) and len(rows) == 0:
        raise ValueError(f"{source} has no rows.")
    _tell_of_numbers(rows, source, texts)
    return entitled(rows, source)


def _from_list(rows: Sequence[Mapping[str, Any]]) -> Dataset:
    rows = list(rows)
    if not rows:
        raise ValueError("the list of rows is empty.")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"row {number} (the first is 0) is a {type(row).__name__}; every row must be a dict.")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    try:
        values = {column: [row.get(column) for row in rows] for column in columns}
        return Dataset.from_dict(values, on_mixed_types="use_json")
    except (ValueError, TypeError) as error:
        problem = first_conflict(enumerate(rows)) or (None, str(error))
        where = "the list of rows" if problem[0] is None else f"row {problem[0]} (the first is 0)"
        raise ValueError(f"{where}: {problem[1]}") from error


def _from_folder(
    path: Path, split: str, name: str | None, texts: Collection[str], *, streaming: bool
) -> Dataset | IterableDataset:
    if is_saved(path):
        _tell_of_links_out_of(path)
        try:
            saved = load_from_disk(str(path))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError) as error:
            raise ValueError(
                f"{path} has the files of a dataset that `save_to_disk` wrote, and cannot be read as one "
                f"({type(error).__name__}: {_first_line(error)}): write it again"
            ) from error
        return saved if isinstance(saved, Dataset) else _choose_split(saved, split)
    if name is not None:  # a copy of a repository on the hub, whose README says what its configurations are
        _tell_of_links_out_of(path)
        return _from_hub(str(path), split, name, streaming=streaming)
    files = _of_one_kind(path)
    _tell_of_links_out_of(path)
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(_split_of(file.relative_to(path)), []).append(file)
    return _from_files(path, splits, split, texts, streaming=streaming)


def _of_one_kind(folder: Path) -> list[Path]:
    """The files of rows in a folder, in order; the first two kinds that are found end the search."""
    files: list[Path] = []
    for file in readable_files(folder):
        if files and reader_of(file) != reader_of(files[0]):
            kinds = ", ".join(sorted({file.suffix, files[0].suffix}))
            raise ValueError(
                f"{folder} holds files of several kinds ({kinds}): {files[0]}, {file}. Name one, or keep each kind in "
                "a folder."
            )
        files.append(file)
    return sorted(files)


def _tell_of_links_out_of(folder: Path) -> None:
    """Warns once of files of a folder that are elsewhere: who made the folder may not know what they hold. The files of
    a snapshot of the hub's cache are beside it."""
    inside = folder.resolve()
    blobs = _blobs(inside)
    links = {file: file.resolve() for file in sorted(entries(folder)) if file.is_symlink()}
    outside = [file for file, place in links.items() if not place.is_relative_to(inside) and place.parent not in blobs]
    if outside:
        first = outside[0]
        more = f", and so are {len(outside) - 1:,} more" if len(outside) > 1 else ""
        logger.warning(
            f"{first} is a link to {links[first]}, outside of the folder{more}: the run reads that as its data"
        )


def _blobs(folder: Path) -> list[Path]:
    """Where the hub's cache has the files of a snapshot that `folder` is, or is in."""
    return [above.parent / "blobs" for above in (folder, *folder.parents) if above.name == "snapshots"]


def _from_files(
    source: Path, splits: Mapping[str, list[Path]], split: str, texts: Collection[str], *, streaming: bool
) -> Dataset | IterableDataset:
    """Load files of one kind; `source` is what they are called together."""
    files = [file for group in splits.values() for file in group]
    empty = next((file for file in files if file.stat().st_size == 0), None)
    if empty is not None:
        raise ValueError(f"{empty} is empty.")
    for file in files:
        check_growth(file)
        check_lines(file)
    if streaming and split in splits and all(_read_by_lines(file) for file in splits[split]):
        return IterableDataset.from_generator(_stream_lines, gen_kwargs={"paths": list(map(str, splits[split]))})
    suffix = reader_of(files[0]) or ""
    reader, own = READERS[suffix]
    if suffix == ".csv":
        own = separator_of(files[0])
    if reader == "csv":
        own = {**own, "converters": dict.fromkeys(sorted(texts), as_written)}
    data_files = {name: [glob.escape(str(file)) for file in group] for name, group in splits.items()}

    # Opening a mapped file looks at the head of each of its records, and the kernel maps 64 kB around each look.
    records = {} if streaming else {"writer_batch_size": ROWS_IN_A_RECORD}

    def load(**features: Any) -> Any:
        options = {**own, **records, **features}
        with readers_silent():
            return load_dataset(reader, data_files=data_files, split=split, streaming=streaming, **options)

    try:
        return load()
    except (*FAILURES, *BROKEN) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if any(each in str(error) for each in OF_NO_ROWS) or isinstance(error, StopIteration):
            raise ValueError(f"{source} has no rows.") from error
        for file in files:
            if fault := find_fault(file):
                raise ValueError(f"{file}, line {fault[0]}: {fault[1]}") from error
        what = f"{source}, split {split!r}," if split not in splits else str(source)
        problem = f"{what} can't be read: {_first_line(error.__cause__ or error)}"
        if isinstance(error, DatasetGenerationError) and all(file.suffix in LINE_BY_LINE for file in files):
            with contextlib.suppress(*FAILURES, TypeError):
                return load(features=unified_features(files))
        raise ValueError(problem) from error


def _from_hub(
    source: str, split: str, name: str | None, *, streaming: bool, **places: Any
) -> Dataset | IterableDataset:
    try:
        return load_dataset(source, name, split=split, streaming=streaming, **places)
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"{source!r} is no file or folder here, and no dataset that can be reached on the hub: {_first_line(error)}"
        ) from error
    except (DatasetGenerationError, ValueError) as error:
        raise ValueError(f"{source}: {_first_line(error.__cause__ or error)}") from error


def _tell_of_numbers(rows: Dataset | IterableDataset, source: object, texts: Collection[str]) -> None:
    """Says that numbers of a CSV file are read as text, where the first row has some; of a stream nothing is read."""
    if isinstance(rows, Dataset) and reader_of(Path(str(source))) in (".csv", ".tsv"):
        numbers = [name for name, cell in rows[0].items() if name in texts and NUMBER.fullmatch(str(cell))]
        if numbers:
            logger.warning(f"{source}: the numbers of {quoted(numbers)} are read as text, as they are written")


def as_written(cell: str) -> str | None:
    """A cell of a CSV file as text; None where it is empty."""
    return cell or None


def _read_by_lines(path: Path) -> bool:
    """Whether a stream of a file is read line by line, which names the lines at fault."""
    return reader_of(path) in LINE_BY_LINE and (path.suffix in LINE_BY_LINE or path.suffix in OPENERS)


def _split_of(path: Path) -> str:
    """The split that a file in a folder belongs to, by the words in its path there; "train" if none tells."""
    words = set(re.split("[^a-z]+", str(path).lower()))
    return next((split for split, names in SPLIT_WORDS.items() if words & names), "train")


def _choose_split(splits: Any, split: str) -> Dataset | IterableDataset:
    if split not in splits:
        raise ValueError(f"there is no split {split!r}; there are {', '.join(map(repr, splits))}.")
    return splits[split]


def _stream_lines(paths: list[str]) -> Iterator[dict[str, Any]]:
    for path in paths:
        yield from read_lines(Path(path))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
