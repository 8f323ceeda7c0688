"""Conversations: messages checked one by one, and the order of their roles.

A mistake here is nearly always one in the data (a turn lost, an answer that is null), and a chat template would
either fail on it with a message about Jinja or, worse, write "None" and train on that.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

ROLE_KINDS = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
}
FROM_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""The roles of from/value conversations, as role/content ones name them."""

KEPT_NULLS = ("role", "content", "from", "value")
"""Keys of messages whose null is looked at; others are absent then, as Arrow shows them."""
MEDIA = ("image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio")
"""The types of parts of a content that are no text."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""The names under which datasets and chat templates have a message's thoughts."""

TRAINED = ("train", "weight", "loss_mask", "loss")
"""The names under which messages say whether they are trained, or with which weight: those of Axolotl, of OpenAI, of
verl, and of others."""

FOLLOWERS = {
    None: ("system", "user"),
    "system": ("system", "user"),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool", "user"),
}
"""Which kinds of message may come after which; `None` is the start."""


def check_roles(messages: list[Message]) -> list[Message]:
    """Check the order of roles: system messages only first, then user and assistant in turn, with the results of
    tools after the assistant. Returns `messages`.

    Raises:
        ValueError: the order is another one.
    """
    previous = None
    for index, message in enumerate(messages):
        role = message["role"]
        kind = ROLE_KINDS.get(role)
        if kind is None:
            raise ValueError(f"message {index} has the role {role!r}; known roles are {quoted(ROLE_KINDS)}.")
        if kind not in FOLLOWERS[previous]:
            place = f"after {messages[index - 1]['role']!r}" if index else "at the start"
            raise ValueError(
                f"roles out of order: message {index} has the role {role!r} {place}, where "
                f"{' or '.join(map(repr, FOLLOWERS[previous]))} belongs."
            )
        previous = kind
    return messages


def assistant_turns(messages: list[Message]) -> list[int]:
    """The numbers of the assistant's messages."""
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def trained_roles(names: Sequence[str]) -> frozenset[str]:
    """The roles of messages with these names, which may be those of from/value conversations.

    Raises:
        ValueError: a role is not known.
    """
    unknown = [name for name in names if name not in ROLE_KINDS and name not in FROM_ROLES]
    if unknown or not names:
        raise ValueError(f"roles_to_train is {list(names)}; known roles are {quoted({**ROLE_KINDS, **FROM_ROLES})}.")
    return frozenset(name if name in ROLE_KINDS else FROM_ROLES[name] for name in names)


def weight_of(message: Message, number: int) -> float:
    """The weight of a message in the loss, by what it says itself: 0 where it is not scored; `number` is its place in
    the conversation.

    Raises:
        ValueError: it says something else, or several things that contradict each other.
    """
    said = {name: message[name] for name in TRAINED if message.get(name) is not None}
    for name, value in said.items():
        if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
            raise ValueError(
                f"message {number} has {name}={value!r}; it must be true or false, or a weight from 0 to 1."
            )
    weights = {float(value) for value in said.values()}
    if len(weights - {1.0}) > 1 or {0.0, 1.0} <= weights:
        raise ValueError(f"message {number} has {said}, which contradict each other: keep one of them.")
    return min(weights, default=1.0)


def without_nulls(value: Any) -> Any:
    """The value without keys whose value is null: Arrow gives each struct of a column every key of the others."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def as_said(message: Mapping[str, Any]) -> Message:
    """A message without what Arrow adds to it: keys that messages of other rows have, in its tool calls too."""
    kept = {key: value for key, value in message.items() if value is not None or key in KEPT_NULLS}
    return {**kept, "tool_calls": without_nulls(kept["tool_calls"])} if kept.get("tool_calls") else kept


def check_messages(value: Any, name: str) -> list[Message]:
    """Check a list of messages, given in the column `name`, and bring from/value ones into role/content form.

    Raises:
        ValueError: not a list of messages, an empty one, or a message without a text.
    """
    if not isinstance(value, list):
        raise ValueError(f"{name!r} is {describe(value)}; it must be a list of messages.")
    if not value:
        raise ValueError(f"{name!r} is empty; it must hold at least one message.")
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} is {describe(message)}; a message has a 'role' and a 'content'.")
    message = as_said(message)
    if message.get("tool_calls"):
        _checked_calls(message["tool_calls"], f"{name}['tool_calls']")
    if message.get("role") is None and "from" in message:
        origin = message.pop("from")
        message["role"] = FROM_ROLES.get(origin, origin)
        message["content"] = message.pop("value", None)
    if "role" not in message or ("content" not in message and not message.get("tool_calls")):
        raise ValueError(f"{name} has the keys {quoted(message)}; a message has a 'role' and a 'content'.")
    if not isinstance(message["role"], str):
        raise ValueError(f"{name}['role'] is {describe(message['role'])}; it must be a string.")
    content = message.get("content")
    if isinstance(content, list):
        content = message["content"] = _text_of_parts(content, f"{name}['content']")
    calls_tools = message["role"] == "assistant" and bool(message.get("tool_calls"))
    if not isinstance(content, str) and not (content is None and calls_tools):
        raise ValueError(f"{name}['content'] is {describe(content)}; it must be a string.")
    return message


def _checked_calls(calls: Any, name: str) -> None:
    """Refuses tool calls that a template would write as the characters of a text, or without what they call."""
    wrong = calls if not isinstance(calls, list) else next((e for e in calls if not isinstance(e, Mapping)), None)
    if wrong is not None:
        raise ValueError(
            f"{name} is or holds {describe(wrong)}; it must be a list of calls, each an object with a 'function' that "
            "has a 'name' and 'arguments'. Calls that are stored as JSON text are to be parsed first."
        )
    for number, call in enumerate(calls):
        called = call.get("function") or call
        function = called.get("name") if isinstance(called, Mapping) else None
        if not isinstance(function, str) or not function.strip():
            raise ValueError(
                f"{name}[{number}] says no function: its 'name' is {describe(function)}, and must be the name of one. "
                "Name it, or remove the call."
            )


def _text_of_parts(parts: list[Any], name: str) -> str:
    """The text of a content that comes in parts, `[{"type": "text", "text": ...}]`, as templates write it: joined."""
    texts = []
    for number, part in enumerate(parts):
        place = f"{name}[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in MEDIA:
            raise ValueError(
                f"{place} is of type {kind!r}, and text models are trained here. Remove the parts that are not text, "
                "or the rows that need them."
            )
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind not in (None, "text") or not isinstance(text, str):
            what = f"of type {kind!r}" if kind not in (None, "text") else f"{describe(part)} without a text"
            raise ValueError(f"{place} is {what}; a part of a content is {{'type': 'text', 'text': ...}}.")
        texts.append(text)
    return "".join(texts)


def describe(value: Any) -> str:
    """What a value that should be something else is, in words."""
    return "null" if value is None else f"a {type(value).__name__}"


def quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
