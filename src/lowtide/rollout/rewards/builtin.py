"""Reward functions that come with lowtide under short names: `exact_answer`, `format` and `length`.

They are ordinary ones: they take what every reward function takes, by keyword, texts and conversations alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "target")
"""The columns in which `exact_answer` looks for the right answer, in this order."""
MARKS = (
    re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL | re.IGNORECASE),
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"),
    re.compile(r"####\s*(.+)"),
    re.compile(r"(?:answer is|answer:)\s*(.+)", re.IGNORECASE),
)
"""How a final answer is marked, in the order in which marks are looked for."""
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
FORM = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)
TOKENS_A_POINT = 1000
"""Tokens that cost one point of `length`."""


def exact_answer(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where a completion's final answer is the dataset's, else 0; None where the dataset has none.

    The right answer is in the column `answer`, `solution`, `ground_truth` or `target`, after `####` where that is
    written (as in GSM8K). The completion's is what it marks last: `<answer>...</answer>`, `\\boxed{...}`, `#### ...` or
    "the answer is ..."; without a mark the last number where a number is expected, else the whole text. Numbers are
    compared as numbers, texts without regard to case, spaces around them and a full stop at the end.

    Raises:
        ValueError: none of these columns is there.
    """
    name = next((each for each in ANSWER_COLUMNS if each in columns), None)
    if name is None:
        raise ValueError(f"exact_answer needs the right answers in a column {', '.join(ANSWER_COLUMNS)}: rename yours")
    rewards: list[float | None] = []
    for completion, wanted in zip(completions, columns[name], strict=True):
        if wanted is None or not str(wanted).strip():
            rewards.append(None)
            continue
        right = _plain(_marked(str(wanted)) or str(wanted))
        rewards.append(float(_final_answer(text_of(completion), right) == right))
    return rewards


def format_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 where a completion is `<think>...</think>` and then `<answer>...</answer>`, and nothing else; 0 elsewhere."""
    return [float(FORM.fullmatch(text_of(completion)) is not None) for completion in completions]


def length_reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Minus a completion's tokens, in thousands: of two completions the shorter one is better."""
    return [-len(ids) / TOKENS_A_POINT for ids in completion_ids]


def text_of(completion: Any) -> str:
    """What the policy said last: a completion that is a text, or the content of its last turn."""
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message.get("role", "assistant") == "assistant"]
    content = said[-1].get("content") if said else ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    return content or ""


def _final_answer(text: str, right: str | Decimal) -> str | Decimal:
    marked = _marked(text)
    if marked is None and isinstance(right, Decimal):
        numbers = NUMBER.findall(text)
        marked = numbers[-1] if numbers else None
    elif marked is not None and isinstance(right, Decimal) and not isinstance(_plain(marked), Decimal):
        numbers = NUMBER.findall(marked)  # "42 apples"
        marked = numbers[0] if len(numbers) == 1 else marked
    return _plain(text if marked is None else marked)


def _marked(text: str) -> str | None:
    """What stands at the last of the first kind of mark that there is."""
    for mark in MARKS:
        found = mark.findall(text)
        if found:
            return found[-1]
    return None


def _plain(text: str) -> str | Decimal:
    """An answer in the form in which answers are compared."""
    text = text.strip().removesuffix(".").strip().strip("$").strip()
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return " ".join(text.casefold().split())
    return number if number.is_finite() else text.casefold()
