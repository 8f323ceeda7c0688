"""Rows by their lengths alone, where there is no dataset: `1024x8`, or numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from datasets import Dataset

from lowtide.methods.method import Method
from lowtide.run.options.configs import config_class
from lowtide.run.options.training import default_of

Length = int | Sequence[int]
Lengths = str | Sequence[Length]
"""Of each row, its tokens or those of its parts; or the same in words."""
DEFAULT = "1024x8"
BATCH = "per_device_train_batch_size"
MOST_TOKENS = 1 << 24
"""Of all rows together: they are made, so that a trace can run them, which takes a second for every few millions."""
TOKENS = "[0-9]+(?:_[0-9]+)*"
"""As Python writes whole numbers."""
COLUMNS = {
    1: ("input_ids",),
    2: ("prompt_ids", "completion_ids"),
    3: ("prompt_ids", "chosen_ids", "rejected_ids"),
    4: ("prompt_ids", "chosen_ids", "rejected_ids", "reference_ids"),
}
"""Of a prepared row, by how many parts it has."""


@dataclass(frozen=True)
class RowLengths:
    """Rows of such lengths."""

    lengths: tuple[Length, ...]
    method: Method

    @property
    def batch(self) -> int:
        """How many rows there are, which are a batch where nothing else says how many are."""
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, of which all parts count."""
        return max(each if isinstance(each, int) else sum(each) for each in self.lengths)

    @property
    def sequence(self) -> int:
        """Tokens of the longest sequence, of which a pair has two, as a source and its target are."""
        apart = bool(self.parts)
        return max(
            each if isinstance(each, int) else max(each) if apart else each[0] + max(each[1:]) for each in self.lengths
        )

    def rows(self) -> Dataset:
        """Prepared rows; of prompts alone, where the policy writes what follows."""
        return Dataset.from_list(rows_of(self.lengths, writes=self.method.writes is not None, parts=self.parts))

    @property
    def parts(self) -> tuple[str, ...]:
        """The columns of tokens, where their number does not say which they are."""
        return self.method.rows.parts

    def of(self, tokens: int) -> RowLengths:
        """As many rows, whose longest has so many tokens."""
        return RowLengths(tuple(_scaled(each, tokens / self.longest) for each in self.lengths), self.method)

    def __str__(self) -> str:
        """In words."""
        first = self.lengths[0]
        if any(each != first for each in self.lengths):
            return f"{len(self.lengths)} rows of up to {self.longest:,} tokens"
        count = f"{len(self.lengths)} row{'s' * (len(self.lengths) > 1)} of"
        if isinstance(first, int):
            return f"{count} {'prompts of ' * (self.method.writes is not None)}{first:,} tokens"
        names = self.parts or COLUMNS[len(first)]
        parts = ", ".join(f"{name.removesuffix('_ids')} {size:,}" for name, size in zip(names, first, strict=True))
        return f"{count} {self.longest:,} tokens ({parts})"


def row_lengths(lengths: Lengths, method: Method) -> RowLengths:
    """Reads lengths.

    Args:
        lengths: numbers, or "1024x8": so many tokens in so many rows. Of a pair it is the tokens of each of its two
            sequences, of which prompt and completion have a half; "512+256+256x8" gives the parts themselves. Several
            are separated by commas.
        method: whose rows they are.

    Raises:
        ValueError: they are none, have another number of parts than the method's rows, or too many tokens.
    """
    found = RowLengths(tuple(_read(lengths, method) if isinstance(lengths, str) else lengths), method)
    tokens = sum(each if isinstance(each, int) else sum(each) for each in found.lengths)
    if tokens > MOST_TOKENS:
        raise ValueError(
            f"lengths: {tokens:,} tokens in all are more than the {MOST_TOKENS:,} that can be traced: give shorter or "
            "fewer --lengths"
        )
    return found


def _read(lengths: str, method: Method) -> list[Length]:
    """Lengths in words."""
    found: list[Length] = []
    for word in lengths.replace(",", " ").split():
        match = re.fullmatch(rf"({TOKENS}(?:\+{TOKENS})*)(?:x([0-9]+))?", word.lower())
        sizes = tuple(int(each) for each in match[1].split("+")) if match else ()
        if match is None or not all(sizes) or match[2] == "0":
            raise ValueError(
                f"lengths {lengths!r} are none: write '1024x8' (8 rows of 1,024 tokens), '512+256+256x8' (the parts of "
                "each), or several with commas between"
            )
        found += [_parts(sizes, method)] * min(int(match[2] or 1), MOST_TOKENS + 1)
    if not found:
        raise ValueError("there are no lengths: write '1024x8', 8 rows of 1,024 tokens")
    return found


def options_of_lengths(lengths: RowLengths, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a run file has to say so that the run sees such rows: how many a batch has, and lengths that cut none.

    Args:
        lengths: of the rows.
        given: the user's own options, which stay as they are.
    """

    def value_of(name: str) -> Any:
        return given[name] if name in given else _default(lengths.method, name)

    found: dict[str, Any] = {BATCH: lengths.batch}
    for name, tokens in _least_lengths(lengths, value_of("max_completion_length")).items():
        most = value_of(name)
        if most is not None and (tokens > most or (value_of("packing") and tokens < most)):
            found[name] = tokens  # packed rows are as long as `max_length`, whatever rows there are
    if given.get("max_seq_length") is not None:  # the older name of `max_length`
        found.pop("max_length", None)
    return {name: value for name, value in found.items() if name not in given}


def notes_of_lengths(lengths: RowLengths, given: Mapping[str, Any]) -> tuple[str, ...]:
    """What a user's own options would make of rows that are planned as they are given.

    Args:
        lengths: of the rows.
        given: the user's own options.
    """
    names = _least_lengths(lengths, given.get("max_completion_length"))
    cut = [f"{name}={given[name]}" for name, tokens in names.items() if given.get(name) and given[name] < tokens]
    found = [f"{', '.join(cut)} would cut these rows, which are planned as long as they are given"] if cut else []
    most = given["max_length"] if "max_length" in given else _default(lengths.method, "max_length")
    if given.get("packing") and (most or 0) > lengths.longest:
        found.append(f"packing=True would fill rows up to max_length={most}, and they are planned as they are given")
    return tuple(found)


def _default(method: Method, name: str) -> Any:
    """Of an option; None where the method has none of this name."""
    config = config_class(method)
    return default_of(config, name) if name in {each.name for each in fields(config)} else None


def _least_lengths(lengths: RowLengths, written: int | None) -> dict[str, int]:
    """By option, the tokens that it has to leave; `written` are those of a completion that the policy writes."""
    if lengths.method.writes is not None:
        return {"max_length": lengths.longest + (written or 0)}
    if lengths.parts:
        sizes = [each for each in lengths.lengths if not isinstance(each, int)]
        names = [f"max_{name.removesuffix('_ids')}_length" for name in lengths.parts]
        return {name: max(each[k] for each in sizes) for k, name in enumerate(names)}
    return {"max_length": lengths.sequence}


def _parts(sizes: tuple[int, ...], method: Method) -> Length:
    """The tokens of a row's parts.

    Raises:
        ValueError: it has others.
    """
    wanted = _wanted(method)
    if len(sizes) == 1 and wanted > 1:
        half = max(1, sizes[0] // 2)
        return (half,) * wanted
    if len(sizes) != wanted:
        raise ValueError(f"a row of {method.name} has {wanted} parts, and {'+'.join(map(str, sizes))} has {len(sizes)}")
    return sizes[0] if wanted == 1 else sizes


def _wanted(method: Method) -> int:
    if method.writes is not None or (method.rows.completions == 0 and not method.rows.parts):
        return 1
    return len(method.rows.parts) or 1 + method.rows.completions


def _scaled(length: Length, factor: float) -> Length:
    if isinstance(length, int):
        return max(1, round(length * factor))
    return tuple(max(1, round(each * factor)) for each in length)


def rows_of(lengths: Sequence[Length], *, writes: bool = False, parts: Sequence[str] = ()) -> list[dict]:
    """Prepared rows of such lengths; of prompts alone, where the policy writes what follows.

    Args:
        parts: the columns of tokens, where their number does not say which they are.
    """
    if writes:
        return [{"prompt_ids": [1] * (length if isinstance(length, int) else length[0])} for length in lengths]
    columns = COLUMNS | {len(parts): tuple(parts)}
    made = []
    for length in lengths:
        each = (length,) if isinstance(length, int) else tuple(length)
        row: dict[str, Any] = {name: [1] * size for name, size in zip(columns[len(each)], each, strict=True)}
        if "input_ids" in row:
            row |= {"labels": row["input_ids"], "number": len(made), "text_label": len(made) % 2}
        if "completion_ids" in row:
            row |= {"kl_completion_ids": row["completion_ids"], "label": True}
        made.append(row)
    return made
