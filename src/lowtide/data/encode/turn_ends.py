"""Where a turn of the assistant ends: the token at which generation stops.

A template may write stop tokens in the middle of a turn, and several at its end (Phi-3 closes the whole text too). So a
turn is rendered once with a mark in its last field: the first stop token behind the mark is the turn's end. Where none
is there, the next message may begin with one (GLM), and the model has to write that token. Turns of one shape end
alike, so one rendering is enough for all turns of a shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.compat.templates.jinja import TemplateOverrun
from lowtide.data.formats.conversation import THOUGHTS, Message

MARK = "QzMarkzQ"
Render = Callable[[Sequence[Message]], str]
"""From messages to their text."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The end of turns of one shape."""

    behind: int | None = 0
    """Stop tokens behind what the turn says; None where that is not known."""
    following: str = ""
    """The stop token that the next message begins with."""


class TurnEnds:
    """Cuts turns behind the token at which generation stops.

    Args:
        encode: from a text to its token ids, without special tokens around it.
        stops: the tokens at which generation stops, and their texts.
    """

    def __init__(self, encode: Callable[[str], list[int]], stops: Mapping[int, str]) -> None:
        self.texts = [text for token, text in stops.items() if text and encode(text) == [token]]
        longest_first = sorted(self.texts, key=len, reverse=True)
        self._stop = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._known: dict[Hashable, TurnEnd] = {}

    def cut(self, text: str, messages: Sequence[Message], render: Render, shape: Hashable = ()) -> tuple[str, bool]:
        """What the model has to write of a turn, and whether it ends with a stop token.

        Args:
            text: the turn, and what the template writes behind it.
            messages: the conversation up to the turn, which is the last of them.
            render: renders messages as the turn was rendered.
            shape: what else the form of a turn depends on.
        """
        key = (shape, *shape_of(messages[-1]))
        if key not in self._known:
            self._known[key] = self._end_of(messages, render)
        end, places = self._known[key], [found.end() for found in self._stop.finditer(text)]
        behind = len(places) if end.behind is None else end.behind
        if 0 < behind <= len(places):
            return text[: places[-behind]], True
        return text + end.following, bool(end.following)

    def _end_of(self, messages: Sequence[Message], render: Render) -> TurnEnd:
        marked = marked_message(messages[-1], MARK)
        try:
            after = _behind_mark(render([*messages[:-1], marked]))
        except TemplateOverrun:
            raise
        except Exception:  # whatever a template says to the mark; the turn itself was rendered
            after = None
        if after is None:
            return TurnEnd(None)
        behind = len(self._stop.findall(after))
        return TurnEnd(behind, "" if behind else self._following([*messages[:-1], marked], after, render))

    def _following(self, messages: Sequence[Message], after: str, render: Render) -> str:
        """The stop token that the template writes first of a next message."""
        role = "tool" if messages[-1].get("tool_calls") else "user"
        try:
            text = _behind_mark(render([*messages, {"role": role, "content": "And?"}]))
        except TemplateOverrun:
            raise
        except Exception:  # as above: nothing may follow
            return ""
        if text is None or not text.startswith(after):
            return ""
        found = self._stop.match(text, len(after))
        return "" if found is None else found.group()


def shape_of(message: Message) -> tuple[Hashable, ...]:
    """Which fields a message has."""
    fields = ("content", *THOUGHTS)
    return (*(bool(message.get(name)) for name in fields), len(message.get("tool_calls") or ()))


def marked_message(message: Message, mark: str) -> Message:
    """The message with a mark in place of each of its texts."""
    marked = {**message, **{name: mark for name in ("content", *THOUGHTS) if message.get(name)}}
    if message.get("tool_calls"):
        marked["tool_calls"] = [_marked_call(call, mark) for call in message["tool_calls"]]
    return marked


def _marked_call(call: Any, mark: str) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _marked_call(call["function"], mark)}
    as_text = isinstance(call.get("arguments"), str)
    return {**call, "arguments": f'{{"{mark}": "{mark}"}}' if as_text else {mark: mark}}


def _behind_mark(text: str) -> str | None:
    _, mark, after = text.rpartition(MARK)
    return after if mark else None
