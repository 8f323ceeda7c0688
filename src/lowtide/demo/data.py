"""Arithmetic dialogues: sums of numbers below 100, answered by way of the last digits.

"What is 17 + 5?" is answered "7 + 5 = 12, so 22": a tiny model learns to carry within a minute if it may write down
the step at which it carries. Everything is generated from a seed, and a pair of numbers that is held out is in no
training dialogue, in neither order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 99
PHRASINGS = ("What is {}?", "Compute {}.", "How much is {}?")


@dataclass(frozen=True)
class Question:
    """One question and its answer."""

    left: int
    right: int
    phrasing: str = PHRASINGS[0]

    @property
    def text(self) -> str:
        return self.phrasing.format(f"{self.left} + {self.right}")

    @property
    def working(self) -> str:
        """The last digits and their sum, up to where the result follows."""
        a, b = self.left % 10, self.right % 10
        return f"{a} + {b} = {a + b}, so "

    @property
    def answer(self) -> str:
        """The working, then the result."""
        return f"{self.working}{self.left + self.right}"

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}, {"role": "assistant", "content": self.answer}]


def make_questions(held_out: int, seed: int) -> tuple[list[Question], list[Question]]:
    """All questions with numbers up to `LARGEST`, each once in some phrasing: to train on, and held out.

    Args:
        held_out: how many pairs of numbers are held out, asked once each.
        seed: of the choice, the phrasings and the order.
    """
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(a + 1)]
    rng.shuffle(pairs)
    both_orders = [order for a, b in pairs[held_out:] for order in {(a, b), (b, a)}]
    rng.shuffle(both_orders)
    train, kept_back = (
        [Question(a, b, rng.choice(PHRASINGS)) for a, b in chosen] for chosen in (both_orders, pairs[:held_out])
    )
    return train, kept_back


def dialogue_rows(question: Question) -> Iterator[dict[str, Any]]:
    """A question and its answer as a conversation: `{"messages": [...]}`."""
    yield {"messages": question.messages}


def told_rows(question: Question) -> Iterator[dict[str, Any]]:
    """A question and its answer, and the same with the answer beside the question."""
    yield from dialogue_rows(question)
    told = {"role": "user", "content": f"{question.text}\n{question.answer}"}
    yield {"messages": [told, question.messages[1]]}


def write_rows(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Write rows, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
