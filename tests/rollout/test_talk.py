"""Conversations as tokens: what is read on top of what is held is what the template makes of the whole."""

import pytest

from lowtide.rollout.talk import Talk
from tests.rollout.chat_templates import HERMES, HERMES_TEMPLATE
from tests.support.texts.byte_tokenizer import byte_tokenizer
from tests.support.texts.chatml import CHATML

DROPS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def talk(template: str = CHATML, **given) -> Talk:
    return Talk(byte_tokenizer(template, eos="<|im_end|>"), **given)


@pytest.mark.parametrize("ended", [True, False])
def test_what_follows_is_the_rest_of_the_whole(ended):
    one, two = talk(system="s"), talk(system="s")
    one.say("a b")
    prompt = one.prompt()
    turn = one.tokenizer("no, ü")["input_ids"] + [2] * ended
    one.answered(turn)
    one.say("c")
    rest = one.following()
    assert rest is not None
    two.messages = [dict(each) for each in one.messages]
    assert prompt + turn + rest == two.prompt()
    assert one.held == len(prompt + turn + rest)
    assert one.messages[2] == {"role": "assistant", "content": "no, ü"}


def test_a_template_that_rewrites_earlier_turns_has_all_read_anew():
    one = talk(DROPS_THOUGHTS)
    one.say("a")
    one.prompt()
    one.answered([*one.tokenizer("<think>hm</think>yes")["input_ids"], 2])
    one.say("b")
    assert one.following() is None
    text = one.tokenizer.decode(one.prompt())
    assert "yes<|im_end|>\n<|im_start|>user\nb" in text
    assert "hm" not in text


def test_a_turn_whose_tokens_are_not_those_of_its_text_is_held_as_it_was_written():
    tokenizer = byte_tokenizer(CHATML, eos="<|im_end|>")
    one = Talk(tokenizer)
    one.say("a")
    prompt = one.prompt()
    broken = tokenizer("é")["input_ids"][:1]  # half a character: decoding loses it
    one.answered([*broken, 2])
    one.say("b")
    rest = one.following()
    if rest is not None:
        assert one.held == len(prompt) + 2 + len(rest)


def test_begin_forgets_all_but_the_system_message():
    one = talk(system="s")
    one.say("a")
    one.begin()
    assert one.messages == [{"role": "system", "content": "s"}]
    assert one.held == 0


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(ValueError, match="no chat template"):
        Talk(byte_tokenizer(None))


SHOWS_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + HERMES_TEMPLATE
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_calls_are_answered_one_by_one_and_read_on_top_of_what_is_held():
    one = talk(SHOWS_TOOLS, tools=[SCHEMA])
    one.say("2 + 2 and 3 + 3?")
    prompt = one.prompt()
    turn = [*one.tokenizer(f"{HERMES}\n{HERMES}")["input_ids"], 2]
    one.answered(turn)
    assert one.call == {"name": "add", "arguments": {"a": 2, "b": 2}}
    one.returned("4")
    assert one.call is not None
    one.returned("5")
    assert one.call is None
    assert one.messages[-2:] == [{"role": "tool", "name": "add", "content": each} for each in "45"]
    rest = one.following()
    whole = one.tokenizer.decode([*prompt, *turn, *rest] if rest is not None else one.prompt())
    assert whole.endswith("<|im_start|>tool\n4<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n")
    one.answered([*one.tokenizer("4 and 5")["input_ids"], 2])
    assert one.call is None


def test_without_tools_a_call_is_words_and_templates_without_calls_are_refused():
    one = talk(HERMES_TEMPLATE)
    one.say("a")
    one.prompt()
    one.answered([*one.tokenizer(HERMES)["input_ids"], 2])
    assert one.call is None
    with pytest.raises(ValueError, match="leaves out the name and arguments of tool calls"):
        talk(CHATML, tools=[SCHEMA])
    with pytest.raises(ValueError, match="does not write which tools there are"):
        talk(HERMES_TEMPLATE, tools=[SCHEMA])
