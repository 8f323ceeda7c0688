"""What methods share in which the policy teaches itself: told more than the student, it reads what that wrote.

The teacher is the policy as it arrived, as it is, or a moving average of it. It reads the same completions after
prompts of its own, so that both distributions of a token are of the same place in the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.data.prompts import TEACHER_IDS, prepare_prompts
from lowtide.data.teacher_prompts import PRIVILEGED, TeacherPromptEncoder
from lowtide.methods.method import RowObjective, TokenObjective, score_weight
from lowtide.methods.online.distillation import Taught
from lowtide.methods.online.learning import Learned, Rewarded, Values
from lowtide.methods.online.policy import Sampled, read_sampled
from lowtide.methods.online.rollouts import Prompts
from lowtide.methods.shared.rows import Preparation, Prepared
from lowtide.methods.taught.self_teacher import SelfTeacherOptions
from lowtide.objectives.outcome import Counts, Outcome
from lowtide.ops.logits.linear_logprobs import TokenStats
from lowtide.ops.logits.logit_rows import Support, Want
from lowtide.ragged import WEIGHT


class SelfTaught(Taught):
    """The teacher says all that is learned of a completion, before the step. Completions count alike, whatever their
    length: the weight of a token is one over the tokens of its completion that are learned from."""

    def wants_old(self, options: SelfTeacherOptions, *, stale: bool) -> bool:
        return stale and options.distillation_is_clip is not None and not options.writes_as_teacher

    def learn(self, rewarded: Rewarded, options: SelfTeacherOptions) -> Learned:
        found = super().learn(rewarded, options)
        weights = [token_weights(length, options.skipped) for length in rewarded.lengths]
        return Learned(found.values, score_values={WEIGHT: torch.cat([torch.zeros(0), *weights])})

    def blank(self, completions: int, scores: int) -> tuple[Values, Values]:
        return {}, {WEIGHT: torch.full((scores,), completions / max(scores, 1))}


def token_weights(length: int, skipped: int) -> Float[Tensor, " length"]:
    """Of the tokens of a completion: 0 of those that are skipped, the others add up to 1."""
    return (torch.arange(length) >= skipped).float() / max(length - skipped, 1)


@dataclass(frozen=True)
class TaughtPrompts(Prompts):
    """A prompt, and what the teacher is told beside it, in the column `privileged_context`."""

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        rows, report = super().prepare(dataset, how, name)
        options, source = how.options, f"the {name} dataset"
        columns = list(rows.column_names or ())
        if columns and PRIVILEGED not in columns:
            raise ValueError(
                f"{source} has no column `{PRIVILEGED}`, of which the teacher's prompts are made, only "
                f"{', '.join(sorted(columns))}: add one with a text for each prompt, such as a demonstration"
            )
        encoder = TeacherPromptEncoder(
            how.tokenizer,
            options.max_prompt_length,
            options.chat_template_kwargs or {},
            source=source,
            template=options.teacher_prompt_template,
        )
        return prepare_prompts(rows, encoder, num_proc=options.dataset_num_proc, column=TEACHER_IDS), report


# -- the loss ----------------------------------------------------------------------------------------------------------


def corrected(losses: Tensor, logprobs: Tensor, old: Tensor | None, most: float | None) -> Float[Tensor, " scores"]:
    """Losses of tokens times how much likelier these are than when they were written, at most so much."""
    if old is None or most is None:
        return losses
    return losses * (logprobs.detach() - old).clamp(-20, 20).exp().clamp(max=most)


def compared(options: SelfTeacherOptions) -> Callable[[TokenStats], Float[Tensor, " scores"]]:
    """The loss of a token by its divergence from the teacher."""

    def loss(stats: TokenStats) -> Float[Tensor, " scores"]:
        assert stats.divergences is not None, "distributions are compared"
        return corrected(stats.divergences, stats.logprobs, stats.old, options.distillation_is_clip)

    return loss


def sampled_losses(sampled: Sampled, most: float | None) -> tuple[Float[Tensor, " scores"], Float[Tensor, " scores"]]:
    """(losses, what each counts). Their gradient is that of KL(student || teacher) by the tokens that the student drew:
    each is made less likely by how much likelier the student has it than the teacher.

    Args:
        most: what a token counts at most for being likelier by now than when it was written.
    """
    assert sampled.weight is not None, "completions count alike, whatever their length"
    losses = (sampled.logprobs - sampled.teacher).detach() * sampled.logprobs
    return corrected(losses, sampled.logprobs, sampled.old, most), sampled.weight


def sampled_objective(options: SelfTeacherOptions, aux_coefficient: float) -> RowObjective:
    """That of written tokens (see `sampled_losses`)."""

    def loss(sampled: Sampled, counts: Counts) -> Outcome:
        losses, weight = sampled_losses(sampled, options.distillation_is_clip)
        return Outcome((losses * weight).sum() / (counts["weight"] or 1.0))

    return RowObjective(
        read=read_sampled,
        loss=loss,
        counts=lambda batch: {"weight": float(score_weight(batch))},
        want=Want(entropies=options.token_metrics),
        aux_coefficient=aux_coefficient,
        temperature=options.temperature,
        needs_reference=True,
        mean_over="weight",
    )


def objective(options: SelfTeacherOptions, *, aux_coefficient: float = 0.0) -> TokenObjective | RowObjective:
    """The loss of the options: a mean over completions of means over their tokens."""
    if options.distillation_mode == "sampled_token":
        return sampled_objective(options, aux_coefficient)
    return compared_objective(options, aux_coefficient)


def compared_objective(options: SelfTeacherOptions, aux_coefficient: float) -> TokenObjective:
    """That of distributions."""
    support = None
    if options.distillation_mode == "topk_logits":
        assert options.distillation_topk is not None
        says = options.use_teacher_server  # a server would say its own likeliest
        support = Support(options.distillation_topk, options.distillation_add_tail, of_teacher=says)
    return TokenObjective(
        compared(options),
        Want(entropies=options.token_metrics, divergences=True),
        aux_coefficient,
        temperature=options.temperature,
        beta=options.distillation_alpha,
        support=support,
    )
