"""The demo of process reward models: worked sums of three steps, and which of them a tiny model holds to be wrong.

Of each question there is the right answer, and three that are wrong in one step: in the sum of the last digits, in
what is carried, in the result. A held-out question is shown one of the four.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from lowtide.data.batches.token_rows import IGNORED
from lowtide.data.stepwise import StepEncoder
from lowtide.demo.data import Question
from lowtide.demo.hidden import sum_of_last_digits
from lowtide.engine.heads.classes import TokenClasses
from lowtide.engine.weights.loading import load_model, load_tokenizer
from lowtide.methods.process.prm import LABELS

Row = dict[str, Any]


def judged_rows(question: Question) -> Iterator[Row]:
    """The four answers to a question: `{"prompt": ..., "completions": [...], "labels": [...]}`."""
    left, right = question.left, question.right
    ones, tens, result = int(sum_of_last_digits(question)), left // 10 + right // 10, left + right
    missed = 1 + result % 9
    for wrong in range(4):
        carry = (ones // 10 + (wrong == 2)) % 2
        steps = [
            f"{left % 10} + {right % 10} = {(ones + missed * (wrong == 1)) % 19}",
            f"{left // 10} + {right // 10}{' + 1' * carry} = {tens + carry}",
            f"so {result + missed * (wrong == 3)}",
        ]
        labels = [step != wrong for step in (1, 2, 3)]
        yield {"prompt": question.text, "completions": steps, "labels": labels}


def shown(question: Question) -> Row:
    """The answer to a held-out question that is judged."""
    return [*judged_rows(question)][(question.left + 2 * question.right) % 4]


def verdict(labels: Sequence[bool]) -> str:
    """The numbers of the steps that are wrong."""
    return ", ".join(str(place) for place, right in enumerate(labels, 1) if not right) or "none"


@torch.inference_mode()
def judgements(folder: Path, questions: Sequence[Question], seed: int) -> list[list[bool]]:
    """Which steps of what each question is shown the model in `folder` holds to be right; one without a head gets one.

    Args:
        seed: as that of training, which begins with the same head where the folder has none.
    """
    torch.manual_seed(seed)
    model = load_model(str(folder), head=TokenClasses, labels=LABELS).eval()
    encode = StepEncoder(load_tokenizer(str(folder)), "\n")
    rows = [encode(shown(question), number) for number, question in enumerate(questions)]
    ids, labels = (
        pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=padding)
        for name, padding in (("input_ids", 0), ("labels", IGNORED))
    )
    likeliest = model(input_ids=ids).logits.argmax(-1)  # causal: what stands behind a step changes nothing
    return [line[own != IGNORED].bool().tolist() for line, own in zip(likeliest, labels, strict=True)]
