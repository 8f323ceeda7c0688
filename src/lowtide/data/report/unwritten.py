"""What a conversation has and its chat template leaves out: tools, calls of tools, what messages of a role say.

A template writes what its author thought of, and passes over the rest without a word: the model then learns to call
tools that it is never told of, or to answer what was said by nobody. Each part is looked for by rendering the
conversation once more without it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from lowtide.compat.templates.jinja import TEMPLATE_FAILURES, TemplateOverrun
from lowtide.data.formats.conversation import Message
from lowtide.data.formats.samples import ChatSample

SPEAKERS = ("user", "assistant")
"""Roles that every template writes, or is refused."""


class UnwrittenParts:
    """Tells which conversations have parts that a template does not write.

    Args:
        render: from a conversation to its text.
    """

    def __init__(self, render: Callable[[ChatSample], str]) -> None:
        self._render = render
        self._written = set[str]()

    def are_in(self, chat: ChatSample) -> bool:
        """Whether the conversation has such a part. One that the template writes once, it writes always."""
        return any(self._is_left_out(part, chat, without) for part, without in _parts_of(chat))

    def _is_left_out(self, part: str, chat: ChatSample, without: ChatSample) -> bool:
        if part in self._written:
            return False
        try:
            left_out = self._render(chat) == self._render(without)
        except TemplateOverrun:
            raise
        except TEMPLATE_FAILURES:  # the template minds that the part is missing; or the row itself will tell
            left_out = False
        if not left_out:
            self._written.add(part)
        return left_out


def _parts_of(chat: ChatSample) -> Iterator[tuple[str, ChatSample]]:
    """The parts that a conversation has beside what is asked and answered, and the conversation without each."""
    if chat.tools:
        yield "tools", replace(chat, tools=None)
    if any(message.get("tool_calls") for message in chat.messages):
        yield "tool calls", replace(chat, messages=[_without_calls(message) for message in chat.messages])
    says = {message["role"] for message in chat.messages if _text_of(message).strip()}
    for role in sorted(says.difference(SPEAKERS)):
        yield f"{role} says", replace(chat, messages=[_silent(message, role) for message in chat.messages])
    begin = next((n for n, message in enumerate(chat.messages) if message["role"] != "system"), 0)
    if begin > 1:
        silent = [_silent(message, "system") for message in chat.messages[1:begin]]
        yield (
            "more than one system message",
            replace(chat, messages=[chat.messages[0], *silent, *chat.messages[begin:]]),
        )


def _without_calls(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "tool_calls"}


def _silent(message: Message, role: str) -> Message:
    return {**message, "content": ""} if message["role"] == role and _text_of(message) else message


def _text_of(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
