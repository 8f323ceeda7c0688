"""Preferences between answers: the right working and sum, and the same working with a mistake in carrying.

The wrong sum is off by ten, so nothing but the working says which side is right. A held-out pair is preferred rightly
where the model gives its chosen answer the higher log-probability, or a reward model the higher value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from jaxtyping import Float
from torch import Tensor
from transformers import set_seed

from lowtide.data.batches.collate import CompletionCollator
from lowtide.data.preference import PreferenceOptions, prepare_pairs
from lowtide.demo.data import Question
from lowtide.engine.forward import install, score
from lowtide.engine.heads.head import Head
from lowtide.engine.weights.loading import load_model, load_tokenizer
from lowtide.methods.shared.completions import completion_sums
from lowtide.score_rules import NEXT_TOKEN

SIDES = ("chosen_ids", "rejected_ids")
Row = dict[str, Any]


def wrong_sum(question: Question) -> int:
    """The sum with the carry forgotten; or carried where the last digits do not reach ten."""
    carries = question.left % 10 + question.right % 10 >= 10
    return question.left + question.right + (-10 if carries else 10)


def rejected_answer(question: Question) -> str:
    """The right working, and a wrong sum."""
    return question.working + str(wrong_sum(question))


def pair_rows(question: Question) -> Iterator[Row]:
    """One pair of completions to one prompt."""
    yield {
        "prompt": question.messages[:1],
        "chosen": _assistant(question.answer),
        "rejected": _assistant(rejected_answer(question)),
    }


def triple_rows(question: Question) -> Iterator[Row]:
    """A pair, and the right answer once more, whose likelihood is learned beside."""
    for pair in pair_rows(question):
        yield {**pair, "reference": pair["chosen"]}


def labelled_rows(question: Question) -> Iterator[Row]:
    """The same as single completions: a desirable one, and an undesirable one."""
    for answer, label in ((question.answer, True), (rejected_answer(question), False)):
        yield {"prompt": question.messages[:1], "completion": _assistant(answer), "label": label}


def _assistant(answer: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": answer}]


@torch.inference_mode()
def margins(folder: Path, questions: Sequence[Question], *, head: type[Head], seed: int) -> Float[Tensor, " pairs"]:
    """By how much the model in `folder` prefers the chosen answer to each question.

    Args:
        head: what is compared: sums of log-probabilities in nats, or values.
        seed: as that of training, which begins with the same value head where the folder has none.
    """
    tokenizer = load_tokenizer(str(folder))
    set_seed(seed)
    model = load_model(str(folder), head=head).eval()
    install(model)
    rule = head.score_rule(model)
    rows = Dataset.from_list([row for question in questions for row in pair_rows(question)])
    whole = rule != NEXT_TOKEN
    prepared, _ = prepare_pairs(rows, tokenizer, PreferenceOptions(), batch_size=len(questions), whole=whole)
    batch = CompletionCollator(SIDES, score_rule=rule)(list(prepared))
    chosen, rejected = completion_sums(score(model, batch).scored, batch).unbind(1)
    return chosen - rejected
