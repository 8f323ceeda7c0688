"""How requests become turns of vLLM, and its answers completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowtide.ops.counter_random import stream_key
from lowtide.rollout.generators.generator import Completion, Finish, Reply, Request, Sampling

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


Write = Callable[[Sequence[Turn], Sampling], Sequence[WrittenTurn]]
"""Writes each turn."""


def write_all(
    write: Write, requests: Sequence[Request], sampling: Sampling, reply: Reply | None = None
) -> list[list[Completion]]:
    """The completions of each request, in their order; as long as `reply` returns tokens to some, these go on.

    Their `plain_logprobs` are unknown: what the policy is scored by is for the policy itself to say.
    """
    rows = [
        (request, number, Completion()) for request in range(len(requests)) for number in range(requests[request].count)
    ]
    pending, turn = rows, 0
    while pending:
        turns = [
            Turn(
                [*requests[request].prompt_ids, *completion.token_ids],
                stream_key(requests[request].seed, number, turn) & ((1 << 63) - 1),
                sampling.max_new_tokens - len(completion.token_ids),
            )
            for request, number, completion in pending
        ]
        for (_, _, completion), found in zip(pending, write(turns, sampling), strict=True):
            _append(completion, found.token_ids, found.logprobs, written=True)
            completion.finish = found.finish
        pending, turn = [row for row in pending if _goes_on(*row, sampling.max_new_tokens, reply)], turn + 1
    completions = iter(completion for _, _, completion in rows)
    return [[next(completions) for _ in range(request.count)] for request in requests]


def _append(completion: Completion, token_ids: list[int], logprobs: list[float], *, written: bool) -> None:
    completion.token_ids += token_ids
    completion.logprobs += logprobs
    completion.plain_logprobs += [UNKNOWN] * len(token_ids)
    completion.written += [written] * len(token_ids)


def _goes_on(request: int, number: int, completion: Completion, most: int, reply: Reply | None) -> bool:
    """Whether there is more to write, after what is returned to the completion."""
    left = most - len(completion.token_ids)
    if reply is None or completion.finish != "stop" or left == 0:
        return False
    found = reply(request, number, completion)
    if found is None:
        return False
    tokens = [int(token) for token in found][:left]
    _append(completion, tokens, [0.0] * len(tokens), written=False)
    completion.finish = "length"
    return len(tokens) < left


def check_length(requests: Sequence[Request], sampling: Sampling, longest: int | None, remedy: str) -> None:
    """Refuses what is longer than vLLM takes.

    Raises:
        ValueError: names the request.
    """
    for number, request in enumerate(requests):
        total = len(request.prompt_ids) + sampling.max_new_tokens
        if longest is not None and total > longest:
            raise ValueError(
                f"request {number} has a prompt of {len(request.prompt_ids):,} tokens, which with "
                f"{sampling.max_new_tokens:,} of a completion makes {total:,}: vLLM takes {longest:,}. Lower "
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


def of_json(asked: dict[str, Any]) -> tuple[list[Turn], Sampling]:
    """It again.

    Raises:
        ValueError: it is none.
    """
    try:
        given = dict(asked["sampling"])
        for name in ("stop_ids", "stop_strings", "never_ids"):
            given[name] = tuple(given[name])
        return [Turn(**turn) for turn in asked["turns"]], Sampling(**given)
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no request for completions: {error!r}") from error


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
