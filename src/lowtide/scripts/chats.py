"""Conversations in scripts: images put into messages, whether a template writes tool calls, and how they are read back.
Trainers need none of these; the names are TRL's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lowtide.compat.templates.jinja import TEMPLATE_FAILURES

ROLES = ("system", "user", "assistant", "tool")
NAME, KEY, VALUE, ANSWER = (f"{each}_of_trial" for each in ("name", "key", "value", "answer"))
"""What stands in a conversation that a template is tried on."""
CALL = {"type": "function", "function": {"name": NAME, "arguments": {KEY: VALUE}}}
HERMES = re.compile(rf'<tool_call>\s*\{{"name": "{NAME}", "arguments": \{{"{KEY}": "{VALUE}"\}}\}}\s*</tool_call>')

Processing = TypeVar("Processing")


def prepare_multimodal_messages(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any] | None = None
) -> list[dict[str, Any]]:
    """Messages whose contents are lists of parts, with images in their places; the input stays as it is.

    Args:
        messages: with texts, or with parts already.
        images: for the parts `{"type": "image"}` that have none, in order; where no user's message has parts, they
            stand before the text of the first.

    Raises:
        ValueError: a role is not one of a conversation, or there are not as many places as images.
    """
    left, made, placed = list(images or ()), [], False
    for message in messages:
        role, content = message["role"], message.get("content")
        if role not in ROLES:
            raise ValueError(f"a message has the role {role!r}, which is not one of {', '.join(ROLES)}")
        if isinstance(content, str):
            before = [{"type": "image"}] * len(left) if role == "user" and not placed else []
            placed |= role == "user"
            content = [*before, {"type": "text", "text": content}]
        made.append({**message, **({"content": content} if "content" in message else {})})
    shown = [message for message in made if message["role"] != "tool" and message.get("content")]
    places = sum(_is_empty(part) for message in shown for part in message["content"])
    if places != len(left):
        raise ValueError(f"there are {len(left)} images, and {places} places for images in the messages")
    given = iter(left)
    for message in shown:
        message["content"] = [
            {**part, "image": next(given)} if _is_empty(part) else part for part in message["content"]
        ]
    return made


def _is_empty(part: Mapping[str, Any]) -> bool:
    return part["type"] == "image" and "image" not in part


def trial_call(arguments: Any = None) -> list[dict[str, Any]]:
    """A message of the assistant that calls a tool, and the tool's answer."""
    call = {**CALL, "function": {"name": NAME, "arguments": {KEY: VALUE} if arguments is None else arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": NAME, "content": ANSWER},
    ]


def _trial(processing_class: Any, arguments: Any) -> str:
    """A conversation with a call of a tool and its answer, as the template writes it."""
    messages = [{"role": "user", "content": "hi"}, *trial_call(arguments)]
    if hasattr(processing_class, "tokenizer"):
        messages = prepare_multimodal_messages(messages)
    return processing_class.apply_chat_template(messages, tokenize=False)


def supports_tool_calling(processing_class: Any) -> bool:
    """Whether the chat template of a tokenizer or processor writes a tool's name, its arguments and its answer."""
    if processing_class.chat_template is None:
        return False
    for arguments in ({KEY: VALUE}, f'{{"{KEY}": "{VALUE}"}}'):
        try:
            written = _trial(processing_class, arguments)
        except TypeError:  # a template that wants arguments as a text
            continue
        except TEMPLATE_FAILURES:
            return False
        return all(each in written for each in (NAME, KEY, VALUE, ANSWER))
    return False


def add_response_schema(processing_class: Processing) -> Processing:
    """Has a tokenizer, or a processor's, read back what an assistant wrote (`parse_response` of transformers): thoughts
    between <think> and </think>, and calls in the form of Hermes, Qwen2.5 and Qwen3. It is changed in place.

    Raises:
        ValueError: the chat template writes calls in another form.
    """
    whole: Any = processing_class
    tokenizer = getattr(whole, "tokenizer", whole)
    if getattr(tokenizer, "response_template", None) is not None:
        return processing_class
    if not supports_tool_calling(whole) or HERMES.search(_trial(whole, {KEY: VALUE})) is None:
        raise ValueError(
            "the chat template writes no tool calls in the form of Hermes and Qwen, <tool_call>{...}</tool_call>: set "
            "tokenizer.response_template by hand, which GRPO's tools read too, or take add_response_schema of TRL"
        )
    asked = [{"role": "user", "content": "hi"}]
    asked = prepare_multimodal_messages(asked) if whole is not tokenizer else asked
    plain, begun = (
        whole.apply_chat_template(asked, tokenize=False, add_generation_prompt=each) for each in (False, True)
    )
    end = re.escape(tokenizer.eos_token)
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": begun[len(plain) :].split("<think>")[0],
        "fields": {
            "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": rf"{end}\s*", "content": "text"},
        },
    }
    return processing_class
