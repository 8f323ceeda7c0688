"""Chat templates tried for training, beside TRL's function of the same name, and beside what is then trained."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from lowtide import get_training_chat_template
from lowtide.data.options import PrepareOptions
from lowtide.data.prepare import prepare
from tests.support.texts.byte_tokenizer import byte_tokenizer

theirs = pytest.importorskip("trl.chat_template_utils")

from tests.support.texts.template_families import template  # noqa: E402  (which imports TRL)

MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
FIT = ("qwen2_5", "qwen3", "qwen3_5_think", "llama3", "gemma", "phi3", "glm4moe", "gptoss")
"""Templates without marks, of which TRL's gives others."""
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Who is it?"},
    {"role": "assistant", "content": "It is I."},
    {"role": "user", "content": "Again?"},
    {"role": "assistant", "content": "Not you."},
]


def of_text(text: str) -> Any:
    tokenizer = byte_tokenizer(text, eos="<|im_end|>", more=MARKS)
    tokenizer.bos_token = "<eos>"
    return tokenizer


def scored(tokenizer: Any) -> str:
    """What is scored of a conversation where SFT's data are prepared."""
    options = PrepareOptions(assistant_only_loss=True)
    rows, _ = prepare(Dataset.from_list([{"messages": CHAT}]), tokenizer, options, batch_size=1, packing=False)
    return "".join(tokenizer.decode([label for label in row["labels"] if label >= 0]) for row in map(dict, rows))


@pytest.mark.parametrize("name", FIT)
def test_of_templates_without_marks_the_assistants_turns_are_trained(name):
    assert theirs.get_training_chat_template(of_text(template(name))) is not None
    assert get_training_chat_template(of_text(template(name))) is None
    learned = scored(of_text(template(name)))
    assert "It is I." in learned
    assert "Not you." in learned
    assert "Again?" not in learned


@pytest.mark.parametrize("name", ["qwen3_training", "llama3_training", "gptoss_training"])
def test_templates_with_marks_are_fit_to_both(name):
    assert theirs.get_training_chat_template(of_text(template(name))) is None
    assert get_training_chat_template(of_text(template(name))) is None


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        (MARKED.replace("== 'assistant'", "== 'user'"), "marks cover 'asks once', which the assistant does not say"),
        (MARKED.replace("== 'assistant'", "== 'nobody'"), "marks leave out 'answers once', which the assistant says"),
    ],
)
def test_marks_in_wrong_places_are_refused(marked, message):
    assert get_training_chat_template(of_text(MARKED)) is None
    with pytest.raises(ValueError, match=message):
        get_training_chat_template(of_text(marked))


def test_prompts_that_open_a_thought_want_one_in_each_answer(caplog):
    tokenizer = of_text(template("nemotron_3_nano"))
    with caplog.at_level(logging.WARNING):
        assert get_training_chat_template(tokenizer) is None
    assert "With a thought before each answer" in caplog.text


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (template("deepseek_r1_distill"), "never writes what the prompt has opened.*thought_end"),
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", "writes the same text whatever"),
        (None, "no chat template"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_the_reason(made, message):
    with pytest.raises(ValueError, match=message):
        get_training_chat_template(of_text(made))


def test_a_processors_template_is_given_contents_in_parts():
    tokenizer = of_text("{{ messages[0]['content'] }}")
    whole = SimpleNamespace(
        tokenizer=tokenizer,
        chat_template=MARKED.replace("m['content']", "m['content'][0]['text']"),
        apply_chat_template=lambda messages, **how: tokenizer.apply_chat_template(
            messages, chat_template=whole.chat_template, **how
        ),
    )
    assert get_training_chat_template(whole) is None
    whole.chat_template = whole.chat_template.replace("[0]['text']", "[9]['text']")
    with pytest.raises(ValueError, match="can't render"):
        get_training_chat_template(whole)


def test_the_older_name_of_its_argument_is_taken_and_no_argument_refused():
    tokenizer = of_text(template("qwen3"))
    with pytest.warns(FutureWarning, match="processing_class"):
        assert get_training_chat_template(tokenizer=tokenizer) is None
    with pytest.raises(TypeError, match="takes one tokenizer or processor"):
        get_training_chat_template()
    with pytest.raises(TypeError, match="takes one tokenizer or processor"):
        get_training_chat_template(tokenizer, tokenizer)
