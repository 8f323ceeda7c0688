"""Rows of a source and its target, for sequence to sequence: their columns, and what is read off them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lowtide.data.batches.token_rows import IGNORED
from lowtide.data.formats.conversation import describe, quoted
from lowtide.data.formats.reading import RowFormat
from lowtide.data.formats.samples import text_of
from lowtide.data.formats.token_columns import attended_range, is_token_list

COLUMNS = (
    *(("source", "target"), ("text", "summary"), ("document", "summary"), ("article", "highlights")),
    ("dialogue", "summary"),
)
"""Of texts, in order of precedence."""
TOKENS = (("source_ids", "target_ids"), ("input_ids", "labels"))
"""Of token ids."""
TRANSLATION = "translation"
"""The column of a text by language."""


@dataclass(frozen=True, slots=True)
class PairSample:
    """One row: two texts, or two lists of token ids."""

    source: Any
    target: Any


def detect_pairs_of_texts(
    columns: Sequence[str],
    source: str,
    *,
    source_column: str | None = None,
    target_column: str | None = None,
    languages: tuple[str, str] | None = None,
) -> tuple[RowFormat[PairSample], bool]:
    """How the rows of a dataset are read, and whether they are token ids.

    Args:
        source: what messages call the dataset.
        source_column: of the source, if a user named it; likewise `target_column`.
        languages: of the source and the target, where a column holds a text by language.

    Raises:
        ValueError: the columns are not those of sources and targets, or languages have to be named.
    """
    if source_column or target_column:
        names = (source_column or "source", target_column or "target")
        missing = [name for name in names if name not in columns]
        if missing:
            raise ValueError(
                f"{source} has no column {missing[0]!r} (source_column={source_column!r}, target_column="
                f"{target_column!r}): its columns are {quoted(columns)}"
            )
        return _of_texts(names), False
    for names in TOKENS:
        if {*names} <= {*columns}:
            more = ("attention_mask",) if "attention_mask" in columns else ()
            return RowFormat("sources and targets of token ids", (*names, *more), partial(_read_tokens, names)), True
    if TRANSLATION in columns:
        if languages is None:
            raise ValueError(
                f"{source} has the column {TRANSLATION!r}, a text by language: say from which to which by source_lang "
                "and target_lang"
            )
        return RowFormat("translations", (TRANSLATION,), partial(_read_translation, languages)), False
    for names in COLUMNS:
        if {*names} <= {*columns}:
            return _of_texts(names), False
    known = ", ".join(quoted(names) for names in (*COLUMNS, *TOKENS))
    raise ValueError(
        f"{source} has the columns {quoted(columns)}, and no source with a target is among them ({known}, or "
        f"{TRANSLATION!r}): name them by source_column and target_column"
    )


def _of_texts(names: tuple[str, str]) -> RowFormat[PairSample]:
    return RowFormat("sources and targets", names, partial(_read_texts, names))


def _read_texts(names: tuple[str, str], row: Mapping[str, Any]) -> PairSample:
    return PairSample(*(text_of(row.get(name), name) for name in names))


def _read_translation(languages: tuple[str, str], row: Mapping[str, Any]) -> PairSample:
    texts = row.get(TRANSLATION)
    if not isinstance(texts, Mapping):
        raise ValueError(f"{TRANSLATION!r} is {describe(texts)}; it must be a text by language.")
    for language in languages:
        if language not in texts:
            raise ValueError(
                f"{TRANSLATION!r} has no text in {language!r}, only in {quoted(list(texts))}: set source_lang and "
                "target_lang to two of them."
            )
    return PairSample(*(text_of(texts[language], f"{TRANSLATION}[{language!r}]") for language in languages))


def _read_tokens(names: tuple[str, str], row: Mapping[str, Any]) -> PairSample:
    """Token ids without padding: of a source what its mask leaves, of a target what ends in no -100."""
    for name in names:
        if not is_token_list(row.get(name)):
            raise ValueError(f"{name!r} is {describe(row.get(name))}; it must be a list of token ids.")
    first, second = (row[name] for name in names)
    kept = attended_range(row.get("attention_mask"), "attention_mask", len(first))
    last = next((place for place in range(len(second), 0, -1) if second[place - 1] != IGNORED), 0)
    return PairSample(first[kept], second[:last])
