"""The demo's preferences: every wrong answer is wrong in its carry, and margins are those of the plain computation."""

import re

import pytest
import torch
from transformers import AutoTokenizer, set_seed

from lowtide.demo.data import Question, make_questions
from lowtide.demo.model import save
from lowtide.demo.preferences import labelled_rows, margins, pair_rows, rejected_answer, wrong_sum
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.heads.value import Value


@pytest.mark.parametrize(("left", "right", "wrong"), [(17, 5, 12), (42, 17, 69), (5, 5, 0), (99, 99, 188), (0, 0, 10)])
def test_a_wrong_sum_forgets_its_carry_or_carries_what_is_not_there(left, right, wrong):
    assert wrong_sum(Question(left, right)) == wrong


def test_a_rejected_answer_differs_from_the_right_one_in_its_sum_alone():
    for question in make_questions(10, seed=0)[0]:
        right, wrong = (re.findall(r"\d+", text) for text in (question.answer, rejected_answer(question)))
        assert right[:3] == wrong[:3]
        assert right[3] != wrong[3]
        assert rejected_answer(question).startswith(question.working)


def test_rows_are_a_pair_or_its_two_sides():
    question = Question(17, 5)
    (pair,) = pair_rows(question)
    desirable, undesirable = labelled_rows(question)
    assert pair["prompt"] == desirable["prompt"] == undesirable["prompt"] == question.messages[:1]
    assert (desirable["label"], undesirable["label"]) == (True, False)
    assert desirable["completion"] == pair["chosen"] == question.messages[1:]
    assert undesirable["completion"] == pair["rejected"]
    assert pair["rejected"][0]["content"] == "7 + 5 = 12, so 12"


@pytest.mark.parametrize("head", [LanguageModel, Value])
def test_margins_are_those_of_the_plain_computation(tmp_path, head):
    save(tmp_path, seed=0)
    questions = [Question(17, 5), Question(3, 4), Question(98, 7)]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    set_seed(3)
    model = head.auto_class.from_pretrained(tmp_path, dtype="float32", **head.config_values).eval()

    @torch.no_grad()
    def value(question: Question, answer: str) -> float:
        messages = [*question.messages[:1], {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")["input_ids"]
        ids = ids[:, : int((ids[0] == tokenizer.eos_token_id).nonzero()[-1]) + 1]
        output = model(input_ids=ids).logits
        if head is Value:
            return output.item()
        logprobs = torch.log_softmax(output[0, :-1], -1).gather(-1, ids[0, 1:, None])
        return logprobs.sum().item()  # the prompt's part is the same on both sides

    expected = [value(each, each.answer) - value(each, rejected_answer(each)) for each in questions]
    found = margins(tmp_path, questions, head=head, seed=3)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-4)
