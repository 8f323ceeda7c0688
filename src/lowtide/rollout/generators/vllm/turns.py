"""How requests become turns of vLLM, and its answers completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowtide.ops.counter_random import stream_key
from lowtide.rollout.generators.generator import Completion, Finish, Reply, Request, Sampling
from lowtide.rollout.generators.rows import Row, write_turns

UNKNOWN = float("nan")


@dataclass(frozen=True)
class Turn:
    """What is to be written once."""

    token_ids: list[int]
    """All that stands before."""
    seed: int
    most: int
    """Tokens."""


@dataclass(frozen=True)
class WrittenTurn:
    """What was written."""

    token_ids: list[int]
    logprobs: list[float]
    """Under the distribution that was drawn from; NaN where vLLM gives none."""
    finish: Finish


Job = tuple[Sequence[Turn], Sampling, str | None]
"""Turns, how tokens are drawn, and the adapter by which they are written; None writes by the weights alone."""
Write = Callable[[Sequence[Turn], Sampling], Sequence[WrittenTurn]]
"""Writes each turn."""


def write_all(
    write: Write, requests: Sequence[Request], sampling: Sampling, reply: Reply | None = None
) -> list[list[Completion]]:
    """The completions of each request, in their order; as long as `reply` returns tokens to some, these go on.

    Their `plain_logprobs` are unknown: what the policy is scored by is for the policy itself to say.
    """

    def turns(rows: list[Row], turn: int) -> None:
        asked = [
            Turn(
                [*row.prompt, *row.completion.token_ids],
                stream_key(requests[row.request].seed, row.number, turn) & ((1 << 63) - 1),
                row.left,
            )
            for row in rows
        ]
        for row, found in zip(rows, write(asked, sampling), strict=True):
            unknown = [UNKNOWN] * len(found.token_ids)
            row.completion.append(found.token_ids, found.logprobs, unknown, written=True)
            row.completion.finish = found.finish

    return write_turns(turns, requests, sampling, reply)


def check_length(requests: Sequence[Request], sampling: Sampling, longest: int | None, remedy: str) -> None:
    """Refuses what is longer than vLLM takes.

    Raises:
        ValueError: names the request.
    """
    for number, request in enumerate(requests):
        total = len(request.prompt_ids) + request.room(sampling)
        if longest is not None and total > longest:
            raise ValueError(
                f"request {number} has a prompt of {len(request.prompt_ids):,} tokens, which with "
                f"{request.room(sampling):,} of a completion makes {total:,}: vLLM takes {longest:,}. Lower "
                f"max_prompt_length or max_completion_length, or {remedy}"
            )


def check_answer(turns: Sequence[Turn], found: Sequence[WrittenTurn], vocabulary: int, whose: str) -> None:
    """Refuses an answer that does not fit what was asked.

    Raises:
        ValueError: says how.
    """
    if len(found) != len(turns):
        raise ValueError(f"{whose} returned {len(found)} completions for {len(turns)} prompts: one for each")
    for number, (turn, each) in enumerate(zip(turns, found, strict=True)):
        ids = each.token_ids
        if len(ids) != len(each.logprobs):
            raise ValueError(f"{whose}: completion {number} has {len(ids)} tokens and {len(each.logprobs)} logprobs")
        if not 0 < len(ids) <= turn.most:
            raise ValueError(
                f"{whose}: completion {number} has {len(ids)} tokens, where 1 to {turn.most} were asked for"
            )
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError(f"{whose}: completion {number} has a token outside of the vocabulary of {vocabulary:,}")


# -- as JSON -----------------------------------------------------------------------------------------------------


def to_json(turns: Sequence[Turn], sampling: Sampling) -> dict[str, Any]:
    """What a server is asked."""
    return {"turns": [asdict(turn) for turn in turns], "sampling": asdict(sampling)}


MOST_TURNS = 100_000
"""Completions that a server is asked for at a time."""
_MOST_WHOLE = 1 << 31
_WHOLE = ("max_new_tokens", "top_k")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_LISTS = {"stop_ids": int, "stop_strings": str, "never_ids": int}


def of_json(asked: Any, longest: int | None, vocabulary: int | None) -> tuple[list[Turn], Sampling]:
    """It again, checked before anything is made of it.

    Args:
        longest: the most tokens of a prompt with its completion.
        vocabulary: the number of tokens that there are, if it is known.

    Raises:
        ValueError: it is none, or asks for what the model does not write.
    """
    try:
        sampling = _sampling(asked["sampling"])
        turns = asked["turns"]
        _check(isinstance(turns, list), "`turns` has to be a list")
        _check(len(turns) <= MOST_TURNS, f"{len(turns):,} turns, where {MOST_TURNS:,} are taken at a time")
        for number, turn in enumerate(turns):
            _check_turn(turn, f"turn {number}", longest, vocabulary)
        return [Turn(**turn) for turn in turns], sampling
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no request for completions: {error!r}") from error


def _sampling(given: dict[str, Any]) -> Sampling:
    _check(isinstance(given, dict), "`sampling` has to be an object")
    for name in _WHOLE:
        holds = name not in given or (_is(given[name], int) and 0 <= given[name] < _MOST_WHOLE)
        _check(holds, f"`{name}` of the sampling has to be a whole number from 0, below 2^31")
    for name in _NUMBERS:
        _check(name not in given or _is(given[name], int, float), f"`{name}` of the sampling has to be a number")
    lists = {}
    for name, kind in _LISTS.items():
        each = given[name]
        _check(
            isinstance(each, list) and all(_is(one, kind) for one in each),
            f"`{name}` has to be a list of {kind.__name__}",
        )
        _check(kind is str or all(0 <= one < _MOST_WHOLE for one in each), f"`{name}` has to hold numbers of tokens")
        lists[name] = tuple(each)
    others = given.get("others", {})
    _check(isinstance(others, dict) and not others, "`others` of the sampling has to be empty, as vLLM reads none")
    _check(isinstance(given.get("unconstrained", False), bool), "`unconstrained` has to be true or false")
    return Sampling(**{**given, **lists})


def _check_turn(turn: Any, which: str, longest: int | None, vocabulary: int | None) -> None:
    _check(isinstance(turn, dict), f"{which} has to be an object")
    token_ids, most, seed = turn["token_ids"], turn["most"], turn["seed"]
    _check(isinstance(token_ids, list) and bool(token_ids), f"`token_ids` of {which} has to be a list of tokens")
    _check(all(_is(each, int) for each in token_ids), f"`token_ids` of {which} has to hold whole numbers")
    _check(
        0 <= min(token_ids) <= max(token_ids) < (vocabulary or _MOST_WHOLE),
        f"`token_ids` of {which} holds a token outside of the vocabulary of {vocabulary or _MOST_WHOLE:,}",
    )
    _check(_is(most, int) and 1 <= most < _MOST_WHOLE, f"`most` of {which} has to be a whole number from 1, below 2^31")
    _check(
        longest is None or len(token_ids) + most <= longest,
        f"{which} has {len(token_ids):,} tokens and asks for {most:,} more, where the model takes {longest:,} together",
    )
    _check(_is(seed, int) and 0 <= seed < 1 << 63, f"`seed` of {which} has to be a whole number from 0 to 2^63 - 1")


def _is(value: Any, *kinds: type) -> bool:
    """Whether a value is of one of these kinds; a boolean is no number."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"this is no request for completions: {what}")


def answer_of_json(found: Any) -> list[WrittenTurn]:
    """What a server answered.

    Raises:
        ValueError: it is none.
    """
    try:
        return [
            WrittenTurn(
                [int(token) for token in each["token_ids"]],
                [UNKNOWN if number is None else float(number) for number in each["logprobs"]],
                "stop" if each["finish"] == "stop" else "length",
            )
            for each in found
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"what was answered is no list of completions: {error!r}") from error
