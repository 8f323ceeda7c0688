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
    completion_of_scores,
    completion_sums,
    in_completion,
    of_scores,
    place_in_completion,
    row_sums,
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
    logprobs = stats["logprobs"]
    counted = in_completion(batch, logprobs)
    scored = completion_sums(counted, batch)
    use = counted
    if ld_alpha is not None:
        shorter = scored.amin(1, keepdim=True).expand_as(scored)
        beyond = place_in_completion(counted, batch) >= of_scores(shorter, batch)
        use = torch.where(beyond, ld_alpha * counted, counted)
    policy = completion_sums(logprobs * use, batch)
    referred = torch.zeros_like(policy) if reference is None else completion_sums(reference * use, batch)
    places, unlearned = completion_of_scores(batch), _unlearned(batch.completions)
    learned = (places < unlearned.start) | (places >= unlearned.stop)
    top1 = completion_sums(stats["top1"] * counted, batch)[:, 0] if "top1" in stats else None
    weights = None
    if weighted:
        aligned = completion_sums((logprobs.detach() - stats["collisions"]) * counted, batch) / scored.clamp(min=1)
        weights = torch.exp(aligned[:, 0] + aligned[:, 1])
    lengths = batch.row_values[LENGTHS].to(policy.dtype)
    return ReadPairs(
        chosen=policy[:, 0],
        rejected=policy[:, 1],
        ref_chosen=referred[:, 0],
        ref_rejected=referred[:, 1],
        chosen_tokens=lengths[:, 0],
        rejected_tokens=lengths[:, 1],
        chosen_scored=scored[:, 0],
        rejected_scored=scored[:, 1],
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
    unlearned = _unlearned(batch.completions)
    scores = sum(part.score_stop - part.score_start for part in batch.segments if part.completion in unlearned)
    return {"pairs": batch.rows, "nll_tokens": batch.scores - scores}


def _unlearned(sides: int) -> range:
    """Which completions of a row have no part in its negative log-likelihood."""
    return range(1, 2) if sides == 2 else range(2)


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
