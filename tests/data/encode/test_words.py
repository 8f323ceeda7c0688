"""Which word a token is of, under tokenizers of every form, against a plain reading of the text's white space."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.masking import Masking
from lowtide.data.batches.values import NUMBER, WORDS
from lowtide.data.encode.masked import MaskedEncoder, MaskedOptions
from lowtide.data.encode.words import words_of
from lowtide.data.prepare import prepare
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import OWN_TOKEN
from tests.support.texts.word_tokenizers import FORMS, tokenizer_of

PARTS = ["tide", "boat", "shell", "stone", "gull", "don't", "1984", "sand,", "é", "(pool)"]


def texts(count: int = 40) -> list[str]:
    rng = random.Random(0)
    lines = [
        [rng.choice(PARTS) + rng.choice(["", "s", "ward"]) for _ in range(rng.randint(1, 9))] for _ in range(count)
    ]
    return ["".join(word + rng.choice([" ", " ", "  ", "\n"]) for word in line).strip() for line in lines]


def encoded(tokenizer: PreTrainedTokenizerBase, lines: list[str]) -> Dataset:
    rows = Dataset.from_dict({"text": lines})
    options = MaskedOptions(words=True)
    return prepare(rows, tokenizer, options, batch_size=4, packing=False, encoder_of=MaskedEncoder)[0]


def plain_units(text: str, spans: list[tuple[int, int]]) -> list[int]:
    """For each token, the first token that it is bound to, because a word of the text has characters in both."""
    words, place = [], 0
    for word in text.split():
        place = text.index(word, place)
        words.append({*range(place, place + len(word))})
        place += len(word)
    touched = [{n for n, word in enumerate(words) if word & {*range(*span)}} for span in spans]
    units = [*range(len(spans))]
    for number in range(1, len(spans)):
        if any(touched[number] & touched[earlier] for earlier in range(number)):
            units[number] = units[number - 1]
    return units


def bounds(units: list[int] | np.ndarray) -> list[int]:
    """The tokens that begin a unit."""
    return [n for n in range(len(units)) if n == 0 or units[n] != units[n - 1]]


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("form", FORMS)
def test_words_are_those_between_spaces(form: str):
    lines = texts()
    tokenizer = tokenizer_of(form, lines)
    checked = 0
    for line, row in zip(lines, encoded(tokenizer, lines), strict=True):
        spans = tokenizer(line, return_offsets_mapping=True)["offset_mapping"][1:-1]
        assert row[WORDS][0] == row[WORDS][-1] == -1
        solid = [n for n, (start, stop) in enumerate(spans) if line[start:stop].strip()]
        found = np.array(row[WORDS][1:-1])[solid]
        assert (np.diff(found) >= 0).all()
        assert bounds(found) == bounds(plain_units(line, [spans[n] for n in solid]))
        checked += len(bounds(found))
    assert checked > 40, "words"


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("form", FORMS)
def test_no_text_is_masked_whole_for_its_tokenizer(form: str):
    """The share of a text that is masked is that of the option, wherever the tokenizer cuts."""
    line = " ".join(random.Random(1).choices(["tide", "boats", "shellward", "stones"], k=60))
    tokenizer = tokenizer_of(form, texts())
    row = encoded(tokenizer, [line])[0]
    tokens, words = row["input_ids"], torch.tensor([word for word in row[WORDS] if word >= 0])
    batch = RaggedBatch.from_segments([tokens] * 64, [row["labels"]] * 64, score_rule=OWN_TOKEN)
    batch = replace(batch, row_values={NUMBER: torch.arange(64)}, score_values={WORDS: words.repeat(64)})
    masked = Masking(0.15, mask_token=4, vocabulary=len(tokenizer))(batch, epoch=0)
    shares = torch.bincount(masked.score_segment, minlength=64) / len(tokens)
    assert 0.1 < shares.mean() < 0.2
    assert shares.max() < 0.7


def test_scripts_without_spaces_have_a_word_for_each_token():
    text = "我们学习 tide潮汐 น้ำขึ้น"
    spans = [(0, 2), (2, 4), (4, 7), (7, 9), (9, 10), (10, 11), (11, 14), (14, 19)]
    assert words_of(text, spans).tolist() == [0, 1, 2, 2, 3, 4, 5, 6]


def test_bytes_of_a_character_are_one_word():
    assert words_of("a 潮汐", [(0, 1), (1, 3), (2, 3), (2, 3), (3, 4)]).tolist() == [0, 1, 1, 1, 2]


def test_a_token_of_several_words_makes_them_one():
    assert words_of("of the tides", [(0, 1), (1, 4), (4, 6), (6, 10), (10, 12)]).tolist() == [0, 0, 0, 1, 1]


def test_texts_without_words():
    assert words_of("", []).tolist() == []
    assert words_of("  ", [(0, 1), (1, 2)]).tolist() == [0, 0]
    assert words_of("a ", [(0, 0), (0, 1), (1, 2), (2, 2)]).tolist() == [0, 0, 1, 1]
    assert words_of("a  b", [(0, 3), (3, 4)]).tolist() == [0, 1]


@pytest.mark.parametrize("character", "กກကកぁァ㐀中豈𠀀")
def test_characters_of_scripts_without_spaces_are_words_of_their_own(character):
    text = f"ab{character}{character}cd e"
    spans = [(place, place + 1) for place, each in enumerate(text) if each != " "]
    assert words_of(text, spans).tolist() == [0, 0, 1, 2, 3, 3, 4]


@pytest.mark.parametrize("character", "aéאअㅏ가")
def test_characters_of_other_scripts_are_of_one_word(character):
    text = f"{character}{character}{character} {character}"
    assert words_of(text, [(0, 1), (1, 2), (2, 3), (4, 5)]).tolist() == [0, 0, 0, 1]
