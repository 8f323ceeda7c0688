"""Self-distillation policy optimization (arXiv 2601.20802): completions are rewarded, and the policy learns of each the
distributions that it has after a prompt with one in it that succeeded, or with feedback.

Names, defaults and losses are those of TRL 1.16's experimental `SDPOTrainer`. It deviates where a step has several
micro-batches: `bnpo` and `dapo` divide by the tokens of the step, in TRL by those of each micro-batch. Adapters under
`teacher_model_kind="ema"` are as in self-distillation fine-tuning.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.engine.heads.head import Stats
from lowtide.methods.method import Method, RowObjective, TokenObjective
from lowtide.methods.online.clipped import ComparedOptions
from lowtide.methods.online.policy import Sampled, completion_counts, read_sampled, read_written
from lowtide.methods.online.reprompting import RepromptedRows, Reprompting, RepromptOptions
from lowtide.methods.online.self_taught import compared_objective, sampled_losses
from lowtide.methods.shared.paper import Paper
from lowtide.methods.taught.self_teacher import MODES
from lowtide.objectives.outcome import Counts, Mean, Outcome, mean_of
from lowtide.objectives.policy_gradient import Scale, Written, clipped, ratios, shares
from lowtide.ops.float64 import to_float64
from lowtide.ops.logits.linear_logprobs import TokenStats
from lowtide.ops.logits.logit_rows import Want
from lowtide.option import COUNT, NOT_NEGATIVE, SHARE, option
from lowtide.ragged import RaggedBatch

OF_POLICY = {"grpo": Scale.COMPLETION, "bnpo": Scale.STEP, "dapo": Scale.STEP, "dr_grpo": Scale.LONGEST}
"""By `loss_type`, what the policy's loss is divided by."""


@dataclass(kw_only=True)
class SDPOOptions(RepromptOptions, ComparedOptions):
    """The options of self-distillation policy optimization, under TRL's names and with its defaults."""

    distillation_alpha: float = option(
        1.0,
        "Of the generalized Jensen-Shannon divergence: 0 is KL(teacher || student), 1 is KL(student || teacher).",
        SHARE,
    )
    distillation_mode: str = option(
        "sampled_token",
        "What is compared: whole distributions, those on the student's likeliest tokens, or the written token's "
        "log-probability.",
        choices=[*MODES],
    )
    distillation_topk: int | None = option(None, "How many tokens `topk_logits` compares.", COUNT)
    teacher_model_kind: str = option(
        "ema",
        "Who teaches: the policy as it arrived (base), as it is (live), or a moving average of it (ema).",
        choices=["base", "live", "ema"],
    )
    # the policy's loss
    loss_type: str = option("dapo", "What the policy's loss is divided by.", choices=[*OF_POLICY])
    importance_sampling_level: str = option(
        "token", "Ratios of tokens, or of whole completions (GSPO).", choices=["token", "sequence"]
    )
    beta: float = option(0.0, "Not in SDPO, which has no reference beside the teacher.", NOT_NEGATIVE)

    @property
    def delta(self) -> None:
        """The largest ratio: none of its own."""
        return None

    @property
    def advice(self) -> list[str]:
        """What is unwise in these options."""
        alone = self.num_generations < 2 and self.dont_reprompt_on_self_success
        if not (self.compares and alone and not self.include_environment_feedback):
            return super().advice
        return [
            *super().advice,
            f"num_generations={self.num_generations} leaves no other completion to show the teacher, and "
            "include_environment_feedback=False no feedback: nothing is distilled",
        ]

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.check_scale()
        if self.beta:
            raise ValueError(
                f"beta={self.beta:g} has no effect in SDPO, nor in TRL: there is no reference beside the teacher. "
                "Leave it out, or take GRPO for a divergence from a reference"
            )
        self.check_self_teaching()
        self.check_reprompts()


# -- the losses --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Completed:
    """What is known of completions: for the policy's loss, and for the distillation."""

    written: Written
    sampled: Sampled | None
    """None where nothing is distilled."""


def read_completed(batch: RaggedBatch, stats: Stats, reference: Float[Tensor, " scores"] | None) -> Completed:
    """The tokens of a batch whose rows are completions."""
    sampled = None if reference is None else read_sampled(batch, stats, reference)
    return Completed(read_written(batch, stats, None), sampled)


def policy_loss(written: Written, counts: Counts, options: SDPOOptions) -> Float[Tensor, ""]:
    """The clipped surrogate, of tokens or of whole completions."""
    losses = clipped(written, ratios(written, options.importance_sampling_level), options)
    return (losses * shares(written, OF_POLICY[options.loss_type], counts, options.max_completion_length)).sum()


def loss(completed: Completed, counts: Counts, *, options: SDPOOptions) -> Outcome:
    """The policy's loss and the distillation's, at their weights."""
    share, total, means = options.distillation_weight, torch.zeros(()), {}
    if share < 1:
        policy = policy_loss(completed.written, counts, options)
        total = total.to(policy) + (1 - share) * policy
        of_rows = float(len(completed.written.lengths))
        means["self_distillation/policy_loss"] = Mean(to_float64(policy.detach()) * counts["completions"], of_rows)
    if completed.sampled is not None:
        losses, weight = sampled_losses(completed.sampled, options.distillation_is_clip)
        total = total.to(losses) + share * (losses * weight).sum() / counts["completions"]
        means["self_distillation/distillation_loss"] = mean_of(losses, weight > 0)
    return Outcome(total, means)


def objective(options: SDPOOptions, *, aux_coefficient: float = 0.0) -> TokenObjective | RowObjective:
    """The loss of the options: the policy's, and a mean over completions of means over their tokens."""
    distributions = options.compares and options.distillation_mode != "sampled_token"
    if distributions and options.distillation_weight == 1:
        return replace(compared_objective(options, aux_coefficient), mean_over_rows=True)
    return RowObjective(
        read=read_completed,
        loss=functools.partial(loss, options=options),
        counts=lambda batch: {**completion_counts(batch), "weight": batch.rows},
        want=Want(entropies=options.token_metrics),
        aux_coefficient=aux_coefficient,
        temperature=options.temperature,
        needs_reference=options.compares and not distributions,
        beside=distilled_beside(options) if distributions else None,
    )


def distilled_beside(options: SDPOOptions) -> TokenObjective:
    """The distillation of distributions beside the policy's loss, at its weight."""
    whole = compared_objective(options, aux_coefficient=0.0)

    def at_weight(stats: TokenStats) -> Float[Tensor, " scores"]:
        return options.distillation_weight * whole.loss(stats)

    return replace(whole, loss=at_weight, want=whole.want._replace(entropies=False), mean_over_rows=True)


ARGUMENTS = (
    *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    *("reward_processing_classes", "callbacks", "optimizers", "peft_config"),
    *("quantization_config", "optimizer_cls_and_kwargs"),
)
PAPER = Paper(
    "hubotter2026sdpo",
    "Reinforcement Learning via Self-Distillation",
    ("Jonas Hubotter", "Frederike Lubeck", "Lejs Behric", "Anton Baumann", "Marco Bagatella", "others"),
    2026,
    "2601.20802",
)
METHOD = Method(
    "sdpo",
    "self-distillation policy optimization",
    SDPOOptions,
    RepromptedRows(Reprompting()),
    objective,
    PAPER,
    arguments=ARGUMENTS,
)
