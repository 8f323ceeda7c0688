"""Importance-weighted on-policy distillation (arXiv 2606.22600): the student writes, and each token that it wrote is
made likelier by how much likelier the teacher has it, the first tokens of a completion above the last ones.

Names, defaults and the loss are those of TRL 1.16's experimental `IWOPDTrainer` with `distillation_objective="iw_opd"`;
its other objective is on-policy distillation. The teacher says one number a token, its log-probability, so that no
distribution is compared. It deviates where vLLM writes: what a token is compared with is the log-probability of the
policy that wrote it, in TRL what vLLM says of that.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.methods.method import Method, RowObjective
from lowtide.methods.online.distillation import ARGUMENTS, Taught, TaughtRows
from lowtide.methods.online.policy import Sampled, completion_counts, read_sampled
from lowtide.methods.online.rollouts import RolloutOptions
from lowtide.methods.shared.asked_teacher import ServedTeacherOptions
from lowtide.methods.shared.paper import Paper
from lowtide.objectives.outcome import Counts, Outcome, mean_of
from lowtide.ops.float64 import to_float64
from lowtide.ops.logits.logit_rows import Want
from lowtide.option import COUNT, NOT_NEGATIVE, POSITIVE, Range, option


@dataclass(kw_only=True)
class IWOPDOptions(RolloutOptions, ServedTeacherOptions):
    """The options of importance-weighted on-policy distillation, under TRL's names and with its defaults."""

    disable_dropout: bool = option(True, "Train without dropout, so that student and teacher are comparable.")
    num_generations: int = option(1, "Completions of a prompt.", COUNT)
    temperature: float = option(
        1.0, "Divisor of the logits: the student's in writing, and both models' in the loss.", POSITIVE
    )
    top_p: float = option(
        0.95, "Draw among the fewest likeliest tokens with so much probability.", Range(above=0, most=1)
    )
    use_teacher_server: bool = option(False, "TRL's name: the teacher is behind `teacher_model_server_url`.")
    vllm_server_port: int = option(8001, "Of the server.", COUNT)
    distillation_objective: str = option(
        "iw_opd", "The loss; TRL's other one, jsd, is that of on-policy distillation.", choices=["iw_opd"]
    )
    iw_opd_gamma: float = option(0.5, "How much more the first token of a completion counts than 1.", NOT_NEGATIVE)
    iw_opd_epsilon: float = option(
        1e-8, "The least that the differences of a completion, in nats, are divided by.", POSITIVE
    )

    @property
    def scores_reference(self) -> bool:
        return not self.teacher_names  # of several each is asked in the step, by the rows there

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.check_rollouts()
        self.check_asked()
        if self.use_teacher_server != (self.asked is not None):
            raise ValueError(
                f"use_teacher_server={self.use_teacher_server} and {self.asked or 'teacher_model_server_url=None'} "
                "contradict each other: set both, or neither"
            )


class Corrected(Taught):
    """The teacher says how likely it has each token that was written."""

    def wants_old(self, options: IWOPDOptions, *, stale: bool) -> bool:
        return stale


def position_weights(
    ahead: Float[Tensor, " scores"], completion: Int[Tensor, " scores"], *, gamma: float, epsilon: float
) -> Float[Tensor, " scores"]:
    """1 + gamma (1 - d_before / d), with d the absolute differences of a completion added up, and d_before those of the
    tokens before: 1 + gamma at its first token, and 1 behind its last (arXiv 2606.22600)."""
    if not len(ahead):
        return ahead
    apart = to_float64(ahead.abs())
    before, begins = apart.cumsum(0) - apart, torch.ones_like(completion, dtype=torch.bool)
    begins[1:] = completion[1:] != completion[:-1]
    number = begins.cumsum(0) - 1  # below the number of tokens, so that the device is not asked how many there are
    at_begin = apart.new_zeros(len(apart)).index_add(0, number, before * begins)
    total = apart.new_zeros(len(apart)).index_add(0, number, apart).clamp(min=epsilon)
    share = (before - at_begin[number]) / total[number]
    return (1 + gamma * (1 - share)).to(ahead.dtype)


def loss(sampled: Sampled, counts: Counts, *, options: IWOPDOptions) -> Outcome:
    """Minus the log-probability of each token times its weighted difference, over the tokens of the step."""
    written_by = sampled.logprobs.detach() if sampled.old is None else sampled.old
    ahead = sampled.teacher - written_by
    weights = position_weights(ahead, sampled.completion, gamma=options.iw_opd_gamma, epsilon=options.iw_opd_epsilon)
    total = -(sampled.logprobs * weights * ahead).sum() / max(counts["scores"], 1)
    means = {
        "iw_opd/mean_advantage": mean_of(weights * ahead),
        "iw_opd/mean_abs_advantage": mean_of(ahead.abs()),
        "iw_opd/mean_weight": mean_of(weights),
    }
    if not len(weights):
        return Outcome(total, means)
    return Outcome(total, means, {"iw_opd/min_weight": weights.min()}, {"iw_opd/max_weight": weights.max()})


def objective(options: IWOPDOptions, *, aux_coefficient: float = 0.0) -> RowObjective:
    """The loss of the options over completions."""
    return RowObjective(
        read=read_sampled,
        loss=functools.partial(loss, options=options),
        counts=completion_counts,
        want=Want(entropies=options.token_metrics),
        aux_coefficient=aux_coefficient,
        temperature=options.temperature,
        needs_reference=True,
        mean_over="scores",
    )


PAPER = Paper(
    "xie2026position",
    "On the Position Bias of On-Policy Distillation",
    ("Yan Xie", "Sijie Zhu", "Tiansheng Wen", "Bo Chen", "Yifei Wang"),
    2026,
    "2606.22600",
)
METHOD = Method(
    "iw-opd",
    "importance-weighted on-policy distillation",
    IWOPDOptions,
    TaughtRows(Corrected()),
    objective,
    PAPER,
    arguments=ARGUMENTS,
)
