"""The demo of process reward models: what is labelled wrong is wrong, and nothing else."""

import re

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from lowtide.demo.data import Question, make_questions
from lowtide.demo.judging import judged_rows, judgements, shown, verdict
from lowtide.demo.model import save


def is_right(question: Question, place: int, step: str) -> bool:
    """Whether a step is what the question makes it, computed from its numbers."""
    found = [int(each) for each in re.findall(r"\d+", step)]
    ones = question.left % 10 + question.right % 10
    if place == 1:
        return found == [question.left % 10, question.right % 10, ones]
    if place == 2:
        terms = [question.left // 10, question.right // 10, *[1] * (ones >= 10)]
        return found == [*terms, sum(terms)]
    return found == [question.left + question.right]


def test_the_steps_that_are_labelled_wrong_are_those_that_are():
    for question in make_questions(10, seed=0)[0][::7]:
        answers = [*judged_rows(question)]
        assert [row["labels"].count(False) for row in answers] == [0, 1, 1, 1]
        assert sum(row == shown(question) for row in answers) == 1
        for row in answers:
            steps = enumerate(row["completions"], 1)
            assert row["labels"] == [is_right(question, place, step) for place, step in steps]


def test_every_word_of_the_steps_is_in_the_demos_tokenizer(tmp_path):
    save(tmp_path, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    row = next(judged_rows(Question(86, 39)))
    assert row["completions"] == ["6 + 9 = 15", "8 + 3 + 1 = 12", "so 125"]
    for text in (row["prompt"], *row["completions"]):
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_judgements_are_those_of_the_model_alone_on_each_answer(tmp_path):
    save(tmp_path, seed=0)
    questions = [Question(17, 5), Question(98, 7), Question(3, 4)]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    torch.manual_seed(2)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=2, dtype="float32").eval()

    @torch.no_grad()
    def alone(question: Question) -> list[bool]:
        text = "".join([question.text, *(f"{step}\n" for step in shown(question)["completions"])])
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        ends = ids[0] == tokenizer.convert_tokens_to_ids("\n")
        return model(input_ids=ids).logits[0, ends].argmax(-1).bool().tolist()

    assert judgements(tmp_path, questions, seed=2) == [alone(each) for each in questions]


def test_a_verdict_names_the_wrong_steps():
    assert [verdict(labels) for labels in ([True, True], [True, False], [False, False])] == ["none", "2", "1, 2"]
