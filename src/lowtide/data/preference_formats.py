"""What a row of preferences may look like: a pair of completions, one chosen and one rejected, or one with a label.

Each completion is read, together with its prompt, into the same `Sample` that supervised fine-tuning reads rows into;
a row of preferences is one or two of them, its *sides*. A pair's prompt may be implicit: both sides then begin with
it. In conversations it is the messages that both begin with, each side keeping at least one, as in TRL's
`extract_prompt`; in texts, and in rows that are tokenized already, it is found later, by tokens (`sides`).

The names are TRL's; `prompt_input_ids`, `chosen_input_ids` and `rejected_input_ids` are those of its older releases.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lowtide.data.conversation import check_messages, check_roles, describe, quoted
from lowtide.data.formats import (
    TEMPLATE_COLUMNS,
    ChatSample,
    FormatLine,
    RowFormat,
    Sample,
    TextSample,
    TokenSample,
    match_format,
    read_prompt_completion,
    template_inputs,
    text_of,
)


@dataclass(frozen=True, slots=True)
class PreferenceSample:
    """One row of preferences."""

    sides: tuple[Sample, ...]
    """The chosen and the rejected completion, or a single one, each with its prompt."""
    label: bool | None = None
    """Whether a single completion is a desirable one."""
    margin: float | None = None
    """By how much the chosen completion is better, where the row says so."""


def detect_pairs(columns: Sequence[str], source: str, *, margins: bool = False) -> RowFormat[PreferenceSample]:
    """How the rows of a dataset of pairs are read.

    Raises:
        ValueError: the columns are not those of pairs.
    """
    row_format = match_format(columns, PAIR_FORMATS)
    if row_format is None:
        raise ValueError(
            f"{source} has the columns {quoted(columns)}; pairs need 'chosen' and 'rejected', with 'prompt' where "
            "both do not begin with it, or 'chosen_ids' and 'rejected_ids' with 'prompt_ids'. Rename the columns."
        )
    if margins and "margin" in columns:
        return replace(
            row_format, columns=(*row_format.columns, "margin"), read=partial(_read_with_margin, row_format.read)
        )
    return row_format


def detect_unpaired(columns: Sequence[str], source: str) -> RowFormat[PreferenceSample]:
    """How the rows of a dataset of labelled completions, or of pairs to be taken apart, are read.

    Raises:
        ValueError: the columns are of neither.
    """
    row_format = match_format(columns, UNPAIRED_FORMATS) or match_format(columns, PAIR_FORMATS)
    if row_format is None:
        raise ValueError(
            f"{source} has the columns {quoted(columns)}; labelled completions need 'prompt', 'completion' and "
            "'label' (true or false), and pairs 'chosen' and 'rejected'. Rename the columns."
        )
    return row_format


def read_pair(row: Mapping[str, Any]) -> PreferenceSample:
    """Texts or conversations with a `prompt` of their own."""
    prompt = row.get("prompt")
    for name in ("chosen", "rejected"):
        if isinstance(row.get(name), list) != isinstance(prompt, list):
            raise ValueError(
                f"'prompt' is {describe(prompt)} and {name!r} is {describe(row.get(name))}; all must be strings, or "
                "all lists of messages. If 'chosen' and 'rejected' repeat the prompt, remove the column 'prompt'."
            )
    return PreferenceSample((_completion(row, "chosen"), _completion(row, "rejected")))


def read_implicit_pair(row: Mapping[str, Any]) -> PreferenceSample:
    """Texts or conversations that both begin with the prompt."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise ValueError(
            f"'chosen' is {describe(chosen)} and 'rejected' is {describe(rejected)}; both must be strings, or both "
            "lists of messages."
        )
    if not isinstance(chosen, list):
        return PreferenceSample((TextSample(text_of(chosen, "chosen")), TextSample(text_of(rejected, "rejected"))))
    talks = [check_roles(check_messages(side, name)) for side, name in ((chosen, "chosen"), (rejected, "rejected"))]
    most = min(map(len, talks)) - 1
    shared = next((index for index in range(most) if talks[0][index] != talks[1][index]), most)
    inputs = template_inputs(row)
    return PreferenceSample(tuple(ChatSample(talk, shared, **inputs) for talk in talks))


def read_labelled(row: Mapping[str, Any]) -> PreferenceSample:
    return PreferenceSample((read_prompt_completion(row),), label=_label(row))


def read_token_pair(prompt: str | None, chosen: str, rejected: str, row: Mapping[str, Any]) -> PreferenceSample:
    """Rows tokenized already, by the names of their columns; without a prompt, both begin with it."""
    return PreferenceSample((_tokens(row, prompt, chosen), _tokens(row, prompt, rejected)))


def read_labelled_tokens(row: Mapping[str, Any]) -> PreferenceSample:
    return PreferenceSample((_tokens(row, "prompt_ids", "completion_ids"),), label=_label(row))


def _token_pairs(suffix: str) -> tuple[FormatLine[PreferenceSample], FormatLine[PreferenceSample]]:
    prompt, chosen, rejected = (f"{part}_{suffix}" for part in ("prompt", "chosen", "rejected"))
    return (
        (f"pairs of {suffix}", (prompt, chosen, rejected), (), partial(read_token_pair, prompt, chosen, rejected)),
        (f"implicit pairs of {suffix}", (chosen, rejected), (), partial(read_token_pair, None, chosen, rejected)),
    )


PAIR_FORMATS: tuple[FormatLine[PreferenceSample], ...] = (
    *_token_pairs("ids"),
    *_token_pairs("input_ids"),
    ("pairs", ("prompt", "chosen", "rejected"), TEMPLATE_COLUMNS, read_pair),
    ("implicit pairs", ("chosen", "rejected"), TEMPLATE_COLUMNS, read_implicit_pair),
)
UNPAIRED_FORMATS: tuple[FormatLine[PreferenceSample], ...] = (
    ("labelled ids", ("prompt_ids", "completion_ids", "label"), (), read_labelled_tokens),
    ("labelled completions", ("prompt", "completion", "label"), TEMPLATE_COLUMNS, read_labelled),
)
"""In order of precedence; rows that fit none of these may be pairs."""


def _completion(row: Mapping[str, Any], name: str) -> Sample:
    if not isinstance(row.get(name), list):
        return TextSample(text_of(row.get(name), name), prompt=text_of(row.get("prompt"), "prompt"))
    opening = check_messages(row["prompt"], "prompt")
    try:
        messages = check_roles(opening + check_messages(row[name], name))
    except ValueError as error:
        raise ValueError(f"'prompt' and {name!r} together: {error}") from error
    return ChatSample(messages, len(opening), **template_inputs(row))


def _tokens(row: Mapping[str, Any], prompt: str | None, completion: str) -> TokenSample:
    opening = [] if prompt is None else _ids(row, prompt)
    return TokenSample(opening + _ids(row, completion), prompt_tokens=None if prompt is None else len(opening))


def _ids(row: Mapping[str, Any], name: str) -> list[int]:
    values = row.get(name)
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ValueError(f"{name!r} is {describe(values)}; it must be a list of token ids.")
    return values


def _label(row: Mapping[str, Any]) -> bool:
    label = row.get("label")
    if not isinstance(label, bool):
        raise ValueError(f"'label' is {label!r}; it must be true (desirable) or false (undesirable).")
    return label


def _read_with_margin(read: Any, row: Mapping[str, Any]) -> PreferenceSample:
    margin = row.get("margin")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ValueError(f"'margin' is {margin!r}; it must be a number.")
    return replace(read(row), margin=float(margin))
