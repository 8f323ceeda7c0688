"""Turns: what is read, what follows a tool's answer, and templates that cannot work."""

import pytest

from lowtide.rollout.turns import Turns
from tests.rollout.chat_templates import HERMES, HERMES_TEMPLATE, trl_template
from tests.support.texts.byte_tokenizer import byte_tokenizer
from tests.support.texts.chatml import CHATML

SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ANSWER = {"role": "tool", "name": "add", "content": "4"}


def turns(template: str = HERMES_TEMPLATE, eos: str = "<|im_end|>", **more) -> Turns:
    made = Turns(byte_tokenizer(template, eos=eos), **more)
    made.try_tools()
    return made


def read(text: str, before: str = "", schemas=(SCHEMA,), **more) -> dict:
    made = turns(**more)
    return made.read(made.tokenizer(text)["input_ids"], made.tokenizer(before)["input_ids"], schemas)


def test_calls_words_and_thoughts():
    found = read(f"<think> hm </think>\nSo.\n{HERMES}\n{HERMES}<|im_end|>")
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    words = {"role": "assistant", "reasoning_content": "hm", "content": "So."}
    assert found == {**words, "tool_calls": [called, called]}
    assert read("hm</think> So.<|im_end|>", before="<|im_start|>assistant\n<think>\n") == words


def test_a_call_without_arguments_has_none():
    [call] = read('<tool_call>{"name": "now"}</tool_call>')["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>",
    ],
)
def test_calls_that_cannot_be_read_are_words(text):
    assert read(f"{text}<|im_end|>") == {"role": "assistant", "content": text}


def test_without_tools_all_are_words():
    assert read(f"{HERMES}<|im_end|>", schemas=()) == {"role": "assistant", "content": HERMES}


def test_what_follows_an_answer():
    made = turns()
    suffix = "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    assert made.tokenizer.decode(made.after_tools([ANSWER])) == suffix
    assert made.tokenizer.decode(made.after_tools([ANSWER], ended=False)) == f"<|im_end|>{suffix}"
    two = made.tokenizer.decode(made.after_tools([ANSWER, {**ANSWER, "content": "5"}]))
    assert two == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"


def test_the_end_of_a_turn_may_be_another_token_than_the_tokenizer_s():
    made = turns(eos="<eos>", stop_ids=[2])
    assert made.tokenizer.decode(made.after_tools([ANSWER])).startswith("\n<|im_start|>tool\n4")


def test_a_template_that_writes_earlier_turns_differently_is_cut_by_its_ends():
    made = turns(trl_template("qwen3"))
    before = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert made.tokenizer.decode(made.after_tools([ANSWER])) == before
    with pytest.raises(ValueError, match="has no token that ends a turn"):
        turns(trl_template("qwen3"), eos="<eos>")


REFUSED = {
    "no calls": (CHATML, "leaves out the name and arguments of tool calls"),
    "no answers": (
        HERMES_TEMPLATE.replace(
            "{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}"
        ),
        "leaves out the tools' answers",
    ),
    "another form": (
        HERMES_TEMPLATE.replace("<tool_call>", "[CALL]").replace("</tool_call>", "[/CALL]"),
        "set `tokenizer.response_template`",
    ),
    "no tools": ("{{ raise_exception('no tools here') }}", "no tools here"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_templates_that_cannot_call_tools_are_refused(case):
    template, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        turns(template)
    Turns(byte_tokenizer(template))


TEXTS = (
    "{% for message in messages %}{{ message.thinking }}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ '[' + call.function.arguments + ']' }}{% endfor %}{% if message.role == 'assistant' %}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
"""It takes arguments as texts, and thoughts under a name of its own."""


def test_messages_of_a_prompt_come_in_the_form_that_the_template_takes():
    made = Turns(byte_tokenizer(TEXTS, eos="<|im_end|>"))
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}]  # b is Arrow's
    said = {"role": "assistant", "content": "So.", "reasoning_content": "Well. ", "tool_calls": calls}
    asked = {"role": "user", "content": "?", "tool_calls": None}
    assert made.tokenizer.decode(made.encode([asked, said])) == '?Well. So.[{"a": 1}]<|im_end|>assistant:'
    assert made.tokenizer.decode(made.after_tools([ANSWER])) == "4assistant:"


def test_no_template():
    with pytest.raises(ValueError, match="no chat template"):
        turns(None)
