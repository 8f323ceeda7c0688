"""What a dataset row may look like, and the one form that all rows are read into.

A row is a text, a conversation, a prompt with its completion (texts or conversations), or token ids; `FORMATS`
lists them in order of precedence. A reader takes the columns of one row, checks them, and gives a `Sample` (or a
`TokenSample` for rows that are tokenized already), so that nothing after this module knows where a row came from.
The names are TRL's (https://huggingface.co/docs/trl/dataset_formats); `conversations` is ShareGPT's.

A new format is one reader, and one line in `FORMATS`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from lowtide.data.conversation import Message, check_messages, check_roles, describe, quoted


@dataclass(frozen=True, slots=True)
class TextSample:
    """One row of plain text, which may be the completion of a prompt."""

    text: str
    prompt: str | None = None

    @property
    def kind(self) -> str:
        return "text" if self.prompt is None else "prompt and completion"


@dataclass(frozen=True, slots=True)
class ChatSample:
    """One row's conversation, with what else the chat template is given."""

    messages: list[Message]
    prompt_messages: int | None = None
    """How many messages are the prompt; None for a conversation without one."""
    tools: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "conversation" if self.prompt_messages is None else "conversational prompt and completion"

    def until(self, stop: int) -> "ChatSample":
        """The conversation of its first `stop` messages."""
        return ChatSample(self.messages[:stop], None, self.tools, self.template_kwargs)


@dataclass(frozen=True, slots=True)
class TokenSample:
    """One row that is tokenized already; the masks and labels given beside `input_ids` have its length."""

    input_ids: Sequence[int]
    labels: Sequence[int] | None = None
    completion_mask: Sequence[int] | None = None
    assistant_masks: Sequence[int] | None = None
    prompt_tokens: int | None = None
    """How many of them are the prompt, where the row gives its prompt apart."""

    @property
    def kind(self) -> str:
        return "tokenized row"


Sample = TextSample | ChatSample | TokenSample


Read = TypeVar("Read")
FormatLine = tuple[str, tuple[str, ...], tuple[str, ...], Callable[[Mapping[str, Any]], Read]]
"""Name, columns needed, columns also read, and reader."""


@dataclass(frozen=True)
class RowFormat(Generic[Read]):
    """How the rows of one dataset are read. `columns` is what `read` looks at; empty means every column."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Read]

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
) -> RowFormat[Sample]:
    """Choose the format of a dataset by its columns.

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
    raise ValueError(
        f"{source} has the columns {quoted(columns)}, and none of these is among them: {text_field!r} "
        "(dataset_text_field), 'messages', 'conversations', 'prompt' with 'completion', 'input_ids'. "
        "Rename the columns, set dataset_text_field, or pass a formatting_func."
    )


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


def read_tokens(row: Mapping[str, Any]) -> TokenSample:
    names = ("input_ids", "labels", "completion_mask", "assistant_masks")
    columns = {name: row[name] for name in names if row.get(name) is not None}
    if "input_ids" not in columns:
        raise ValueError("'input_ids' is null; it must be a list of token ids.")
    for name, values in columns.items():
        if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
            raise ValueError(f"{name!r} must be a list of integers.")
        if len(values) != len(columns["input_ids"]):
            raise ValueError(
                f"{name!r} has {len(values)} values and 'input_ids' {len(columns['input_ids'])}; they must be as "
                "long as each other."
            )
    return TokenSample(**columns)


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


TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
FORMATS: tuple[FormatLine[Sample], ...] = (
    ("input_ids", ("input_ids",), ("labels", "completion_mask", "assistant_masks"), read_tokens),
    ("prompt-completion", ("prompt", "completion"), TEMPLATE_COLUMNS, read_prompt_completion),
    ("messages", ("messages",), TEMPLATE_COLUMNS, partial(read_messages, "messages")),
    ("conversations", ("conversations",), TEMPLATE_COLUMNS, partial(read_messages, "conversations")),
)
"""In order of precedence. Rows that fit none of these are texts."""


def template_inputs(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that the chat template is given: `tools` (JSON or a list) and `chat_template_kwargs`."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"'tools' is a string that is not JSON ({error}).") from None
    # Arrow gives every row of a struct column every key, so null is how an absent keyword looks.
    kwargs = {key: value for key, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}
    return {"tools": tools or None, "template_kwargs": kwargs}


def text_of(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is {describe(value)}; it must be a string.")
    return value
