"""Messages in the form that a chat template reads: thoughts under its names for them, arguments of tool calls as the
mapping or the text that it takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowtide.compat.templates.jinja import TemplateOverrun
from lowtide.data.formats.conversation import THOUGHTS, Message

THOUGHTS_READ = re.compile(rf"""[.'"]({"|".join(THOUGHTS)})\b""")
"""A name under which a template reads thoughts."""
TRIAL = {"trial_key": "trial_value"}


class MessageForm:
    """How a template takes messages.

    Args:
        template: its source.
        render: from messages to their text.
    """

    def __init__(self, template: str, render: Callable[[Sequence[Message]], str]) -> None:
        self.thoughts_read = sorted(set(THOUGHTS_READ.findall(template)))
        self._render = render

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, template: str | None = None, given: Callable[[Any], Any] = list
    ) -> MessageForm:
        """How a tokenizer's template, or another, takes messages.

        Args:
            given: makes of messages what the template is given.
        """

        def render(messages: Sequence[Message]) -> str:
            return str(tokenizer.apply_chat_template(given(messages), chat_template=template, tokenize=False))

        return cls(tokenizer.get_chat_template(template), render)

    def __call__(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the template takes them."""
        return [self._with_calls(self._with_thoughts(message)) for message in messages]

    def _with_thoughts(self, message: Message) -> Message:
        thoughts = next((message[name] for name in THOUGHTS if message.get(name)), None)
        if thoughts is None or not self.thoughts_read:
            return message
        rest = {name: value for name, value in message.items() if name not in THOUGHTS}
        return {**rest, **dict.fromkeys(self.thoughts_read, thoughts)}

    def _with_calls(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls or self.takes_mappings is None:
            return message
        return {**message, "tool_calls": [self._with_arguments(call) for call in calls]}

    def _with_arguments(self, call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._with_arguments(call["function"])}
        arguments = call.get("arguments")
        if self.takes_mappings and isinstance(arguments, str):
            arguments = _parsed(arguments)
        elif not self.takes_mappings and isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return call if arguments is call.get("arguments") else {**call, "arguments": arguments}

    @cached_property
    def takes_mappings(self) -> bool | None:
        """Whether arguments are rendered from a mapping; False where the template takes a text alone, None where it
        renders neither."""
        of_mapping, of_text = self._trial(TRIAL), self._trial(json.dumps(TRIAL))
        if of_mapping is not None and str(TRIAL) not in of_mapping:  # Python's own form is no JSON
            return True
        return None if of_text is None else False

    def _trial(self, arguments: Any) -> str | None:
        call = {"id": "trial1234", "type": "function", "function": {"name": "trial", "arguments": arguments}}
        asked = {"role": "user", "content": "Is it?"}
        try:
            return self._render([asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
        except TemplateOverrun:
            raise
        except Exception:  # whatever the template raises for what it does not take
            return None


def _parsed(arguments: str) -> Any:
    """The mapping that a text of JSON stands for; another text as it is."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, Mapping) else arguments
