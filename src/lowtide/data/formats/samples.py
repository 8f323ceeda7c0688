"""The one form that all rows are read into: a text, a conversation, or token ids.

Nothing behind these knows which columns a row had.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.data.formats.conversation import Message, describe

logger = logging.getLogger(__name__)


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

    @property
    def has_one_answer(self) -> bool:
        """Whether one message of the assistant follows the prompt, and nothing else."""
        return [each["role"] for each in self.messages[self.prompt_messages or 0 :]] == ["assistant"]

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


def text_of(value: Any, name: str) -> str:
    """The text in the column `name`; a whole number as its digits.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        _tell_of_numbers(name)
        return str(value)
    if isinstance(value, float):
        raise ValueError(
            f"{name!r} is the number {value}, which may have been written in another way (1.50, 7): store the column "
            "as text."
        )
    raise ValueError(f"{name!r} is {describe(value)}; it must be a string.")


@functools.cache
def _tell_of_numbers(name: str) -> None:
    """Says once that a column's numbers are taken as text."""
    logger.warning(f"{name!r} holds whole numbers, which are taken as text (7 as '7')")
