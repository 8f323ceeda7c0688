"""Rows of completions in several rounds, and their computation by one plain forward a round."""

from __future__ import annotations

import torch

from lowtide.data.batches.completion_rounds import completion_rounds
from lowtide.score_rules import IGNORE

PROMPT = [5, 9, 3, 7, 11]
ROUNDS = {
    "one": [([4, 8, 2], [4, 8, 2], 5)],
    "later context": [([4, 8, 2], [4, 8, 2], 5), ([6, 1, 9, 9, 2], [IGNORE, IGNORE, 9, 9, 2], 5)],
    "cut prompt": [
        ([3, 1, 2], [3, 1, 2], 5),
        ([8, 6, 7, 4], [IGNORE, 6, IGNORE, 4], 3),
        ([1, 2], [IGNORE, 2], 4),
    ],
    "alone": [([2, 7], [2, 7], 5), ([9, 9, 1, 4], [IGNORE, IGNORE, 1, 4], 0)],
    "other": [([10, 12], [10, 12], 5), ([3, 3, 13], [IGNORE, 3, 13], 5)],
}
"""Rounds as tokens behind what they have of the prompt, labels, and how much they have of it."""


def with_rounds(name: str, rounds: list) -> dict:
    """The columns of a completion."""
    row = {f"{name}_ids": [token for tokens, _, _ in rounds for token in tokens]}
    if len(rounds) == 1:
        return row
    return {
        **row,
        f"{name}_labels": [label for _, labels, _ in rounds for label in labels],
        f"{name}_seq_lengths": [len(tokens) for tokens, _, _ in rounds],
        f"{name}_prefix_length": [seen for _, _, seen in rounds],
    }


def rows_of_pairs() -> list[dict]:
    """Pairs whose sides have other numbers of rounds."""
    sides = [("later context", "one"), ("cut prompt", "other"), ("one", "alone"), ("other", "later context")]
    return [
        {
            "prompt_ids": [*PROMPT[:4], 11 + number],
            **with_rounds("chosen", ROUNDS[chosen]),
            **with_rounds("rejected", ROUNDS[rejected]),
        }
        for number, (chosen, rejected) in enumerate(sides)
    ]


def rows_of_singles() -> list[dict]:
    """Labelled completions."""
    return [
        {"prompt_ids": [*PROMPT[:4], 11 + number], **with_rounds("completion", rounds), "label": number % 2 == 0}
        for number, rounds in enumerate(ROUNDS.values())
    ]


def dense_scores(model, row: dict, completion: str) -> torch.Tensor:
    """[scored]: log-probabilities of a completion's scored tokens, from one plain forward of the model for each of its
    rounds."""
    found = []
    for own in completion_rounds(row, completion):
        context = row["prompt_ids"][: own.seen]
        ids = torch.tensor([[*context, *own.token_ids]])
        logits = type(model).forward(model, input_ids=ids).logits[0, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
        wanted = torch.tensor([*[IGNORE] * len(context), *own.labels])[1:] != IGNORE
        found.append(logprobs[wanted])
    return torch.cat(found)
