"""Which messages are trained, and what Arrow and datasets do to tool calls."""

import json
import logging
from itertools import groupby

import pytest
from datasets import Dataset

from lowtide import SFTConfig
from lowtide.data.prepare import PrepareOptions, prepare
from tests.support.texts.chatml import CHATML, MARKED_CHATML

pytestmark = pytest.mark.usefixtures("datasets_cache")


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def weights_of(tokenizer, row):
    """The weight of each token that is scored, by its text."""
    given = row.get("loss_weights") or [1.0] * len(row["input_ids"])
    scored = [place for place, label in enumerate(row["labels"]) if label != -100]
    assert all(weight == 1 for place, weight in enumerate(given) if place not in scored)
    runs = groupby(scored, key=lambda place: given[place])
    return [(tokenizer.decode([row["input_ids"][place] for place in run]), weight) for weight, run in runs]


def talk(*marks):
    """A conversation of as many rounds, whose answers have these keys."""
    messages = []
    for number, mark in enumerate(marks):
        messages += [said("user", f"q{number}?"), said("assistant", f"a{number}.", **mark)]
    return messages


def run(rows, tokenizer, packing=False, stream=False, **options):
    options = {"assistant_only_loss": True, "vocab_size": 1000, **options}
    dataset = Dataset.from_list(rows)
    dataset = dataset.to_iterable_dataset() if stream else dataset
    return prepare(dataset, tokenizer, PrepareOptions(**options), batch_size=2, packing=packing)[0]


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_weights_between_0_and_1_are_of_the_tokens_of_their_message(tokenizer, way, stream):
    tokenizer.chat_template, options, end = WAYS[way]
    rows = [
        {"messages": talk({}, {})},
        {"messages": talk({"weight": 0.5}, {"weight": 0, "train": False}, {"train": True, "weight": 0.25}, {})},
    ]
    rows = [{"messages": [{"weight": None, "train": None, **m} for m in row["messages"]]} for row in rows]
    found = [*run(rows, tokenizer, stream=stream, **options)]
    assert weights_of(tokenizer, found[0]) == [(f"a0.{end}a1.{end}", 1.0)]
    assert weights_of(tokenizer, found[1]) == [(f"a0.{end}", 0.5), (f"a2.{end}", 0.25), (f"a3.{end}", 1.0)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_weights_stay_with_their_tokens_in_bins_and_cut_rows(tokenizer, way, stream):
    tokenizer.chat_template, options, end = WAYS[way]
    rows = [{"messages": talk({"weight": 0.5}, {"weight": 1})}, {"messages": talk({}, {})}, {"messages": talk({})}]
    for strategy in ("bfd", "wrapped"):
        made = run(rows, tokenizer, stream=stream, packing=True, packing_strategy=strategy, max_length=500, **options)
        pairs = [pair for row in made for pair in weights_of(tokenizer, row)]
        assert {text: weight for text, weight in pairs if weight != 1} == {f"a0.{end}": 0.5}
        assert "".join(text for text, _ in pairs).count(f"a0.{end}") == 3
    plain = run(rows, tokenizer, **options)[0]
    first = plain["loss_weights"].index(0.5)
    cut = run(rows[:1], tokenizer, stream=stream, max_length=first + 1, **options)
    assert [row["loss_weights"] for row in cut] == [plain["loss_weights"][: first + 1]]


def test_rows_without_such_weights_have_no_column_of_them(tokenizer):
    rows = [{"messages": talk({"weight": 0}, {"weight": 1})}, {"messages": talk({}, {})}]
    assert run(rows, tokenizer).column_names == ["input_ids", "labels"]
    assert "loss_weights" not in run(rows, tokenizer, packing=True).column_names


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
        ({"weight": 2}, r"row 0 .* message 1 has weight=2; it must be true or false, or a weight from 0 to 1"),
        ({"weight": -0.1}, r"message 1 has weight=-0.1; it must be true or false, or a weight"),
        ({"weight": float("nan")}, r"message 1 has weight=nan; it must be true or false, or a weight"),
        ({"weight": float("inf")}, r"message 1 has weight=inf; it must be true or false, or a weight"),
        ({"loss": "0.5"}, r"message 1 has loss='0.5'; it must be true or false, or a weight"),
        ({"weight": 0.5, "loss": 0.25}, r"message 1 has .*'weight': 0.5.* contradict each other"),
        ({"weight": 0.5, "train": False}, r"message 1 has .*'train': False.* contradict each other"),
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


OPENING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""Its prompt opens a thought that no answer has, as DeepSeek's."""


def test_a_thought_that_the_prompt_opens_is_scored_with_what_ends_it(tokenizer, caplog):
    tokenizer.chat_template = OPENING
    messages = [*talk({"reasoning_content": "I think."}), *talk({})]
    found = run([{"messages": messages}], tokenizer, thought_end="</think>")
    texts = ["I think.</think>a0.<|im_end|>", "</think>a0.<|im_end|>"]
    assert scored(tokenizer, found[0]) in ("".join(texts), "".join(texts[::-1]))
    with pytest.raises(ValueError, match=r"say what ends it \(such as thought_end="):
        run([{"messages": messages}], tokenizer)


@pytest.mark.parametrize(("template", "turns"), [(CHATML, "whole"), (MARKED_CHATML, "as_generated")])
def test_what_ends_a_thought_is_refused_where_turns_are_not_taken_as_generated(tokenizer, template, turns):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"thought_end='</think>' requires .*turns='as_generated'"):
        run([{"messages": talk({})}], tokenizer, thought_end="</think>", turns=turns)


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
