"""What a dataset row may look like, and the one form that all rows are read into.

A row is a text, a conversation, a prompt with its completion (texts or conversations), or token ids; `FORMATS`
lists them in order of precedence. A reader takes the columns of one row, checks them, and gives a `Sample` (or a
`TokenSample` for rows that are tokenized already), so that nothing after this module knows where a row came from.
The names are TRL's (https://huggingface.co/docs/trl/dataset_formats); `conversations` is ShareGPT's, `instruction`
with `output` Stanford Alpaca's.

A new format is one reader, and one line in `FORMATS`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from lowtide.data.formats.alpaca import ALPACA_COLUMNS, alpaca_side, asked_side, with_system
from lowtide.data.formats.conversation import check_messages, check_roles, describe, quoted, without_nulls
from lowtide.data.formats.likely import proposal
from lowtide.data.formats.samples import ChatSample, Sample, TextSample, TokenSample, text_of
from lowtide.data.formats.token_columns import TOKEN_COLUMNS, read_tokens
from lowtide.parsing import parse_json
from lowtide.process.ways_out import in_python

__all__ = ["ChatSample", "RowFormat", "RowPlace", "Sample", "TextSample", "TokenSample", "detect_format"]


Read = TypeVar("Read")
FormatLine = tuple[str, tuple[str, ...], tuple[str, ...], Callable[[Mapping[str, Any]], Read]]
"""Name, columns needed, columns also read, and reader."""


@dataclass(frozen=True)
class RowFormat(Generic[Read]):
    """How the rows of one dataset are read. `columns` is what `read` looks at; empty means every column."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Read]

    @property
    def title(self) -> str:
        """How rows are read, in words."""
        return f"{self.name} ({', '.join(self.columns)})" if self.columns else self.name

    def read_batch(self, batch: Mapping[str, Sequence[Any]], place: "RowPlace") -> list[Read]:
        """Read a batch of columns.

        Raises:
            ValueError: a row that can't be used; the message names it.
        """
        names = self.columns or tuple(batch)
        samples = []
        for index, values in enumerate(zip(*(batch[name] for name in names), strict=True)):
            try:
                samples.append(self.read(dict(zip(names, values, strict=True))))
            except ValueError as error:
                raise place.error(index, error) from error
        return samples


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where the rows of a batch come from, for error messages that a person can act on."""

    source: str
    numbers: Sequence[int]

    def error(self, index: int, problem: object) -> ValueError:
        return ValueError(f"{self.source}, row {self.numbers[index]} (the first is 0): {problem}")


def detect_format(
    columns: Sequence[str],
    *,
    text_field: str = "text",
    formatting_func: Callable[[Mapping[str, Any]], Any] | None = None,
    source: str = "the dataset",
    chats: bool = True,
) -> RowFormat[Sample]:
    """Choose the format of a dataset by its columns.

    Args:
        chats: whether there is a chat template, so that Alpaca's rows are read as conversations and not as texts.

    Raises:
        ValueError: no format fits; the message names the columns that are there and those that are understood.
    """
    present = set(columns)
    if "input_ids" in present:
        formatting_func = None  # tokenized rows have nothing left to format
    if formatting_func is not None:
        return RowFormat("formatting_func", (), partial(read_formatted, formatting_func))
    row_format = match_format(columns, FORMATS)
    if row_format is not None:
        return row_format
    if text_field in present:
        return RowFormat("text", (text_field,), partial(read_text, text_field))
    row_format = match_format(columns, [alpaca_line("output", partial(alpaca_side, chats, "output"), chats=chats)])
    if row_format is None and not present & {"context", *ALPACA_COLUMNS[1:]}:
        row_format = match_format(columns, _asked_formats(chats))
    if row_format is not None:
        return row_format
    raise ValueError(
        f"{source} has the columns {quoted(columns)}, and none of these is among them: {text_field!r} "
        "(dataset_text_field), 'messages', 'conversations', 'prompt' with 'completion', 'instruction' with 'output', "
        "'input_ids'. "
        f"Rename the columns, or set dataset_text_field{in_python(', or pass a formatting_func')}."
        + proposal(columns, ("prompt", "completion"), ("messages",), ("text",))
    )


def _asked_formats(chats: bool) -> list[FormatLine[Sample]]:
    """Pairs of columns that datasets have for a prompt and its completion, and other names of `conversations`. They are
    read where no format fits, and there is nothing beside them that a prompt would need."""
    kind = "conversations" if chats else "texts"
    pairs: list[FormatLine[Sample]] = [
        (f"{asked} and {answered}, as {kind}", (asked, answered), (), partial(asked_side, chats, asked, answered))
        for asked, answered in ASKED
    ]
    return [*pairs, ("conversation", ("conversation",), TEMPLATE_COLUMNS, partial(read_messages, "conversation"))]


def alpaca_line(*answers: Any, chats: bool) -> FormatLine[Any]:
    """The line of a table of formats for rows with an instruction: the columns of answers, and their reader."""
    *names, read = answers
    return (f"Alpaca, as {'conversations' if chats else 'texts'}", ("instruction", *names), ALPACA_COLUMNS, read)


def match_format(columns: Sequence[str], formats: Sequence[FormatLine[Read]]) -> RowFormat[Read] | None:
    """The first of the formats whose columns are all there."""
    for name, required, optional, read in formats:
        if set(required).issubset(columns):
            return RowFormat(name, (*required, *(column for column in optional if column in columns)), read)
    return None


def read_text(text_field: str, row: Mapping[str, Any]) -> Sample:
    return TextSample(text_of(row.get(text_field), text_field))


def read_messages(column: str, row: Mapping[str, Any]) -> Sample:
    return ChatSample(check_roles(check_messages(row.get(column), column)), **template_inputs(row))


def read_sharegpt(row: Mapping[str, Any]) -> Sample:
    talk = with_system(check_messages(row.get("conversations"), "conversations"), row)
    return ChatSample(check_roles(talk), **template_inputs(row))


def read_prompt_completion(row: Mapping[str, Any]) -> Sample:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) != isinstance(completion, list):
        raise ValueError(
            f"'prompt' is {describe(prompt)} and 'completion' is {describe(completion)}; both must be strings, or "
            "both lists of messages."
        )
    if not isinstance(prompt, list):
        return TextSample(text_of(completion, "completion"), prompt=text_of(prompt, "prompt"))
    opening = check_messages(prompt, "prompt")
    messages = check_roles(opening + check_messages(completion, "completion"))
    return ChatSample(messages, len(opening), **template_inputs(row))


def read_formatted(formatting_func: Callable[[Mapping[str, Any]], Any], row: Mapping[str, Any]) -> Sample:
    """Read what `formatting_func` makes of one row: a text, or the messages of a conversation."""
    made = _made(formatting_func, row)
    if isinstance(made, str):
        return TextSample(made)
    if isinstance(made, list) and all(isinstance(message, Mapping) for message in made):
        return ChatSample(check_roles(check_messages(made, "formatting_func's result")))
    raise ValueError(
        f"formatting_func returned {describe(made)}; it is called with one row, and must return its text or a "
        "list of messages."
    )


def _made(formatting_func: Callable[[Mapping[str, Any]], Any], row: Mapping[str, Any]) -> Any:
    """What a formatting function makes of a row. One for older TRL takes a batch, and returns a list of texts."""
    try:
        made = formatting_func(row)
        if not (isinstance(made, list) and made and isinstance(made[0], str)):
            return made
    except Exception as error:
        made = error
    try:
        of_batch = formatting_func({column: [value] for column, value in row.items()})
        if isinstance(of_batch, list) and len(of_batch) == 1 and isinstance(of_batch[0], str):
            return of_batch[0]
    except Exception:
        pass
    if isinstance(made, Exception):
        raise ValueError(f"formatting_func failed with {type(made).__name__}: {made}") from made
    return made


ASKED = (
    *(("question", "answer"), ("question", "response"), ("query", "response"), ("query", "answer")),
    *(("instruction", "response"), ("input", "output"), ("prompt", "response")),
)
"""Columns of what was asked and what was answered, in order of precedence."""
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
RESERVED_KEYWORDS = (
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
)
"""Arguments of `apply_chat_template` that preparation sets itself."""
FORMATS: tuple[FormatLine[Sample], ...] = (
    ("input_ids", ("input_ids",), TOKEN_COLUMNS, read_tokens),
    ("prompt-completion", ("prompt", "completion"), TEMPLATE_COLUMNS, read_prompt_completion),
    ("messages", ("messages",), TEMPLATE_COLUMNS, partial(read_messages, "messages")),
    ("ShareGPT conversations", ("conversations",), (*TEMPLATE_COLUMNS, "system"), read_sharegpt),
)
"""In order of precedence. Rows that fit none of these are texts, or else those of Alpaca."""


def template_inputs(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that the chat template is given: `tools` and `chat_template_kwargs`, which may be JSON."""
    tools, kwargs = (_from_json(row.get(name), name) for name in TEMPLATE_COLUMNS)
    if not isinstance(kwargs, Mapping | None):
        raise ValueError(f"'chat_template_kwargs' is {describe(kwargs)}; it must be a mapping.")
    reserved = next((key for key in kwargs or () if key in RESERVED_KEYWORDS), None)
    if reserved is not None:
        raise ValueError(
            f"'chat_template_kwargs' has {reserved!r}, which says how rows are tokenized, and not what the template "
            "writes. Remove it."
        )
    # Arrow gives every row of a struct column every key, so null is how an absent keyword looks.
    given = {key: value for key, value in (kwargs or {}).items() if value is not None}
    return {"tools": tools or None, "template_kwargs": given}


def _from_json(value: Any, name: str) -> Any:
    try:
        return parse_json(value) if isinstance(value, str) else without_nulls(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name!r} is a string that is not JSON ({error}).") from None
