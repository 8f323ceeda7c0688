"""What a row of preferences may look like: a pair of completions, one chosen and one rejected, or one with a label.

Each completion is read, together with its prompt, into the same `Sample` that supervised fine-tuning reads rows into;
a row of preferences is one or more of them, its *sides*. A pair may have sides beside the chosen and the rejected one,
which a method names. A pair's prompt may be implicit: all sides then begin with it. In conversations it is the messages
that all begin with, each side keeping at least one, as in TRL's `extract_prompt`; in texts, and in rows that are
tokenized already, it is found later, by tokens (`sides`).

The names are TRL's; `prompt_input_ids`, `chosen_input_ids` and `rejected_input_ids` are those of its older releases,
`input_ids_chosen` and its like of the oldest. `conversations` with `chosen` and `rejected` is ShareGPT's, `instruction`
with them Alpaca's, as LLaMA-Factory has both.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lowtide.data.formats.alpaca import alpaca_side, with_system
from lowtide.data.formats.conversation import check_messages, check_roles, describe, quoted
from lowtide.data.formats.likely import proposal
from lowtide.data.formats.reading import (
    TEMPLATE_COLUMNS,
    FormatLine,
    RowFormat,
    alpaca_line,
    match_format,
    read_prompt_completion,
    template_inputs,
)
from lowtide.data.formats.samples import ChatSample, Sample, TextSample, TokenSample, text_of
from lowtide.data.formats.token_columns import attended_range, is_token_list

SIDES = ("chosen", "rejected")


@dataclass(frozen=True, slots=True)
class PreferenceSample:
    """One row of preferences."""

    sides: tuple[Sample, ...]
    """The chosen and the rejected completion and what follows them, or a single one, each with its prompt."""
    label: bool | None = None
    """Whether a single completion is a desirable one."""
    margin: float | None = None
    """By how much the chosen completion is better, where the row says so."""


def detect_pairs(
    columns: Sequence[str], source: str, *, margins: bool = False, chats: bool = True, sides: Sequence[str] = SIDES
) -> RowFormat[PreferenceSample]:
    """How the rows of a dataset of pairs are read.

    Args:
        sides: the columns of completions: `SIDES`, and those that a method has beside them.
        margins: whether the rows' margins are wanted, if they have any.
        chats: whether there is a chat template, so that Alpaca's rows are read as conversations and not as texts.

    Raises:
        ValueError: the columns are not those of pairs.
    """
    row_format = match_format(columns, _pair_formats(sides, chats))
    if row_format is None:
        raise ValueError(
            f"{source} has the columns {quoted(columns)}; pairs need {_all(sides)}, with 'prompt', 'conversations' or "
            f"'instruction' where all do not begin with it, or {_all(f'{name}_ids' for name in sides)} with "
            "'prompt_ids'. Rename the columns." + proposal(columns, ("prompt", *sides), sides)
        )
    if margins and "margin" in columns:
        return replace(
            row_format, columns=(*row_format.columns, "margin"), read=partial(_read_with_margin, row_format.read)
        )
    return row_format


def detect_unpaired(columns: Sequence[str], source: str, *, chats: bool = True) -> RowFormat[PreferenceSample]:
    """How the rows of a dataset of labelled completions, or of pairs to be taken apart, are read.

    Raises:
        ValueError: the columns are of neither.
    """
    row_format = match_format(columns, UNPAIRED_FORMATS) or match_format(columns, _pair_formats(SIDES, chats))
    if row_format is None:
        raise ValueError(
            f"{source} has the columns {quoted(columns)}; labelled completions need 'prompt', 'completion' and "
            "'label' (true or false), and pairs 'chosen' and 'rejected'. Rename the columns."
            + proposal(columns, ("prompt", "completion", "label"), ("prompt", "chosen", "rejected"))
        )
    return row_format


def read_pair(sides: Sequence[str], row: Mapping[str, Any]) -> PreferenceSample:
    """Texts or conversations with a `prompt` of their own."""
    prompt = row.get("prompt")
    for name in sides:
        if isinstance(row.get(name), list) != isinstance(prompt, list):
            raise ValueError(
                f"'prompt' is {describe(prompt)} and {name!r} is {describe(row.get(name))}; all must be strings, or "
                f"all lists of messages. If {_all(sides)} repeat the prompt, remove the column 'prompt'."
            )
    return PreferenceSample(tuple(_completion(row, name) for name in sides))


def read_implicit_pair(sides: Sequence[str], row: Mapping[str, Any]) -> PreferenceSample:
    """Texts or conversations that all begin with the prompt."""
    values = {name: row.get(name) for name in sides}
    if len({isinstance(value, list) for value in values.values()}) > 1:
        said = ", ".join(f"{name!r} is {describe(value)}" for name, value in values.items())
        raise ValueError(f"{said}; all must be strings, or all lists of messages.")
    if not isinstance(values[sides[0]], list):
        return PreferenceSample(tuple(TextSample(text_of(value, name)) for name, value in values.items()))
    talks = [check_roles(check_messages(value, name)) for name, value in values.items()]
    most = min(map(len, talks)) - 1
    shared = next((index for index in range(most) if any(talk[index] != talks[0][index] for talk in talks)), most)
    inputs = template_inputs(row)
    return PreferenceSample(tuple(ChatSample(talk, shared, **inputs) for talk in talks))


def read_sharegpt_pair(sides: Sequence[str], row: Mapping[str, Any]) -> PreferenceSample:
    """A conversation up to the answer, and the answers, each a message or a list of messages."""
    answers = {name: [row[name]] if isinstance(row.get(name), Mapping) else row.get(name) for name in sides}
    prompt = row.get("conversations")
    if isinstance(prompt, list) and prompt:
        prompt = with_system(check_messages(prompt, "conversations"), row)
    return read_pair(sides, {**row, **answers, "prompt": prompt})


def read_alpaca_pair(sides: Sequence[str], chats: bool, row: Mapping[str, Any]) -> PreferenceSample:
    """An instruction, and the answers to it."""
    return PreferenceSample(tuple(alpaca_side(chats, name, row) for name in sides))


def read_labelled(row: Mapping[str, Any]) -> PreferenceSample:
    return PreferenceSample((read_prompt_completion(row),), label=_label(row))


def read_token_pair(ids: str, mask: str, parts: Sequence[str], row: Mapping[str, Any]) -> PreferenceSample:
    """Rows tokenized already, in columns that are called by these patterns; without a prompt, all begin with it."""
    tokens = {part: _ids(row, ids.format(part), mask.format(part)) for part in parts}
    prompt = tokens.pop("prompt", None)
    return PreferenceSample(tuple(_joined(prompt, completion) for completion in tokens.values()))


def read_labelled_tokens(row: Mapping[str, Any]) -> PreferenceSample:
    return PreferenceSample((_joined(_ids(row, "prompt_ids"), _ids(row, "completion_ids")),), label=_label(row))


def _token_pairs(sides: Sequence[str], ids: str, mask: str) -> Iterator[FormatLine[PreferenceSample]]:
    """The formats of pairs whose columns of tokens, and of their masks, are called by these patterns."""
    for title, parts in (("pairs", ("prompt", *sides)), ("implicit pairs", sides)):
        read = partial(read_token_pair, ids, mask, parts)
        names, masks = (tuple(pattern.format(part) for part in parts) for pattern in (ids, mask))
        yield f"{title} of token ids", names, masks, read


UNPAIRED_FORMATS: tuple[FormatLine[PreferenceSample], ...] = (
    ("labelled ids", ("prompt_ids", "completion_ids", "label"), (), read_labelled_tokens),
    ("labelled completions", ("prompt", "completion", "label"), TEMPLATE_COLUMNS, read_labelled),
)
"""In order of precedence; rows that fit none of these may be pairs."""


def _pair_formats(sides: Sequence[str], chats: bool) -> list[FormatLine[PreferenceSample]]:
    """The formats of pairs with these sides, in order of precedence."""
    shared = ("conversations", *sides), (*TEMPLATE_COLUMNS, "system"), partial(read_sharegpt_pair, sides)
    return [
        *_token_pairs(sides, "{}_ids", "{}_attention_mask"),
        *_token_pairs(sides, "{}_input_ids", "{}_attention_mask"),
        *_token_pairs(sides, "input_ids_{}", "attention_mask_{}"),
        ("pairs", ("prompt", *sides), TEMPLATE_COLUMNS, partial(read_pair, sides)),
        ("ShareGPT pairs", *shared),
        alpaca_line(*sides, partial(read_alpaca_pair, sides, chats), chats=chats),
        ("implicit pairs", tuple(sides), TEMPLATE_COLUMNS, partial(read_implicit_pair, sides)),
    ]


def _all(names: Iterable[str]) -> str:
    """`'a', 'b' and 'c'`."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} and {last}"


def _completion(row: Mapping[str, Any], name: str) -> Sample:
    if not isinstance(row.get(name), list):
        return TextSample(text_of(row.get(name), name), prompt=text_of(row.get("prompt"), "prompt"))
    opening = check_messages(row["prompt"], "prompt")
    try:
        messages = check_roles(opening + check_messages(row[name], name))
    except ValueError as error:
        raise ValueError(f"'prompt' and {name!r} together: {error}") from error
    return ChatSample(messages, len(opening), **template_inputs(row))


def _joined(prompt: list[int] | None, completion: list[int]) -> Sample:
    return TokenSample([*(prompt or ()), *completion], prompt_tokens=None if prompt is None else len(prompt))


def _ids(row: Mapping[str, Any], name: str, mask: str = "") -> list[int]:
    """The tokens in a column, without those that its mask says are padding."""
    values = row.get(name)
    if not is_token_list(values):
        raise ValueError(f"{name!r} is {describe(values)}; it must be a list of token ids.")
    assert isinstance(values, list)
    return values[attended_range(row.get(mask), mask, len(values))]


def _label(row: Mapping[str, Any]) -> bool:
    label = row.get("label")
    if not isinstance(label, bool) and label not in (0, 1):
        raise ValueError(f"'label' is {label!r}; it must be true or 1 (desirable), or false or 0 (undesirable).")
    return bool(label)


def _read_with_margin(read: Any, row: Mapping[str, Any]) -> PreferenceSample:
    margin = row.get("margin")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ValueError(f"'margin' is {margin!r}; it must be a number.")
    return replace(read(row), margin=float(margin))
