"""The demo's data: seeded, right, and with held-out combinations that training never sees."""

import json
import re

import pytest

from lowtide.demo.data import LARGEST, PHRASINGS, Question, dialogue_rows, make_questions, write_rows


def pair(question: Question) -> frozenset[int]:
    """What was asked, whatever the phrasing and the order."""
    return frozenset((question.left, question.right))


def test_no_held_out_pair_is_trained_on():
    train, held_out = make_questions(200, seed=0)
    assert len(held_out) == 200
    assert not {pair(q) for q in train} & {pair(q) for q in held_out}


def test_every_other_sum_is_trained_on_once():
    train, held_out = make_questions(200, seed=0)
    asked = {(q.left, q.right) for q in train}
    assert len(asked) == len(train)
    held = {order for q in held_out for order in ((q.left, q.right), (q.right, q.left))}
    numbers = range(LARGEST + 1)
    assert asked | held == {(a, b) for a in numbers for b in numbers}


def test_the_seed_decides():
    assert make_questions(50, seed=3) == make_questions(50, seed=3)
    assert make_questions(50, seed=3)[1] != make_questions(50, seed=4)[1]


def test_every_answer_is_right_in_both_of_its_parts():
    for question in make_questions(10, seed=0)[0]:
        first, second, ones, result = map(int, re.findall(r"\d+", question.answer))
        assert first + second == ones
        assert question.left + question.right == result
        assert ones % 10 == result % 10


@pytest.mark.parametrize(
    ("question", "text", "answer"),
    [
        (Question(17, 5), "What is 17 + 5?", "7 + 5 = 12, so 22"),
        (Question(42, 17, PHRASINGS[1]), "Compute 42 + 17.", "2 + 7 = 9, so 59"),
        (Question(0, 90, PHRASINGS[2]), "How much is 0 + 90?", "0 + 0 = 0, so 90"),
    ],
)
def test_questions_read_as_they_should(question, text, answer):
    assert (question.text, question.answer) == (text, answer)


def test_dialogues_are_conversations_one_a_line(tmp_path):
    path = tmp_path / "new" / "folder" / "train.jsonl"
    write_rows((row for each in (Question(1, 2), Question(9, 3)) for row in dialogue_rows(each)), path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[1]["messages"] == [
        {"role": "user", "content": "What is 9 + 3?"},
        {"role": "assistant", "content": "9 + 3 = 12, so 12"},
    ]
