"""Chat templates with tools, those published read from TRL's package, and what a policy writes under each."""

import json
from pathlib import Path

import pytest

TEMPLATES = {
    "qwen2_5": (),
    "qwen3": (),
    "qwen3_5_nothink": (),
    "llama3_1": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"),
    "glm4moe": ("<|user|>", "<|assistant|>", "<|observation|>"),
}
"""By the template's name, the special tokens that it has beside ChatML's."""
HERMES_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
ARGUMENTS = "".join(f"<parameter={name}>\n2\n</parameter>\n" for name in "ab")
XML = f"<tool_call>\n<function=add>\n{ARGUMENTS}</function>\n</tool_call>"
CALLS = {
    "qwen2_5": ("<|im_end|>", HERMES),
    "qwen3": ("<|im_end|>", HERMES),
    "qwen3_5_nothink": ("<|im_end|>", XML),
    "llama3_1": ("<|eot_id|>", '{"name": "add", "parameters": {"a": 2, "b": 2}}'),
    "glm4moe": (
        "<|user|>",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n"
        "</tool_call>",
    ),
}
"""By the template's name, what ends a turn, and a call of `add` with 2 and 2."""


def trl_template(name: str) -> str:
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: one number.
        b: another number.
    """
    return a + b


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
