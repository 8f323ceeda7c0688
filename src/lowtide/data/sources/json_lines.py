"""JSON files read line by line: to stream them, and to say what is wrong with one that can't be read.

`datasets` infers the columns of a JSON file from its first 10 MB, and what it says about a broken line or a late
column is about Arrow's types. Here is the slow way, taken only after it has failed.
"""

import bz2
import contextlib
import functools
import gzip
import io
import json
import logging
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Features
from pyarrow import json as arrow_json

from lowtide.parsing import parse_json

logger = logging.getLogger(__name__)

LINE_BY_LINE = (".jsonl", ".ndjson")
BLOCK_BYTES = 10 << 20
MOST_LINE_BYTES = 256 << 20
"""Of a line, which is one row: a small compressed file may hold one that takes all memory."""
MOST_GROWTH, LOOKED_AT_BYTES = 200, 2 << 30
"""How many times its size a file may have once it is decompressed, where that is more than a line may have: texts and
numbers come to 20 at most. It is looked at in so many bytes of what comes out."""
MOST_DEPTH = 64
"""Lists and objects within each other, of which Arrow's schemas hold no more."""
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_SIGNS = re.compile(rb"[][{}]|\bnull\b")
OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""How compressed files are opened, by suffix; `zstd` is not among Python's libraries."""
BROKEN = (EOFError, OSError, lzma.LZMAError, zlib.error)
"""What reading a compressed file raises where it is cut off or broken."""


TOO_LONG = f"more than {MOST_LINE_BYTES >> 20} MiB in one line, which is one row; put each row on a line of its own."


def find_fault(path: Path) -> tuple[int, str] | None:
    """The first line of a JSON file that is at fault, counted from 1, and what is wrong with it."""
    kind = Path(path.stem).suffix if path.suffix in OPENERS else path.suffix
    if kind not in (".json", *LINE_BY_LINE):
        return None
    if kind == ".json":
        try:
            with _opened(path) as file:
                whole = parse_json(file.read().decode("utf-8"))
            return first_conflict(enumerate(whole, start=1)) if isinstance(whole, list) else None
        except json.JSONDecodeError as error:
            if not _is_lines(path):
                return error.lineno, f"not JSON ({error.msg})."
        except (UnicodeDecodeError, *BROKEN):
            pass
    return first_conflict((number, parsed) for number, parsed in _parsed_lines(path))


def check_growth(path: Path) -> None:
    """Refuses a compressed file that is read whole, or in long lines, and comes to so much that no text does.

    Raises:
        ValueError: names the file.
    """
    if path.suffix not in OPENERS or Path(path.stem).suffix in LINE_BY_LINE:
        return
    most, size = max(MOST_GROWTH * path.stat().st_size, MOST_LINE_BYTES), 0
    with contextlib.suppress(*BROKEN), _opened(path) as file:  # what is broken is said when it is read
        while size < LOOKED_AT_BYTES and (block := file.read(BLOCK_BYTES)):
            size += len(block)
            if size > most:
                raise ValueError(
                    f"{path} comes to more than {most >> 20} MiB, {MOST_GROWTH} times its size, as no text does: it "
                    "would take all memory. Decompress it first if that is meant"
                )


def check_lines(path: Path) -> None:
    """Refuses a JSON file that would take all memory or end the process, before it is read as a whole: one with a line
    that is too long to be a row, with values that are nested so deeply that Arrow's parser runs out of stack, or with
    null for a row, which it crashes on or takes for a row without values. Warns of JSON lines that are a list.

    Raises:
        ValueError: names file and line.
    """
    kind = Path(path.stem).suffix if path.suffix in OPENERS else path.suffix
    if kind not in (".json", *LINE_BY_LINE):
        return
    most, nesting = MOST_LINE_BYTES if kind in LINE_BY_LINE else -2, _Nesting()
    with contextlib.suppress(*BROKEN), _opened(path) as file:  # what is broken is said when it is read
        for number, line in enumerate(iter(lambda: file.readline(most + 1), b""), start=1):
            if 0 <= most < len(line):
                raise ValueError(f"{path}, line {number}: {TOO_LONG}")
            if (nesting.depth or not _is_plain_row(line)) and (fault := nesting.fault_of(line)):
                raise ValueError(f"{path}, line {number}: {fault}")
    if nesting.outermost == b"[" and kind in LINE_BY_LINE:
        logger.warning(
            f"{path} holds a JSON list, and a file of JSON lines has an object on each line: each item of the list is "
            "taken for a row. Name the file .json, or put each row on a line of its own"
        )


def _is_plain_row(line: bytes) -> bool:
    """Whether a line has the brackets of an object, and not enough of them to be nested too deeply.

    A complete value is never followed by `{`, so of lines that begin and end so none continues the one before.
    """
    row = line.strip()
    return row.count(b"{") + row.count(b"[") <= MOST_DEPTH and row[:1] in (b"{", b"") and row[-1:] in (b"}", b"")


class _Nesting:
    """Which lists and objects are open after the lines so far."""

    def __init__(self) -> None:
        self.depth, self.outermost = 0, b""

    def fault_of(self, line: bytes) -> str:
        """Reads one more line; in words what Arrow cannot hold in it, or nothing."""
        for sign in _SIGNS.finditer(_TEXT.sub(b"", line)):
            if sign[0] in (b"[", b"{"):
                self.outermost = self.outermost if self.depth else sign[0]
                self.depth += 1
            elif sign[0] in (b"]", b"}"):
                self.depth = max(self.depth - 1, 0)
            elif self.depth == 0 or (self.depth == 1 and self.outermost == b"["):
                return "null, where a row must be an object: remove it."
            if self.depth > MOST_DEPTH:
                return (
                    f"lists and objects are nested more than {MOST_DEPTH} deep, which Arrow cannot hold: flatten the "
                    "value, or store it as a text."
                )
        return ""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one on each line.

    Raises:
        ValueError: a line that is not a JSON object; the message names file and line.
    """
    for number, parsed in _parsed_lines(path):
        if isinstance(parsed, str):
            raise ValueError(f"{path}, line {number}: {parsed}")
        yield parsed


def _opened(path: Path) -> Any:
    """A file of bytes, decompressed where its suffix says so."""
    return OPENERS.get(path.suffix, functools.partial(Path.open, mode="rb"))(path)


def _parsed_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """The lines of a file, counted from 1, each as a JSON object or, in words, why it is none."""
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES + 1), b""), start=1):
                if len(line) > MOST_LINE_BYTES:
                    yield number, TOO_LONG
                    return
                if line.strip():
                    yield number, _parse_object(line)
    except BROKEN as error:
        if path.suffix not in OPENERS:
            raise
        yield number + 1, f"cannot be decompressed ({error}); the file is cut off or broken, copy it again."


def _parse_object(line: bytes) -> dict[str, Any] | str:
    try:
        row = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "not UTF-8; convert the file first."
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg} at column {error.colno})."
    return row if isinstance(row, dict) else f"a JSON {type(row).__name__}, where each line must be an object."


def first_conflict(rows: Iterable[tuple[int, Any]]) -> tuple[int, str] | None:
    """The first row that is none, or has a value of another kind than the rows before have in the same column.

    What stands in place of a row that could not be read is a string that says why.
    """
    kinds: dict[str, str] = {}
    for number, row in rows:
        if not isinstance(row, Mapping):
            return number, row if isinstance(row, str) else f"a {type(row).__name__}, where a row must be an object."
        for column, value in row.items():
            if value is None:
                continue
            kind = "number" if isinstance(value, int | float) else type(value).__name__
            if kinds.setdefault(column, kind) != kind:
                return number, f"{column!r} is a {kind}, and a {kinds[column]} in the rows before."
    return None


def _is_lines(path: Path) -> bool:
    """Whether a file's first line is JSON by itself, as in JSON Lines."""
    with _opened(path) as file:
        try:
            return isinstance(parse_json(file.readline()), dict)
        except (ValueError, *BROKEN):
            return False


def unified_features(paths: Iterable[Path]) -> Features:
    """The columns that all lines of these files have together, where the first lines do not show them all.

    Raises:
        ValueError, TypeError: lines disagree about what a column is.
    """
    schemas = []
    for path in paths:
        with path.open("rb") as file:
            while block := b"".join(file.readlines(BLOCK_BYTES)):
                options = arrow_json.ReadOptions(block_size=len(block) + 1)
                schemas.append(arrow_json.read_json(io.BytesIO(block), read_options=options).schema)
    return Features.from_arrow_schema(pa.unify_schemas(schemas, promote_options="permissive"))
