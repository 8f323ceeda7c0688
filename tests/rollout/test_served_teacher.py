"""A teacher behind `vllm serve`: what it is asked, and that what it answers is looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.data.teacher_logprobs import Asked
from lowtide.rollout.generators.vllm.http import ServerError
from lowtide.rollout.served_teacher import ServedTeacher
from tests.support.references.parity_world import VOCABULARY, build_teacher, tokenizer
from tests.support.vllm.teaching_server import LONGEST, Teaches, teaching_server

TEXTS = [Asked([5, 9, 30, 7, 12], [2, 3, 4]), Asked([8, 8, 21], [1, 2])]


@pytest.fixture(scope="module")
def model() -> Any:
    return build_teacher()


def served(url: str, **changed: Any) -> ServedTeacher:
    how = {"top": 3, "temperature": 1.0, "timeout": 5.0, "vocabulary": VOCABULARY, "tokenizer": tokenizer()}
    return ServedTeacher(url, **how | changed)


def test_it_says_what_its_model_computes(model):
    with teaching_server(Teaches(model, tokenizer())) as url:
        found = served(url).ask(TEXTS)
    row = 0
    for text in TEXTS:
        logprobs = model(torch.tensor([text.token_ids])).logits[0].log_softmax(-1)
        for place in text.places:
            expected = logprobs[place - 1].topk(3)
            assert torch.equal(found.tokens[row], expected.indices)
            torch.testing.assert_close(found.logprobs[row], expected.values, atol=1e-5, rtol=0)
            own = logprobs[place - 1, text.token_ids[place]]
            torch.testing.assert_close(found.written[row], own, atol=1e-5, rtol=0)
            row += 1


def _fewer(places: Any) -> Any:
    return [
        each and dict(list(each.items())[:1] + [(k, v) for k, v in each.items() if v["rank"] > 3]) for each in places
    ]


def _of_others(places: Any) -> Any:
    return [each and {str(int(token) + 1): value for token, value in each.items()} for each in places]


def _not_numbers(places: Any) -> Any:
    return [each and {token: {**value, "logprob": float("-inf")} for token, value in each.items()} for each in places]


def _beyond(places: Any) -> Any:
    return [each and {**each, "9999": {"logprob": -0.1, "rank": 1}} for each in places]


WRONG = {
    "fewer": (_fewer, r"gave \d of the 3 log-probabilities .*--max-logprobs -1"),
    "of other tokens": (_of_others, "where the token 30 stands"),
    "shorter": (lambda places: places[:-1], "of 4 tokens for a text of 5"),
    "none": (lambda places: None, "of no tokens for a text of 5"),
    "places without": (lambda places: [None] * len(places), "cannot be read"),
    "not numbers": (_not_numbers, "that are no numbers"),
    "a token that there is not": (_beyond, "names the token 9999, and the student has 320"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_that_does_not_serve_is_one_message(model, name):
    teaches = Teaches(model, tokenizer())
    teaches.said, message = WRONG[name]
    with teaching_server(teaches) as url, pytest.raises(ValueError, match=message):
        served(url).ask(TEXTS[:1])


def test_a_server_with_another_tokenizer_is_refused(model):
    class Shifted:
        def encode(self, text: str, **_: Any) -> list[int]:
            return [each + 1 for each in tokenizer().encode(text)]

    with teaching_server(Teaches(model, Shifted())) as url, pytest.raises(ValueError, match="into other tokens"):
        served(url)


def test_a_server_that_does_not_say_its_tokens_is_told_of(model, caplog):
    with teaching_server(Teaches(model)) as url:
        served(url)
    assert "check that both models have one tokenizer" in caplog.text


def test_a_server_that_leaves_the_temperature_out_is_told_of(model, caplog):
    with teaching_server(Teaches(model, tokenizer())) as url:
        served(url, temperature=0.5)
    assert "Set the temperature to 1" in caplog.text


def test_a_row_that_the_server_has_no_room_for_is_refused(model):
    with teaching_server(Teaches(model, tokenizer())) as url, pytest.raises(ValueError, match="lower max_length"):
        served(url).ask([Asked([1] * LONGEST, [1])])


def test_where_no_server_is_it_says_how_to_start_one():
    with pytest.raises(ServerError, match="vllm serve TEACHER --max-logprobs -1"):
        served("http://127.0.0.1:9", timeout=0.2)
    with pytest.raises(ValueError, match="teacher_model_server_url='nowhere' is no address"):
        served("nowhere")


def test_what_a_text_is_asked_of(model):
    teaches = Teaches(model, tokenizer())
    with teaching_server(teaches) as url:
        served(url).ask(TEXTS)
    assert sorted(teaches.texts) == sorted(text.token_ids for text in TEXTS)
