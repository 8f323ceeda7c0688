"""Single rows: what form a row has, and from one form to another. For `Dataset.map`, or by hand.

Trainers take conversations, implicit prompts and from/value messages as they are; a script that converts them first
gets what TRL's functions of these names give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowtide.compat.templates.jinja import limit_templates

limit_templates()
SIDES = ("chosen", "rejected", "completion")
"""What may follow a prompt."""
MESSAGES = ("prompt", *SIDES, "messages")
TEMPLATED = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
    {"prompt", "completion", "label"},
)
"""The columns that a chat template can be applied to."""

Row = Mapping[str, Any]


def is_conversational(example: Row) -> bool:
    """Whether a row holds messages with roles, and not texts."""
    return any(_is_messages(example[name], "role") for name in MESSAGES if name in example)


def is_conversational_from_value(example: Row) -> bool:
    """Whether a row's `conversations` are messages in ShareGPT's form, with `from` and `value`."""
    return _is_messages(example.get("conversations"), "from", "value")


def maybe_convert_to_chatml(example: Row) -> dict[str, Any]:
    """The row with `role` and `content` for `from` and `value` in its messages, and `messages` for `conversations`.

    Roles keep their names (`human`, `gpt`), as in TRL. The row itself is not changed.
    """
    names = {"from": "role", "value": "content"}

    def renamed(message: Any) -> Any:
        return (
            {names.get(key, key): value for key, value in message.items()} if isinstance(message, Mapping) else message
        )

    row = {}
    for name, value in example.items():
        if name in (*MESSAGES, "conversations") and isinstance(value, list):
            value = [renamed(message) for message in value]
        row["messages" if name == "conversations" else name] = value
    return row


def apply_chat_template(
    example: Row, processing_class: Any, tools: Sequence[Any] | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """The row's conversations as text, by the tokenizer's chat template.

    A prompt ends where the answers begin: with the header of an assistant's turn after a user's or a tool's message, or
    inside the assistant's message that it ends with. Where the template writes a prompt otherwise alone than before an
    answer, the prompt is what both have in common.

    Args:
        example: `messages`, `prompt`, `prompt` and `completion` (and `label`), or `chosen` and `rejected`, with or
            without `prompt`. `chat_template_kwargs` are the template's too.
        tools: functions that the template may name.
        template_kwargs: of the template, for what the row does not say itself.

    Returns:
        the same columns as text; `text` for `messages`.

    Raises:
        KeyError: other columns.
        ValueError: the prompt ends with another role.
    """
    present = {name for name in (*MESSAGES, "label") if name in example}
    if present not in TEMPLATED:
        raise KeyError(f"a chat template cannot be applied to the columns {sorted(present)}")

    def render(messages: list[Any], **how: Any) -> str:
        own = {**template_kwargs, **(example.get("chat_template_kwargs") or {})}
        return processing_class.apply_chat_template(messages, tools=tools or None, tokenize=False, **how, **own)

    if "messages" in example:
        return {"text": render(example["messages"])}
    sides = [name for name in SIDES if name in example]
    if "prompt" not in example:
        return {name: render(example[name]) for name in sides}
    asked = _ends_with_question(example["prompt"])
    alone = render(example["prompt"], add_generation_prompt=asked, continue_final_message=not asked)
    whole = {name: render([*example["prompt"], *example[name]]) for name in sides}
    prompt = _common_start([alone, *whole.values()])
    rendered = {"prompt": prompt, **{name: text[len(prompt) :] for name, text in whole.items()}}
    return rendered | ({"label": example["label"]} if "label" in example else {})


def maybe_apply_chat_template(
    example: Row, processing_class: Any, tools: Sequence[Any] | None = None, **template_kwargs: Any
) -> Any:
    """`apply_chat_template` for a row of conversations; any other row as it is."""
    if not is_conversational(example):
        return example
    return apply_chat_template(example, processing_class, tools, **template_kwargs)


def extract_prompt(example: Row) -> dict[str, Any]:
    """The row with what `chosen` and `rejected` begin with alike as its `prompt`: messages, or characters.

    Of two texts the space before the first difference goes to the answers. Sides that are equal keep their last
    message, or character, as the answer.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    shorter = min(len(chosen), len(rejected))
    end = next((at for at in range(shorter) if chosen[at] != rejected[at]), None)
    if end is None:
        end = max(shorter - 1, 0)
    elif end and chosen[end - 1] == " ":
        end -= 1
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def maybe_extract_prompt(example: Row) -> Any:
    """`extract_prompt` for a row of a pair whose prompt is in both sides; any other row as it is.

    A `prompt` of text beside sides that are conversations does not count as one: the sides hold it too.
    """
    if "chosen" not in example or "rejected" not in example:
        return example
    conversations = [is_conversational({name: example[name]}) for name in ("prompt", "chosen") if name in example]
    if "prompt" in example and len(set(conversations)) == 1:
        return example
    return extract_prompt(example)


def _is_messages(value: Any, *keys: str) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and set(keys) <= value[0].keys()


def _ends_with_question(prompt: Sequence[Any]) -> bool:
    """Whether an assistant's turn begins after a prompt; False where it is to be continued."""
    role = prompt[-1]["role"]
    if role not in ("user", "tool", "assistant"):
        raise ValueError(f"a prompt ends with a message of role {role!r}; it must be 'user', 'tool' or 'assistant'")
    return role != "assistant"


def _common_start(texts: Sequence[str]) -> str:
    """What all texts begin with."""
    shortest = min(texts, key=len)
    end = next((at for at, letter in enumerate(shortest) if any(text[at] != letter for text in texts)), len(shortest))
    return shortest[:end]
