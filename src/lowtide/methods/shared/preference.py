"""What the methods over pairs share: how a batch is read into pairs, their objective, and the metrics that they log."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.data.batches.values import LENGTHS
from lowtide.engine.heads.head import Stats
from lowtide.methods.method import RowObjective
from lowtide.methods.shared.completions import (
    completion_segments,
    in_completion,
    place_in_segment,
    row_sums,
    segment_sums,
)
from lowtide.methods.shared.options import CompletionOptions
from lowtide.objectives.outcome import Counts, Mean, Outcome, mean_of
from lowtide.objectives.preference import Pairs
from lowtide.objectives.reference_free import ContrastLoss
from lowtide.ops.logits.logit_rows import Want
from lowtide.ragged import RaggedBatch


@dataclass(frozen=True)
class ReadPairs(Pairs):
    """Pairs, and what else losses and metrics know of them; [pairs], or None where it was not asked for."""

    chosen_scored: Float[Tensor, " pairs"]
    """Scored tokens of the chosen completion: all, but for the first where there is no prompt."""
    rejected_scored: Float[Tensor, " pairs"]
    nll: Float[Tensor, " pairs"]
    """Negative log-likelihood of the completions beside the chosen and the rejected one, of the chosen one where there
    are no others; of the prompt too where that is scored; and over how many tokens."""
    nll_tokens: Float[Tensor, " pairs"]
    top1: Float[Tensor, " pairs"] | None = None
    """Tokens of the chosen completion that no other token is likelier than."""
    weights: Float[Tensor, " pairs"] | None = None
    """WPO's weights, without gradient."""


def read_pairs(
    batch: RaggedBatch,
    stats: Stats,
    reference: Float[Tensor, " scores"] | None,
    *,
    ld_alpha: float | None = None,
    weighted: bool = False,
) -> ReadPairs:
    """Sums over the completions of each row.

    Args:
        reference: the reference's log-probabilities; zeros if None.
        ld_alpha: weight of a completion's tokens beyond the length of the other (LD-DPO, arXiv 2409.06411).
        weighted: also WPO's weights (arXiv 2406.11827, equation 2); wants `collisions`.
    """
    sides = completion_segments(batch, batch.row_values[LENGTHS].shape[1])
    chosen, rejected = sides[:2]
    logprobs = stats["logprobs"]
    counted = in_completion(batch, logprobs)
    scored = segment_sums(counted, batch)
    use = counted
    if ld_alpha is not None:
        shorter = torch.zeros_like(scored)
        shorter[chosen] = shorter[rejected] = torch.minimum(scored[chosen], scored[rejected])
        beyond = place_in_segment(counted, batch) >= shorter[batch.score_segment]
        use = torch.where(beyond, ld_alpha * counted, counted)
    policy = segment_sums(logprobs * use, batch)
    referred = torch.zeros_like(policy) if reference is None else segment_sums(reference * use, batch)
    rows = batch.row[batch.score_segment]
    unlearned = torch.stack([batch.score_segment == side[rows] for side in sides[_unlearned(len(sides))]])
    learned = ~unlearned.any(0)
    top1 = segment_sums(stats["top1"] * counted, batch)[chosen] if "top1" in stats else None
    weights = None
    if weighted:
        aligned = segment_sums((logprobs.detach() - stats["collisions"]) * counted, batch) / scored.clamp(min=1)
        weights = torch.exp(aligned[chosen] + aligned[rejected])
    lengths = batch.row_values[LENGTHS].to(policy.dtype)
    return ReadPairs(
        chosen=policy[chosen],
        rejected=policy[rejected],
        ref_chosen=referred[chosen],
        ref_rejected=referred[rejected],
        chosen_tokens=lengths[:, 0],
        rejected_tokens=lengths[:, 1],
        chosen_scored=scored[chosen],
        rejected_scored=scored[rejected],
        nll=row_sums(-logprobs * learned, batch),
        nll_tokens=row_sums(learned.to(policy.dtype), batch),
        top1=top1,
        weights=weights,
    )


def per_token(pairs: ReadPairs) -> ReadPairs:
    """The same with means over the scored tokens of each completion in place of sums."""
    return replace(pairs, chosen=pairs.chosen / pairs.chosen_scored, rejected=pairs.rejected / pairs.rejected_scored)


def contrasted(
    pairs: ReadPairs,
    counts: Counts,
    options: Any,
    variant: ContrastLoss,
    *,
    likelihood: float,
    reward: Callable[[Tensor], Tensor] = lambda logps: logps,
) -> Outcome:
    """The contrast of a loss without a reference, a mean over pairs, and `likelihood` times the negative
    log-likelihood, a mean over its tokens.

    Args:
        counts: of `pair_counts`.
        options: with `beta`, and what the variant reads.
        reward: of log-probabilities of completions.
    """
    pairs = per_token(pairs) if variant.per_token else pairs
    chosen, rejected = reward(pairs.chosen), reward(pairs.rejected)
    total = variant.fn(chosen - rejected, options).sum() / counts["pairs"]
    means = dict(pair_metrics(pairs, options.beta * chosen, options.beta * rejected))
    if likelihood:
        total = total + likelihood * pairs.nll.sum() / counts["nll_tokens"]
        means["nll_loss"] = Mean(pairs.nll.detach().sum(), pairs.nll_tokens.sum())
    return Outcome(total, means)


def pair_counts(batch: RaggedBatch) -> Counts:
    """The pairs of a batch, and the tokens that a negative log-likelihood is a mean over."""
    sides = batch.row_values[LENGTHS].shape[1]
    numbers = [number for row in batch.row_segments for number in row[-sides:][_unlearned(sides)]]
    scores = sum(batch.segments[number].score_stop - batch.segments[number].score_start for number in numbers)
    return {"pairs": batch.rows, "nll_tokens": batch.scores - scores}


def _unlearned(sides: int) -> slice:
    """Which completions of a row have no part in its negative log-likelihood."""
    return slice(1, 2) if sides == 2 else slice(0, 2)


def pair_objective(
    loss: Callable[..., Outcome],
    options: CompletionOptions,
    aux_coefficient: float,
    *,
    read: Callable[..., ReadPairs] = read_pairs,
    collisions: bool = False,
    **more: Any,
) -> RowObjective:
    """The objective of a loss over pairs.

    Args:
        loss: called with `ReadPairs`, the counts of `pair_counts` and `options`.
        read: `read_pairs`, or a form of it.
        collisions: `read` needs them.
        more: further fields of `RowObjective`.
    """
    return RowObjective(
        read=read,
        loss=functools.partial(loss, options=options),
        counts=pair_counts,
        want=Want(entropies=options.token_metrics, top1=options.token_metrics, collisions=collisions),
        aux_coefficient=aux_coefficient,
        **more,
    )


def pair_metrics(pairs: ReadPairs, chosen_reward: Tensor, rejected_reward: Tensor) -> Mapping[str, Mean]:
    """The metrics of pairs under TRL's names, from their rewards [pairs]."""
    chosen_reward, rejected_reward = chosen_reward.detach(), rejected_reward.detach()
    means = {
        "rewards/chosen": mean_of(chosen_reward),
        "rewards/rejected": mean_of(rejected_reward),
        "rewards/accuracies": mean_of((chosen_reward > rejected_reward).float()),
        "rewards/margins": mean_of(chosen_reward - rejected_reward),
        "logps/chosen": mean_of(pairs.chosen),
        "logps/rejected": mean_of(pairs.rejected),
    }
    if pairs.top1 is not None:
        means["mean_token_accuracy"] = Mean(pairs.top1.sum(), pairs.chosen_scored.sum())
    return means
