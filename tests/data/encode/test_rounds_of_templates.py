"""Turns as they are generated, under each chat template that TRL ships: the tokens of one plain rendering a turn.

What is expected is computed here from texts, by the words of each message, which are all different.
"""

import functools
from collections import Counter

import pytest

pytest.importorskip("trl", reason="the templates need the bench extra (trl)")

from lowtide.data.encode.chat import ChatEncoder
from lowtide.data.formats.reading import ChatSample, RowPlace
from tests.support.texts.expected_turns import (
    OPENED,
    THOUGHT_END,
    UNSHOWN,
    Unjudged,
    expected_thinking,
    expected_turn,
)
from tests.support.texts.template_families import KINDS, PLAIN, conversation, stop_ids, template
from tests.support.texts.template_families import tokenizer as family_tokenizer


@functools.cache
def outcome(name, kind):
    """What became of a conversation: "equal", why there is nothing to compare, or a difference."""
    messages, tools = conversation(name, kind)
    tok = family_tokenizer()
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    encoder = ChatEncoder(tok, template(name), stop_ids=stop_ids(name))
    try:
        texts = [expected_turn(name, messages, number, tools) for number in turns]
    except Unjudged as reason:
        if str(reason) == OPENED:
            with pytest.raises(ValueError, match=r"row 0 .* message \d+ can't be trained as it is generated"):
                encoder.encode_rounds([ChatSample(messages, tools=tools)], [turns], RowPlace("data", [0]))
        return str(reason)
    wanted = [tuple(tuple(tok(text, add_special_tokens=False)["input_ids"]) for text in pair) for pair in texts]
    try:
        [rows] = encoder.encode_rounds([ChatSample(messages, tools=tools)], [turns], RowPlace("data", [0]))
    except ValueError as error:
        return f"refused: {error}"
    found = [(tuple(row.token_ids[:a]), tuple(row.token_ids[a:b])) for row in rows for a, b in row.turns]
    if sorted(found) == sorted(wanted):
        return "equal"
    return f"{[tok.decode(list(target)) for _, target in found]} is not {[tok.decode(list(t)) for _, t in wanted]}"


def opened():
    """The conversations whose prompts open what the answers never have, and those of DeepSeek with thoughts, which its
    templates don't write."""
    found = [(name, kind) for name in PLAIN for kind in KINDS if outcome(name, kind) == OPENED]
    deepseek = [name for name in PLAIN if name.startswith("deepseek")]
    return found + [(name, kind) for name in deepseek for kind in ("thoughts", "inline thoughts")]


def test_a_thought_that_the_prompt_opens_is_ended_as_is_asked_for():
    tok, judged = family_tokenizer(), 0
    for name, kind in opened():
        messages, tools = conversation(name, kind)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        encoder = ChatEncoder(tok, template(name), stop_ids=stop_ids(name), thought_end=THOUGHT_END)
        sample = ChatSample(messages, tools=tools)
        texts = [expected_thinking(name, messages, number, tools) for number in turns]
        if None in texts:
            with pytest.raises(ValueError, match=r"row 0 .* message \d+ can't be trained as it is generated"):
                encoder.encode_rounds([sample], [turns], RowPlace("data", [0]))
            continue
        [rows] = encoder.encode_rounds([sample], [turns], RowPlace("data", [0]))
        found = [(tok.decode(row.token_ids[:a]), tok.decode(row.token_ids[a:b])) for row in rows for a, b in row.turns]
        assert sorted(found) == sorted(texts), (name, kind)
        judged += 1
    assert judged == 20


@pytest.mark.parametrize("name", PLAIN)
def test_every_turn_is_one_plain_rendering(name):
    unequal = {kind: outcome(name, kind) for kind in KINDS}
    unequal = {kind: what for kind, what in unequal.items() if what not in ("equal", OPENED, UNSHOWN)}
    assert {kind: what for kind, what in unequal.items() if what != "the template can't render it"} == {}


def test_most_conversations_can_be_judged():
    counts = Counter(outcome(name, kind) for name in PLAIN for kind in KINDS)
    assert sum(counts.values()) == 41 * 6
    assert counts["equal"] >= 0.97 * 156


@pytest.mark.parametrize("name", ["gptoss", "glm4moe", "qwen3", "llama3", "phi3"])
def test_a_conversation_of_ten_turns_is_rendered_at_most_four_times_a_turn(name, monkeypatch):
    """Once the ends of its turns are known; finding turns in a whole conversation renders it twice a turn."""
    tok = family_tokenizer()
    messages = [each for _ in range(10) for each in conversation(name, "single")[0]]
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    encoder, place = ChatEncoder(tok, template(name), stop_ids=stop_ids(name)), RowPlace("data", [0])
    encoder.encode_rounds([ChatSample(messages)], [turns], place)
    made, plain = [], type(tok).apply_chat_template
    monkeypatch.setattr(type(tok), "apply_chat_template", lambda *args, **more: made.append(1) or plain(*args, **more))
    encoder.encode_rounds([ChatSample(messages)], [turns], place)
    assert len(turns) == 10
    assert 20 <= len(made) <= 40
