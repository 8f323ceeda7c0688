"""Text of tokens as they come: whole characters, and thoughts apart."""

import random

import pytest

from lowtide.rollout.spoken import Decoder, Piece, Speech, Thoughts
from tests.support.texts.byte_tokenizer import byte_tokenizer

TEXT = "A wave: 🌊, ünder it <think>is 日本</think>. "


def test_characters_come_whole_and_add_up_to_the_text():
    tokenizer = byte_tokenizer()
    decoder = Decoder(tokenizer)
    parts = [decoder.feed(token) for token in tokenizer(TEXT)["input_ids"]]
    assert "".join(parts) + decoder.rest() == TEXT
    assert "🌊" in parts
    assert not any("\ufffd" in part for part in parts)


def test_bytes_that_are_no_character_come_at_the_end():
    tokenizer = byte_tokenizer()
    ids = tokenizer("aé")["input_ids"][:-1]
    decoder = Decoder(tokenizer)
    assert [decoder.feed(token) for token in ids] == ["a", ""]
    assert decoder.rest() == "\ufffd"


@pytest.mark.parametrize("seed", range(5))
def test_marks_are_found_wherever_a_text_is_cut(seed):
    text, cut = "so <think>a < b</think>c</thin <think>d", random.Random(seed)
    thoughts, pieces, start = Thoughts(), list[Piece](), 0
    while start < len(text):
        stop = start + cut.randint(1, 7)
        pieces += thoughts.feed(text[start:stop])
        start = stop
    pieces += thoughts.rest()
    assert "".join(piece.text for piece in pieces) == text
    assert "".join(piece.text for piece in pieces if piece.is_thought) == "a < bd"
    assert [piece.text for piece in pieces if piece.is_mark] == ["<think>", "</think>", "<think>"]


def test_a_thought_that_the_prompt_opens():
    assert Thoughts("assistant\n<think>\n").feed("hm</think>yes") == [
        Piece("hm", is_thought=True),
        Piece("</think>", is_mark=True),
        Piece("yes"),
    ]
    assert Thoughts("<think>x</think>").feed("yes") == [Piece("yes")]


def test_channels_of_gpt_oss_whose_marks_are_special_tokens():
    special = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>"]
    tokenizer = byte_tokenizer(eos="<|return|>", more=special)
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
    speech = Speech(tokenizer, "<|start|>assistant", [tokenizer.eos_token_id])
    pieces = [piece for token in tokenizer(text)["input_ids"] for piece in speech.feed(token)] + speech.rest()
    said = ["".join(p.text for p in pieces if p.is_thought is thought and not p.is_mark) for thought in (True, False)]
    assert said == ["hm", "yes"]
