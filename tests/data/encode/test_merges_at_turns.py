"""Generated conversations under tokenizers that merge as real ones do: each word of the assistant is scored once, none
of another's is, and each turn ends with a stop token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("trl", reason="the templates need the bench extra (trl)")

from lowtide.data.encode.chat import ChatEncoder
from lowtide.data.formats.reading import ChatSample, RowPlace
from tests.support.texts import template_families as families

BETWEEN = st.sampled_from(
    [" ", "\n", "\n\n", "\n \n", "  ", ", ", "...\n\n", "' ", "'s ", " - ", "(", "12345 ", "/\n", " A", "\t"]
)
TEXTS = st.lists(BETWEEN, min_size=1, max_size=4)
ROUNDS = st.lists(st.tuples(TEXTS, TEXTS, TEXTS, st.booleans()), min_size=1, max_size=3)


def conversation(rounds, thought_name):
    """Messages, and the words that the assistant says and that others say."""
    own, others = [], []

    def said(betweens, whose, mark):
        words = [f"{mark}{len(whose) + n:03d}x" for n in range(len(betweens))]
        whose.extend(words)
        return "".join(word + between for word, between in zip(words, betweens, strict=True)) + "end"

    messages = []
    for asked, answered, thought, thinks in rounds:
        messages.append({"role": "user", "content": said(asked, others, "us")})
        more = {thought_name: said(thought, own, "as")} if thinks and thought_name else {}
        messages.append({"role": "assistant", "content": said(answered, own, "as"), **more})
    return messages, own, others


@pytest.mark.parametrize("kind", ["qwen", "llama", "gpt", "unigram"])
@pytest.mark.parametrize("name", ["qwen3", "llama3", "gptoss", "glm4moe", "phi3"])
@settings(max_examples=10, deadline=None)
@given(rounds=ROUNDS)
def test_what_the_assistant_says_is_scored_once(kind, name, rounds):
    tokenizer = families.tokenizer(kind)
    thought_name = None if name in ("llama3", "phi3") else "reasoning"
    messages, own, others = conversation(rounds, thought_name)
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    encoder = ChatEncoder(tokenizer, families.template(name), stop_ids=families.stop_ids(name, kind))
    [rows] = encoder.encode_rounds([ChatSample(messages)], [turns], RowPlace("data", [0]))
    targets = [tokenizer.decode(row.token_ids[start:stop]) for row in rows for start, stop in row.turns]
    assert len(targets) == len(turns)
    assert all(target.endswith(families.STOPS_OF.get(name, families.STOPS)) for target in targets)
    scored = "".join(targets)
    assert {word: scored.count(word) for word in own} == dict.fromkeys(own, 1)
    assert not [word for word in others if word in scored]
    if kind != "unigram":  # whose pieces do not tell one space from two
        for number in turns:
            assert any(messages[number]["content"].strip() in target for target in targets)
