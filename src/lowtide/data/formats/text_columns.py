"""The columns that formats read as texts, whatever they hold.

A CSV file does not say what kind of values its columns have. An answer `007` or `1.50` in a column of texts is read as
it is written there, and not as a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lowtide.data.formats.alpaca import ALPACA_COLUMNS
from lowtide.data.formats.labelled import PAIRS
from lowtide.data.formats.preferences import SIDES
from lowtide.data.formats.reading import ASKED
from lowtide.data.formats.source_target import COLUMNS

TEXT_COLUMNS = frozenset(
    (
        *("text", "sentence", "prompt", "completion", "instruction", "reference", *SIDES, *ALPACA_COLUMNS),
        *(name for names in (*ASKED, *PAIRS, *COLUMNS) for name in names),
    )
)
"""Of the formats of methods that train on the rows themselves."""
OF_PROMPTS = frozenset(("prompt", "system"))
"""Where a policy writes the completions: a reward function is given the other columns as the values that they are."""
NAMED_BY = ("dataset_text_field", "source_column", "target_column", "text_column_names")
"""The options that name columns of texts."""


def text_columns(options: Mapping[str, Any], *, writes: bool) -> frozenset[str]:
    """The columns of texts of a run, by the names that its formats have for them.

    Args:
        options: of the run, as they are given.
        writes: whether a policy writes the completions.
    """
    given = [options.get(name) for name in NAMED_BY]
    named = {name for value in given if value for name in ([value] if isinstance(value, str) else value)}
    return (OF_PROMPTS if writes else TEXT_COLUMNS) - {str(options.get("label_column_name"))} | named


def in_the_file(texts: Iterable[str], columns: Mapping[str, str] | None) -> frozenset[str]:
    """The same columns by the names that they have in the file, where `columns` gives them others."""
    return frozenset((columns or {}).get(name, name) for name in texts)
