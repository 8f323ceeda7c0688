"""Which weights a server writes by, told by the log-probabilities of a few tokens that it writes.

A label says what a server was sent. That it computes by it is another matter: keys of older weights may be left in its
prefix cache, and a base may be another than the one that adapters were trained on. So it writes after two prompts, of
which the policy says how likely what was written is: after one that it never saw, and after one that is the same each
time and longer than a block of its cache, whose keys it takes from there where any are left.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

import torch
from torch import nn

from lowtide.engine.forward import embedding_weight
from lowtide.engine.reference import logprobs
from lowtide.engine.weights.quantized import is_quantized
from lowtide.ragged import RaggedBatch
from lowtide.ranks.world import objects_of_all_ranks
from lowtide.rollout.generators.generator import Sampling
from lowtide.rollout.generators.vllm.label import StaleWeights
from lowtide.rollout.generators.vllm.turns import Turn, WrittenTurn
from lowtide.score_rules import IGNORE

logger = logging.getLogger(__name__)

PROMPT = 160
"""Tokens; a block of vLLM's cache has 16 on a GPU, and 128 on a CPU."""
WRITTEN = 8
HOW = Sampling(WRITTEN, unconstrained=True)
FAR = {"float64": 0.01, "float32": 0.01}
"""Nats, as a mean over the written tokens, by what the coarser of the two computes in: above it the weights differ."""
FAR_IN_16_BITS = 0.25
"""Likewise; measured distances are in `docs/vllm.md`."""


def turns_of(vocabulary: int, longest: int | None, number: int) -> list[Turn]:
    """What a server is to write for a fingerprint, one that it never saw and one that it saw before.

    Args:
        vocabulary: tokens; those in its second quarter are taken, where tokenizers have no special ones.
        longest: tokens of a prompt with its completion.
        number: of the copy of the weights, which no two fingerprints of a run have in common.
    """
    count = min(PROMPT, (longest or PROMPT + WRITTEN) - WRITTEN)
    prompts = (random.Random(seed).choices(range(vocabulary // 4, vocabulary // 2), k=count) for seed in (number, 0))
    return [Turn(prompt, number, WRITTEN) for prompt in prompts]


def distances(
    model: nn.Module, turns: Sequence[Turn], written: Sequence[WrittenTurn], *, padding_free: bool
) -> list[float]:
    """Of each turn how far a server's log-probabilities are from a model's, in nats, as a mean over tokens; NaN where
    it gave none."""
    found = logprobs(
        model,
        RaggedBatch.from_segments(
            [[*turn.token_ids, *each.token_ids] for turn, each in zip(turns, written, strict=True)],
            [[*[IGNORE] * len(turn.token_ids), *each.token_ids] for turn, each in zip(turns, written, strict=True)],
        ).to(embedding_weight(model).device),
        padding_free=padding_free,
    )
    said = torch.tensor([number for each in written for number in each.logprobs], dtype=torch.float64)
    off = (found.double().cpu() - said).abs()
    return [part.mean().item() for part in off.split([len(each.token_ids) for each in written])]


def check_written(
    model: nn.Module,
    turns: Sequence[Turn],
    written: Sequence[WrittenTurn],
    *,
    most: float,
    padding_free: bool,
    what: str,
) -> None:
    """Compares what was written for a fingerprint with what the policy says of it.

    Args:
        most: nats that rounding makes at most (`far`).
        what: "NAME does not write by SUCH WEIGHTS", for the message.

    Raises:
        StaleWeights: other weights wrote it.
    """
    new, again = distances(model, turns, written, padding_free=padding_free)
    if not max(new, again) <= most:  # nor NaN
        raise StaleWeights(
            f"{what}: its log-probabilities are {new:.2g} nats away from the policy's after a prompt that is new to "
            f"it, and {again:.2g} after one that its prefix cache may hold, where rounding makes {most:g} at most"
        )


def is_due(count: int, every: int) -> bool:
    """Whether a copy of the weights is to be checked: the first of a run, which may have been resumed, and then one of
    so many; none of 0.

    Args:
        count: of the copies of a run, it among them.
    """
    return every > 0 and (count - 1) % every == 0


def check_or_bring_again(check: Callable[[], None], bring: Callable[[], None], done: str) -> None:
    """Checks which weights are written by, and once more after all of them were brought again where they are others.
    All ranks call it together, and bring them again where one of them found others.

    Args:
        check: raises `StaleWeights` where they are.
        bring: brings all weights anew.
        done: what is done to them again, for the log.

    Raises:
        StaleWeights: they still are.
    """
    wrong = _found_by_a_rank(check)
    if wrong:
        logger.warning(f"{wrong}. All weights are {done} again")
        bring()
        wrong = _found_by_a_rank(check)
    if wrong:
        raise StaleWeights(wrong)


def _found_by_a_rank(check: Callable[[], None]) -> str:
    """What the first rank says whose check finds other weights; empty where none does."""
    own = ""
    try:
        check()
    except StaleWeights as error:
        own = str(error)
    return next(filter(None, objects_of_all_ranks(own)), "")


def dtype_of(model: nn.Module) -> str:
    """That of a model's embedding."""
    return str(embedding_weight(model).dtype).removeprefix("torch.")


def is_rounded(model: nn.Module) -> bool:
    """Whether products of a model may be coarser than its dtype, since weights are quantized."""
    return any(is_quantized(weight) for weight in model.parameters())


def far(*dtypes: str | None) -> float:
    """The most that distances may be by rounding, where weights are the same."""
    return max(FAR.get(dtype or "", FAR_IN_16_BITS) for dtype in dtypes)
