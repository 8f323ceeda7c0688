"""Turns as they are generated, under each chat template that TRL ships: the tokens of one plain rendering a turn.

What is expected is computed here from texts, by the words of each message, which are all different.
"""

import functools
from collections import Counter

import pytest

pytest.importorskip("trl", reason="the templates need the bench extra (trl)")

from lowtide.compat.templates.jinja import TEMPLATE_FAILURES
from lowtide.data.encode.chat import ChatEncoder
from lowtide.data.formats.reading import ChatSample, RowPlace
from tests.support.texts.template_families import KINDS, PLAIN, STOPS, STOPS_OF, conversation, stop_ids, template
from tests.support.texts.template_families import tokenizer as family_tokenizer

OPENED = "the prompt opens what the answer never has"
UNSHOWN = "the template does not show it"


def words_of(message):
    """The words that a turn says, in the order of the fields."""
    thought = next((message[name] for name in ("reasoning_content", "thinking") if name in message), "")
    calls = "".join(str(call["function"]["arguments"]) for call in message.get("tool_calls", ()))
    texts = f"{thought} {message['content']} {calls}".replace('"', " ").replace("'", " ")
    return [word.strip(".:{}") for word in texts.split() if word.startswith("word")]


THOUGHT_END = "\n</think>\n\n"


def expected_thinking(name, messages, number, tools):
    """The same of a turn whose prompt opens a thought that the template never writes: the thought, what ends it, and
    the answer behind the header without any thought; None where the prompt has closed the thought, or the template
    leaves out the header of a second call (DeepSeek-V3)."""
    tok = family_tokenizer()
    message = messages[number]

    def render(stop, prompt=False):
        options = {"tools": tools, "chat_template": template(name), "add_generation_prompt": prompt, "tokenize": False}
        return tok.apply_chat_template(messages[:stop], **options)

    context, whole = render(number, prompt=True), render(number + 1)
    if whole.startswith(context):
        return expected_turn(name, messages, number, tools)
    header = context.removesuffix("<think>\n")
    if header == context or not whole.startswith(header):
        return None
    answer = whole[len(header) :].removeprefix("<think></think>")
    stops = [answer.find(stop) + len(stop) for stop in STOPS_OF.get(name, STOPS) if stop in answer]
    thought = message.get("reasoning_content") or ""
    if "</think>" in message["content"] and "</think>" not in answer:
        thought = message["content"].split("</think>")[0].split("<think>")[1].strip()
    return context, thought + THOUGHT_END + answer[: min(stops)]


class Unjudged(Exception):
    """There is nothing to compare with."""


def expected_turn(name, messages, number, tools):
    """The texts of context and target of the turn that is message `number`."""
    tok = family_tokenizer()

    def render(some, prompt=False):
        options = {"tools": tools, "chat_template": template(name), "add_generation_prompt": prompt, "tokenize": False}
        try:
            return tok.apply_chat_template(some, **options)
        except TEMPLATE_FAILURES as error:
            raise Unjudged("the template can't render it") from error

    context, whole = render(messages[:number], prompt=True), render(messages[: number + 1])
    words = words_of(messages[number])
    places = [whole.rfind(word) for word in words]
    if min(places) < 0:
        raise Unjudged(UNSHOWN)
    if whole.startswith(context):
        start = len(context)
    else:
        shared = render(messages[:number])
        header = context[len(shared) :] if context.startswith(shared) else ""
        start = whole.rfind(header, 0, min(places)) + len(header) if header else -1
        if not header or whole.rfind(header, 0, min(places)) < 0:
            raise Unjudged(OPENED)
    said = max(place + len(word) for place, word in zip(places, words, strict=True))
    stops = STOPS_OF.get(name, STOPS)
    ends = [whole.find(stop, said) + len(stop) for stop in stops if whole.find(stop, said) >= 0]
    if ends:
        return context, whole[start : min(ends)]
    role = "tool" if messages[number].get("tool_calls") else "user"
    more = render([*messages[: number + 1], {"role": role, "name": "weather", "content": "more"}])
    rest = more[more.rfind(words[-1]) + len(words[-1]) :]
    rest = rest.removeprefix(whole[said:])
    stop = next((stop for stop in stops if rest.startswith(stop)), None)
    return context, whole[start:] + (stop or "")


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
