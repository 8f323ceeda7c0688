"""Reward functions of papers, under the names and with the numbers that they have in TRL 1.16.

Length penalties and the cosine schedule: DAPO (arXiv 2503.14476), and "Demystifying Long Chain-of-Thought Reasoning"
(arXiv 2502.03373). What compares mathematics needs the package math-verify.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

THINKS_FIRST = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)
PARSING_SECONDS, COMPARING_SECONDS = 10, 5


def think_format_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 where a completion begins with its only `<think>` and closes it, else 0; read is its first message."""
    return [float(THINKS_FIRST.match(_first_text(each)) is not None) for each in completions]


# -- mathematics -------------------------------------------------------------------------------------------------------


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], log_extra: Callable[..., None] | None = None, **_: Any
) -> list[float | None]:
    """1 where a completion's mathematical answer equals the `solution`, else 0; None where that is no mathematics.

    Raises:
        ImportError: math-verify is not installed.
    """
    pairs = zip([_first_text(each) for each in completions], solution, strict=True)
    return _log_mathematics([_compare(text, right) for text, right in pairs], solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: Callable[..., None] | None = None,
    **_: Any,
) -> list[float | None]:
    """As `accuracy_reward`, of what stands after the reasoning; 0 where a completion does not end its reasoning.

    Args:
        reasoning_delimiters: texts that end the reasoning, the first of them that occurs; `</think>` alone if None.

    Raises:
        ImportError: math-verify is not installed.
    """
    _math_verify()
    ends = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    found = []
    for each, right in zip(completions, solution, strict=True):
        text = _first_text(each)
        end = next((end for end in ends if end in text), None)
        unfinished = 0.0, "[incomplete reasoning]", "[incomplete reasoning]"
        found.append(unfinished if end is None else _compare(text.split(end)[-1], right))
    return _log_mathematics(found, solution, log_extra)


def _log_mathematics(
    found: list[tuple[float | None, str, str]], solution: Sequence[str], log_extra: Callable[..., None] | None
) -> list[float | None]:
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [right for _, right, _ in found])
        log_extra("answer_parsed", [answer for _, _, answer in found])
    return [reward for reward, _, _ in found]


def _compare(text: str, right: str) -> tuple[float | None, str, str]:
    """The reward of an answer, and how the right answer and the given one were read."""
    latex, verify = _math_verify()
    in_main = threading.current_thread() is threading.main_thread()  # its time limits are signals
    seconds = {"parsing_timeout": PARSING_SECONDS if in_main else None}
    if not in_main:
        for part in ("parser", "grader"):
            logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)
    wanted = verify.parse(right, **seconds)
    if not wanted:
        return None, "[unparseable]", "[skipped]"
    rules = verify.LatexExtractionConfig(
        normalization_config=latex.NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    answer = verify.parse(text, extraction_config=[rules], extraction_mode="first_match", **seconds)
    equal = verify.verify(wanted, answer, timeout_seconds=COMPARING_SECONDS if in_main else None)
    return float(equal), str(wanted), str(answer) if answer else "[unparseable]"


def _math_verify() -> tuple[Any, Any]:
    """The packages latex2sympy2_extended and math_verify."""
    if find_spec("math_verify") is None:
        raise ImportError(
            "this reward compares mathematics by the package math-verify, which is not installed: pip install "
            "math-verify"
        )
    import latex2sympy2_extended  # type: ignore[import-not-found]
    import math_verify  # type: ignore[import-not-found]

    return latex2sympy2_extended, math_verify


@dataclass(frozen=True)
class CosineScaledReward:
    """What `get_cosine_scaled_reward` gives."""

    max_len: int
    min_value_wrong: float = -1.0
    max_value_wrong: float = -0.5
    min_value_correct: float = 0.5
    max_value_correct: float = 1.0
    __name__ = "cosine_scaled_reward"

    def __call__(
        self, completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float | None]:
        right = accuracy_reward(completions, solution)
        return [self._scaled(each, len(ids)) for each, ids in zip(right, completion_ids, strict=True)]

    def _scaled(self, right: float | None, tokens: int) -> float | None:
        if right is None:
            return None
        short, long = self.max_value_correct, self.min_value_correct
        if not right:
            short, long = self.min_value_wrong, self.max_value_wrong
        share = (1 + math.cos(math.pi * min(tokens / self.max_len, 1))) / 2
        return long + (short - long) * share


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> CosineScaledReward:
    """A reward of `accuracy_reward` by length, along half a cosine up to `max_len` tokens (arXiv 2502.03373, C.1).

    A right completion goes from `max_value_correct` at no tokens to `min_value_correct`, a wrong one from
    `min_value_wrong` to `max_value_wrong`.
    """
    return CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)


# -- tokens ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RepetitionPenaltyReward:
    """What `get_repetition_penalty_reward` gives."""

    ngram_size: int = 3
    max_penalty: float = -1.0
    __name__ = "repetition_penalty_reward"

    def __post_init__(self) -> None:
        if self.max_penalty > 0:
            raise ValueError(f"max_penalty={self.max_penalty} must not be positive: it is the lowest reward")

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: Sequence[int]) -> float:
        ngrams = [tuple(ids[start : start + self.ngram_size]) for start in range(len(ids) - self.ngram_size + 1)]
        repeated = 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
        return repeated * self.max_penalty if repeated else 0.0


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RepetitionPenaltyReward:
    """`max_penalty` times the share of a completion's token n-grams that repeat earlier ones (arXiv 2502.03373, C.2).

    Raises:
        ValueError: `max_penalty` is positive.
    """
    return RepetitionPenaltyReward(ngram_size, max_penalty)


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """What `get_soft_overlong_punishment` gives."""

    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [self._punishment(len(ids)) for ids in completion_ids]

    def _punishment(self, tokens: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if tokens <= free:
            return 0.0
        if tokens > self.max_completion_len:
            return -1.0
        return (free - tokens) / self.soft_punish_cache


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> SoftOverlongPunishment:
    """0 up to `soft_punish_cache` tokens below `max_completion_len`, falling to -1 there (arXiv 2503.14476, eq. 13)."""
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)


def _first_text(completion: Any) -> str:
    """A completion that is a text, or the content of its first message, which is what TRL's rewards read."""
    return completion if isinstance(completion, str) else completion[0]["content"]
