"""Conversations in scripts, beside TRL's functions of the same names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from lowtide import add_response_schema, prepare_multimodal_messages, supports_tool_calling
from tests.support.texts.byte_tokenizer import byte_tokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATES = ("qwen3", "qwen2_5", "llama3", "gemma", "phi3", "glm4moe", "deepseekv3", "cohere2")
CALLING = {"qwen3", "qwen2_5", "glm4moe", "deepseekv3"}


def of_template(name: str) -> Any:
    """A tokenizer with one of the templates that TRL has."""
    folder = Path(pytest.importorskip("trl").__file__).parent
    return byte_tokenizer((folder / "chat_templates" / f"{name}.jinja").read_text(), eos="<|im_end|>", more=MARKS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_write_tool_calls_are_those_of_trl(name):
    theirs = pytest.importorskip("trl.chat_template_utils")
    assert supports_tool_calling(of_template(name)) == theirs.supports_tool_calling(of_template(name))
    assert supports_tool_calling(of_template(name)) == (name in CALLING)


def test_without_a_template_no_calls_are_written():
    assert not supports_tool_calling(byte_tokenizer())


TURNS = [
    "42",
    "<think>\nsum\n</think>\n\n42",
    '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>',
    'So:\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n'
    "</tool_call>",
]


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5"])
@pytest.mark.parametrize("turn", TURNS)
def test_turns_are_read_as_by_trls_schema(name, turn):
    theirs = pytest.importorskip("trl.chat_template_utils")
    ours, other = add_response_schema(of_template(name)), theirs.add_response_schema(of_template(name))
    asked = [{"role": "user", "content": "What?"}]
    before = ours.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    found, expected = (each.parse_response(f"{turn}<|im_end|>", prefix=before) for each in (ours, other))
    assert found == expected


def test_templates_of_another_form_are_refused_and_one_that_is_set_stays():
    with pytest.raises(ValueError, match="writes no tool calls in the form of Hermes and Qwen"):
        add_response_schema(of_template("glm4moe"))
    tokenizer = of_template("glm4moe")
    tokenizer.response_template = {"fields": {}}
    assert add_response_schema(tokenizer).response_template == {"fields": {}}


CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is this?"},
    {"role": "assistant", "tool_calls": [{"type": "function"}]},
    {"role": "tool", "content": "a cat"},
    {"role": "user", "content": "And this?"},
]
PLACED = [{"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image"}, {"type": "image"}]}]


@pytest.mark.parametrize(
    ("messages", "images"), [(CONVERSATION, ["I", "J"]), (CONVERSATION, None), (PLACED, ["I", "J"])], ids=range(3)
)
def test_images_stand_where_trl_puts_them(messages, images):
    theirs = pytest.importorskip("trl.data_utils")
    given = copy.deepcopy(messages)
    assert prepare_multimodal_messages(given, images) == theirs.prepare_multimodal_messages(messages, images)
    assert given == messages


def test_bad_messages_are_one_message():
    with pytest.raises(ValueError, match="there are 1 images, and 2 places"):
        prepare_multimodal_messages(PLACED, ["I"])
    with pytest.raises(ValueError, match="the role 'bot', which is not one of system"):
        prepare_multimodal_messages([{"role": "bot", "content": ""}])
