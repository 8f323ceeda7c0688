"""What is at a place that rows are read from, told by names and sizes alone.

Nothing is opened and no library of data is imported, so that a mistyped name is told at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".ndjson": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),
}
"""Which reader of `datasets` reads which files, and its options."""
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
SPREADSHEETS = (".xlsx", ".xls", ".xlsm", ".ods")
READS_HERE = (
    "arrow",
    "audiofolder",
    "csv",
    "imagefolder",
    "json",
    "parquet",
    "text",
    "videofolder",
    "webdataset",
    "xml",
)
"""Readers of `datasets`, which read whatever lies in the current folder where no files are named."""
NOT_ROWS = ("dataset_info.json", "dataset_infos.json")
MOST_ENTRIES = 1_000_000
"""Files and folders that a folder of rows may hold, images beside the rows among them."""


def check_place(source: str | Path, *, configured: bool = False) -> None:
    """Refuses a path where nothing is that rows could be read from. A name that may be one on the hub is left alone.

    Args:
        configured: whether a configuration is named, of which a folder has its own description.

    Raises:
        FileNotFoundError: nothing is there; names the nearest file that is.
        ValueError: a file is empty, or of a kind that cannot be read; or a reader is named in the place of files.
    """
    path = Path(source).expanduser()
    if str(source) in READS_HERE and not path.exists():
        raise ValueError(
            f"{str(source)!r} is a reader of `datasets`, which would read whatever lies in this folder: name a file "
            "or a folder, or give the reader its `data_files` in an entry of `datasets`"
        )
    if path.is_file():
        _check_file(path)
    elif path.is_dir():
        if path.resolve() == Path(path.resolve().anchor):
            raise ValueError(f"{source} is the whole disk: name the folder of the rows")
        if not configured and not is_saved(path) and next(readable_files(path), None) is None:
            raise FileNotFoundError(f"{path} holds no files that can be read ({', '.join(READERS)}).")
    elif Path(source).suffix in (*READERS, *COMPRESSED, *SPREADSHEETS) or _looks_like_path(str(source)):
        if path.exists() or path.is_symlink():
            found = "a link to nothing" if path.is_symlink() else "neither a file nor a folder"
            raise FileNotFoundError(f"{str(path)!r} is {found}: name a file of rows, or a folder of them.")
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, siblings, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise FileNotFoundError(f"there is no file or folder {str(path)!r}.{hint}")


def _check_file(path: Path) -> None:
    if path.suffix.lower() in SPREADSHEETS:
        raise ValueError(
            f"{path} is a spreadsheet, which is not read: save it as CSV there, or by "
            f"pandas.read_excel({path.name!r}).to_csv({path.stem + '.csv'!r}, index=False)"
        )
    if reader_of(path) is None:
        raise ValueError(f"{path}: files that end in {path.suffix!r} can't be read, only {', '.join(READERS)}.")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty.")


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote a folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def readable_files(folder: Path) -> Iterator[Path]:
    """The files of a folder, and of those in it, that hold rows, in no order.

    Raises:
        ValueError: as `entries`.
    """
    return (file for file in entries(folder) if reader_of(file) and file.name not in NOT_ROWS)


def entries(folder: Path) -> Iterator[Path]:
    """What is in a folder and in those in it, but for what links lead to, in no order.

    Raises:
        ValueError: that is more than `MOST_ENTRIES`, as in a home folder or a disk.
    """
    ahead, count = [str(folder)], 0
    while ahead:
        with contextlib.suppress(PermissionError), os.scandir(ahead.pop()) as found:
            for entry in found:
                count += 1
                if count > MOST_ENTRIES:
                    raise ValueError(
                        f"{folder} holds more than {MOST_ENTRIES:,} files and folders, too many to look through for "
                        "rows: name the folder or the file that the rows are in"
                    )
                if entry.is_dir(follow_symlinks=False):
                    ahead.append(entry.path)
                yield Path(entry.path)


def reader_of(path: Path) -> str | None:
    """The suffix in `READERS` that tells how a file is read; None if it can't be."""
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix
    return suffix if suffix in READERS else None


def _looks_like_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.count("/") > 1
