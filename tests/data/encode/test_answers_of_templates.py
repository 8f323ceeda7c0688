"""Answers of pairs as they are generated, under each chat template that TRL ships: the tokens of a plain rendering."""

import functools
import itertools
import json
from collections import Counter

import pytest

pytest.importorskip("trl", reason="the templates need the bench extra (trl)")

from lowtide.data.encode.sides import SideEncoder
from lowtide.data.formats.preferences import detect_pairs
from lowtide.data.options import PreferenceOptions
from tests.support.marks import slow_but
from tests.support.texts.expected_turns import OPENED, UNSHOWN, Unjudged, expected_turn
from tests.support.texts.template_families import KINDS, PLAIN, conversation, stop_ids, template
from tests.support.texts.template_families import tokenizer as family_tokenizer

UNJUDGED = ("deepseek_r1_distill", "deepseekv3", "idefics3", "llava_next", "smolvlm")
"""Templates that show no conversation: their prompt opens what no answer has, or they take contents in parts."""
UNRENDERED = "the template can't render it"


def sides_of(name, row):
    options = PreferenceOptions(chat_template=template(name), stop_ids=tuple(stop_ids(name)))
    encoder = SideEncoder(family_tokenizer(), detect_pairs(list(row), "data"), options, row, "data")
    return encoder({column: [value] for column, value in row.items()}, [0]).sides


def encoded(name, row):
    """The token ids of both sides, in prompt and answer."""
    sides = sides_of(name, row)
    ids = [(side.token_ids.tolist(), side.prompt_lengths.item()) for side in sides]
    return [(each[:length], each[length:]) for each, length in ids]


@functools.cache
def outcome(name, kind):
    """What became of a pair whose answers are a conversation's last, and the same in other words: "equal", why there
    is nothing to compare, or both."""
    messages, tools = conversation(name, kind)
    other = json.loads(json.dumps(messages[-1]).replace("word", "wordy"))
    row = {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": [other]}
    row |= {} if tools is None else {"tools": json.dumps(tools)}
    try:
        texts = [
            expected_turn(name, [*messages[:-1], each], len(messages) - 1, tools) for each in (messages[-1], other)
        ]
    except Unjudged as reason:
        if str(reason) == OPENED:
            with pytest.raises(ValueError, match=r"row 0 .* message \d+ can't be trained as it is generated"):
                encoded(name, row)
        return str(reason)
    tok = family_tokenizer()
    wanted = [tuple(tok(text, add_special_tokens=False)["input_ids"] for text in pair) for pair in texts]
    found = encoded(name, row)
    return "equal" if found == wanted else f"{[tok.decode(ids) for _, ids in found]} is not {texts}"


@pytest.mark.parametrize("name", PLAIN)
def test_answers_of_a_pair_are_one_plain_rendering_each(name):
    unequal = {kind: outcome(name, kind) for kind in KINDS}
    assert {kind: what for kind, what in unequal.items() if what not in ("equal", OPENED, UNSHOWN, UNRENDERED)} == {}


def test_most_pairs_can_be_judged():
    counts = Counter(outcome(name, kind) for name in PLAIN for kind in KINDS)
    assert sum(counts.values()) == 41 * 6
    assert counts["equal"] >= 0.97 * 156


def turns_of(side):
    """The token ids of the context and of the answer of each turn of a side."""
    tokens, labels, length = side.token_ids.tolist(), side.labels.tolist(), side.prompt_lengths.item()
    [rounds] = side.rounds
    found, start = [], length
    for seen, count in rounds or [(length, len(tokens) - length)]:
        whole = tokens[:seen] + tokens[start : start + count]
        scored = [False] * seen + [label != -100 for label in labels[start : start + count]]
        start += count
        for is_scored, places in itertools.groupby(range(len(whole)), key=scored.__getitem__):
            if is_scored:
                first, *_, last = [*places] * 2
                found.append((whole[:first], whole[first : last + 1]))
    return found


@pytest.mark.parametrize("name", slow_but(["qwen3", "gptoss", "glm4moe", "qwen2_5"], PLAIN))
def test_each_turn_of_a_side_is_one_plain_rendering(name):
    """A pair whose completions are all that follows the first question, and the same in other words."""
    tok, judged = family_tokenizer(), 0
    for kind in KINDS:
        messages, tools = conversation(name, kind)
        first = next(number for number, each in enumerate(messages) if each["role"] == "assistant")
        other = json.loads(json.dumps(messages[first:]).replace("word", "wordy"))
        row = {"prompt": messages[:first], "chosen": messages[first:], "rejected": other}
        row |= {} if tools is None else {"tools": json.dumps(tools)}
        wanted = []
        try:
            for side in (messages, messages[:first] + other):
                turns = [number for number, each in enumerate(side) if each["role"] == "assistant"]
                wanted.append([expected_turn(name, side, number, tools) for number in turns])
        except Unjudged:
            continue
        judged += 1
        for side, texts in zip(sides_of(name, row), wanted, strict=True):
            ids = [tuple(tok(text, add_special_tokens=False)["input_ids"] for text in pair) for pair in texts]
            assert sorted(turns_of(side)) == sorted(ids), kind
    assert judged or name in UNJUDGED
