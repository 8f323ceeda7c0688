"""Which messages are trained, and what Arrow and datasets do to tool calls."""

import json
import logging

import pytest
from datasets import Dataset

from lowtide import SFTConfig
from lowtide.data.prepare import PrepareOptions, prepare
from tests.support.texts.chatml import CHATML, MARKED_CHATML

pytestmark = pytest.mark.usefixtures("datasets_cache")


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def talk(*marks):
    """A conversation of as many rounds, whose answers have these keys."""
    messages = []
    for number, mark in enumerate(marks):
        messages += [said("user", f"q{number}?"), said("assistant", f"a{number}.", **mark)]
    return messages


def run(rows, tokenizer, **options):
    options = {"assistant_only_loss": True, "vocab_size": 1000, **options}
    return prepare(Dataset.from_list(rows), tokenizer, PrepareOptions(**options), batch_size=2, packing=False)[0]


def scored(tokenizer, row):
    return tokenizer.decode([label for label in row["labels"] if label != -100])


WAYS = {
    "as generated": (CHATML, {}, "<|im_end|>"),
    "whole": (CHATML, {"turns": "whole"}, "<|im_end|>\n"),
    "marked": (MARKED_CHATML, {}, "<|im_end|>\n"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "no", "yes"), [("train", False, True), ("weight", 0, 1), ("loss_mask", 0.0, 1.0), ("loss", False, None)]
)
def test_what_a_message_says_of_itself_is_followed(tokenizer, way, name, no, yes):
    tokenizer.chat_template, options, end = WAYS[way]
    messages = talk({name: no}, {name: yes}, {name: no}, {})
    [row] = run([{"messages": messages}], tokenizer, **options)
    assert scored(tokenizer, row) == f"a1.{end}a3.{end}"
    assert all(f"q{number}?" in tokenizer.decode(row["input_ids"]) for number in range(4))


@pytest.mark.parametrize("way", WAYS)
def test_the_last_turn_only(tokenizer, way):
    tokenizer.chat_template, options, end = WAYS[way]
    rows = [{"messages": talk({}, {}, {})}, {"messages": [*talk({}, {}), said("user", "thanks")]}]
    found = run(rows, tokenizer, train_on_last_turn_only=True, **options)
    assert [scored(tokenizer, row) for row in found] == [f"a2.{end}", f"a1.{end}"]


def test_marks_that_are_not_one_for_each_turn_do_as_long_as_all_turns_count(tokenizer):
    """Such as those of a template that marks no turn of a prompt."""
    unmarked = "{% if message['role'] == 'assistant' and loop.index0 > 1 %}"
    tokenizer.chat_template = MARKED_CHATML.replace("{% if message['role'] == 'assistant' %}", unmarked)
    messages = talk({}, {})
    [row] = run([{"prompt": messages[:3], "completion": messages[3:]}], tokenizer)
    assert scored(tokenizer, row) == "a1.<|im_end|>\n"
    with pytest.raises(ValueError, match=r"row 0 .*some of the 2 messages of the assistant are not to be trained"):
        run([{"messages": talk({"weight": 0}, {})}], tokenizer)


def test_other_roles_are_scored_with_their_ends(tokenizer):
    messages = [said("system", "Be brief."), *talk({}, {})]
    [row] = run([{"messages": messages}], tokenizer, roles_to_train=["human", "gpt"])
    assert scored(tokenizer, row) == "".join(f"{text}<|im_end|>" for text in ("q0?", "a0.", "q1?", "a1."))
    [row] = run([{"messages": messages}], tokenizer, roles_to_train=["system"])
    assert scored(tokenizer, row) == "Be brief.<|im_end|>"


@pytest.mark.parametrize(
    ("mark", "problem"),
    [
        ({"weight": 0.5}, r"row 0 .* message 1 has weight=0.5, and a message is not trained in part: make it 0 or 1"),
        ({"weight": 2}, r"message 1 has weight=2; it must be true or false, or 1 or 0"),
        ({"train": "no"}, r"message 1 has train='no'; it must be true or false"),
        ({"train": True, "weight": 0}, r"message 1 has .*'train': True.* contradict each other"),
    ],
)
def test_what_says_neither_is_refused(tokenizer, mark, problem):
    with pytest.raises(ValueError, match=problem):
        run([{"messages": talk(mark)}], tokenizer)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"roles_to_train": ["asistant"]}, r"roles_to_train is \['asistant'\]; known roles are 'system'"),
        ({"roles_to_train": []}, r"roles_to_train is \[\]; known roles"),
        ({"roles_to_train": ["user"], "turns": "whole"}, r"roles_to_train=\['user'\] requires .*turns='as_generated'"),
    ],
)
def test_roles_that_are_not_known_or_told_are_refused(tokenizer, options, problem):
    with pytest.raises(ValueError, match=problem):
        run([{"messages": talk({})}], tokenizer, **options)


@pytest.mark.parametrize("option", [{"roles_to_train": ["user"]}, {"train_on_last_turn_only": True}])
def test_options_about_messages_require_a_loss_of_messages(tmp_path, option):
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.* requires assistant_only_loss=True"):
        SFTConfig(tmp_path, **option)


def test_marks_that_are_not_read_are_told(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        run([{"messages": talk({"weight": 0})}], tokenizer, assistant_only_loss=False)
    assert "messages say whether they are trained" in caplog.text


CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def called(name, **arguments):
    return said(
        "assistant",
        None,
        tool_calls=[{"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}],
    )


def schema(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


@pytest.mark.parametrize("assistant_only_loss", [True, False])
def test_keys_that_arrow_adds_never_reach_the_text(tokenizer, assistant_only_loss):
    tokenizer.chat_template = CALLS
    rows = [
        {
            "messages": [said("user", "?"), called("add", a=1), said("tool", "2"), said("assistant", "2")],
            "tools": [schema("add", a={"type": "integer"})],
        },
        {
            "messages": [
                said("user", "?"),
                called("find", city="Rome", near=["a"]),
                said("tool", "x"),
                said("assistant", "y"),
            ],
            "tools": [schema("find", city={"type": "string", "enum": ["Rome"]})],
        },
    ]
    found = run(rows, tokenizer, assistant_only_loss=assistant_only_loss)
    for row, given in zip(found, rows, strict=True):
        text = tokenizer.decode(row["input_ids"])
        assert text == tokenizer.apply_chat_template(given["messages"], tools=given["tools"], tokenize=False)
        assert "null" not in text


def test_a_null_within_arguments_that_are_text_stays(tokenizer):
    tokenizer.chat_template = CALLS
    call = called("find")
    call["tool_calls"][0]["function"]["arguments"] = '{"city": null}'
    [row] = run([{"messages": [said("user", "?"), call]}], tokenizer)
    assert '{"city": null}' in tokenizer.decode(row["input_ids"])


JOINED = CALLS.replace("{{ c | tojson }}", "{{ c.function.name + ' ' + c.function.arguments }}")
PRINTED = CALLS.replace("{{ c | tojson }}", "{{ c.function.name }} {{ c.function.arguments }}")
EITHER = CALLS.replace(
    "{{ c | tojson }}",
    "{% set a = c.function.arguments %}{{ c.function.name }} {{ a if a is string else a | tojson }}",
)


@pytest.mark.parametrize("template", [CALLS, JOINED, PRINTED, EITHER], ids=["tojson", "joined", "printed", "either"])
@pytest.mark.parametrize("compact", [False, True])
def test_arguments_render_alike_as_mappings_and_as_json(tokenizer, template, compact):
    tokenizer.chat_template = template
    arguments = {"city": "São Paulo", "days": 2, "at": {"hour": 7}}
    as_text = json.dumps(arguments, separators=(",", ":") if compact else None)
    texts = []
    for form in (arguments, as_text):
        call = called("find")
        call["tool_calls"][0]["function"]["arguments"] = form
        [row] = run([{"messages": [said("user", "?"), call]}], tokenizer)
        texts.append(tokenizer.decode(row["input_ids"]))
    if template is JOINED or template is PRINTED:  # a text is what the template takes, as it is
        assert json.loads(texts[0].split("find ")[1].split("<|im_end|>")[0]) == arguments
        assert json.loads(texts[1].split("find ")[1].split("<|im_end|>")[0]) == arguments
    else:
        assert texts[0] == texts[1]
        assert '{"city": "São Paulo", "days": 2, "at": {"hour": 7}}' in texts[0]
