"""Chat templates by name, for tokenizers that have none: written after the published formats, for text alone.

Each begins a turn and ends it with tokens of its own, which come along, or with the tokenizer's end token. The last
token of a turn becomes the tokenizer's end token, so that generation stops there. Tool calls are refused: a format that
has them is a model's own, with its own template.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TEMPLATE_SUFFIXES = (".jinja", ".j2")
OPENING = (
    "{% for message in messages if message.tool_calls or message.content is not string %}"
    "{{ raise_exception('the built-in chat template NAME writes texts alone, and a message has tool calls or no text: "
    "set chat_template_path to the template of a model that has them') }}{% endfor %}"
)
WITHOUT_SYSTEM = (
    "{% set first = messages[0].role == 'system' %}{% set before = messages[0].content + '\\n\\n' if first else '' %}"
    "{% for message in (messages[1:] if first else messages) %}"
    "{% if message.role not in ('user', 'assistant') %}"
    "{{ raise_exception('the built-in chat template NAME has no role ' + message.role) }}{% endif %}"
    "{% set said = (before if loop.first else '') + message.content %}"
)
"""Of formats without a role for it, the system's message stands before what the user says first."""


@dataclass(frozen=True)
class NamedTemplate:
    """A chat template, and the tokens that it writes."""

    template: str
    tokens: tuple[str, ...] = ()
    end: str | None = None
    """The token that ends a turn; None for the tokenizer's own end token."""


NAMED = {
    "chatml": NamedTemplate(
        OPENING + "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    "gemma": NamedTemplate(
        OPENING + "{{ bos_token }}" + WITHOUT_SYSTEM + "<start_of_turn>"
        "{{ 'model' if message.role == 'assistant' else 'user' }}\n{{ said }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "llama3": NamedTemplate(
        OPENING + "{{ bos_token }}{% for message in messages %}"
        "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{ message.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    "mistral": NamedTemplate(
        OPENING + "{{ bos_token }}" + WITHOUT_SYSTEM + "{% if message.role == 'user' %}[INST] {{ said }} [/INST]"
        "{% else %} {{ said }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "phi3": NamedTemplate(
        OPENING + "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
    ),
    "zephyr": NamedTemplate(
        OPENING + "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
}


def template_named(name: str) -> str:
    """The source of a named template, which names itself where it refuses a conversation."""
    return NAMED[name].template.replace("NAME", name)


def template_at(path: str) -> str | None:
    """The chat template in a .jinja file, in a folder's `chat_template.jinja`, or of a name; None where a tokenizer has
    to be asked.

    Raises:
        FileNotFoundError: there is no such file.
    """
    place = Path(path)
    if place.suffix in TEMPLATE_SUFFIXES:
        if not os.path.isfile(place):
            raise FileNotFoundError(f"chat_template_path: there is no file {path!r}.")
        return place.read_text(encoding="utf-8")
    if os.path.isfile(place / "chat_template.jinja"):  # also of names that no file can have
        return (place / "chat_template.jinja").read_text(encoding="utf-8")
    return template_named(path) if path in NAMED and not place.exists() else None
