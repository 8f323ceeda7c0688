"""The first rows of a run, looked at before torch is imported.

`lowtide check` says what is found in them. A run that is started looks at the columns of the first one, so that it ends
there where no format of its method has these, and not after the seconds in which libraries are imported.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lowtide.data.sources.places import entries
from lowtide.methods import METHODS
from lowtide.parsing import parse_json
from lowtide.process.deferred_imports import without_collection
from lowtide.process.quiet_logs import only_from

if TYPE_CHECKING:
    from lowtide.data.formats.reading import RowFormat


class Run(Protocol):
    """What a command line asks for, as `TrainingCommand` has it."""

    @property
    def method(self) -> str: ...
    @property
    def values(self) -> Mapping[str, Any]: ...
    @property
    def what(self) -> Any:
        """The run's data: `RunOptions`."""
        ...

    @property
    def writes(self) -> bool: ...
    def load(self, *, evaluates: bool, what: Any = None) -> tuple[Any, Any]: ...


PAIRS, UNPAIRED = ("dpo", "orpo", "cpo", "reward"), ("kto", "bco")
"""Methods whose rows are pairs, and single completions."""
MOST_BYTES = 1 << 28
"""Of the files whose columns a run looks at beforehand: JSON is read whole before its first row is."""


def first_rows(given: Run, count: int) -> tuple[list[dict[str, Any]], bool] | None:
    """The first rows to train on, read as a stream, and whether there are some to evaluate on; None where they are on
    the hub, which is not asked.

    Raises:
        ValueError, OSError: they cannot be read, or there are none.
    """
    if not all(Path(name).expanduser().exists() for name in _places(given)):
        return None
    with without_collection():  # which begins before `datasets` is imported
        from lowtide.compat.datasets import without_torch

        with without_torch():
            what = _of_whole_splits(given.what)
            splits = what.test_split_size is not None  # by the number of rows, which a stream does not tell
            evaluates = str(given.values.get("eval_strategy", "no")) != "no" and not splits
            stream = replace(what, dataset_streaming=True, test_split_size=None)
            rows, evaluated = given.load(evaluates=evaluates, what=stream)
            first = [dict(row) for row in islice(iter(rows), count)]
            if evaluated is not None:
                next(iter(evaluated), None)
    if not first:
        raise ValueError("there are no rows")
    return first, evaluated is not None


def _of_whole_splits(what: Any) -> Any:
    """The same with `train` in place of `train[:100]`, which streams do not know."""
    listed = [
        parse_json(each) if isinstance(each, str) and each.startswith("{") else each for each in what.datasets or ()
    ]
    whole = [
        {**each, "split": _whole(each["split"])} if isinstance(each, dict) and "split" in each else each
        for each in listed
    ]
    evaluated = what.eval_split and _whole(what.eval_split)
    return replace(what, dataset_split=_whole(what.dataset_split), datasets=whole or None, eval_split=evaluated)


def _whole(split: str) -> str:
    return re.split(r"[\[+]", str(split))[0]


def format_of(given: Run, columns: Sequence[str], like: str) -> RowFormat[Any] | None:
    """How rows with these columns are read; None where the first row does not tell.

    Args:
        like: the built-in method whose rows are of the same kind.

    Raises:
        ValueError: the method has no format for them.
    """
    from lowtide.data.formats.columns import check_prompts
    from lowtide.data.formats.preferences import detect_pairs, detect_unpaired
    from lowtide.data.formats.reading import detect_format

    source = str(given.what.dataset or "the dataset")
    if given.writes and not given.values.get("environment_factory"):  # whose `reset` may give the whole prompt
        check_prompts(columns, source)
    if like == "sft":
        return detect_format(columns, text_field=given.values.get("dataset_text_field") or "text", source=source)
    if like in PAIRS:
        return detect_pairs(columns, source)
    return detect_unpaired(columns, source) if like in UNPAIRED else None


def check_columns(given: Run) -> None:
    """Refuses rows whose columns no format of the run's method has. The method is a built-in one, since another's
    declaration may import torch, and the rows are those of one dataset, whose files are read within a second.

    Raises:
        ValueError, OSError: as reading these rows would when the run starts.
    """
    if given.method not in METHODS.rows or given.what.datasets or sum(map(_size, _places(given))) > MOST_BYTES:
        return
    with only_from(logging.ERROR, "lowtide"):  # the run itself warns of the same rows
        found = first_rows(given, 1)
        if found is not None:
            format_of(given, list(found[0][0]), given.method)


def _places(given: Run) -> list[str]:
    """Where the run reads rows."""
    what = given.what
    listed = [each.get("path") if isinstance(each, dict) else each for each in what.datasets or ()]
    return [each for each in (what.dataset, *listed, what.eval_dataset) if isinstance(each, str)]


def _size(name: str) -> int:
    """The bytes of a file, or of those in a folder."""
    path = Path(name).expanduser()
    files = entries(path) if path.is_dir() else [path] if path.is_file() else []
    return sum(file.stat().st_size for file in files if file.is_file())
