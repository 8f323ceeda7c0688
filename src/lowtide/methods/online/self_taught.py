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

from lowtide.data.batches.values import OLD
from lowtide.data.prompts import TEACHER_IDS, prepare_prompts
from lowtide.data.teacher_prompts import PRIVILEGED, TeacherPromptEncoder, filled
from lowtide.engine.heads.head import Stats
from lowtide.methods.method import RowObjective, TokenObjective, score_weight
from lowtide.methods.online.distillation import Taught
from lowtide.methods.online.learning import Learned, Rewarded, Values
from lowtide.methods.online.rollouts import Prompts, RolloutOptions
from lowtide.methods.shared.options import StoredReference
from lowtide.methods.shared.rows import Preparation, Prepared
from lowtide.objectives.outcome import Counts, Outcome
from lowtide.ops.logits.linear_logprobs import TokenStats
from lowtide.ops.logits.logit_rows import Support, Want
from lowtide.option import COUNT, POSITIVE, SHARE, option
from lowtide.ragged import WEIGHT, RaggedBatch

MODES = ("sampled_token", "full_logits", "topk_logits")


@dataclass(kw_only=True)
class SelfTeacherOptions(RolloutOptions, StoredReference):
    """Of the methods whose policy teaches itself, under the names that TRL's have in common."""

    learning_rate: float = option(5e-5, "The initial learning rate.")
    disable_dropout: bool = option(True, "Train without dropout, so that student and teacher are comparable.")
    temperature: float = option(
        1.0, "Divisor of the logits: the student's in writing, and both models' in the loss.", POSITIVE
    )
    max_prompt_length: int | None = option(512, "Most tokens of a prompt; its end is kept.", COUNT)
    max_completion_length: int = option(256, "Most tokens of a completion.", COUNT)
    teacher_model_kind: str = option(
        "base",
        "Who teaches: the policy as it arrived (base), as it is (live), or a moving average of it (ema).",
        choices=["base", "live", "ema"],
    )
    teacher_update_rate: float = option(
        0.05, "How far the moving average moves towards the policy: 1 makes it the policy, and 0 leaves it.", SHARE
    )
    teacher_sync_steps: int = option(1, "Optimizer steps between two such moves.", COUNT)
    distillation_alpha: float = option(
        0.5,
        "Of the generalized Jensen-Shannon divergence: 0 is KL(teacher || student), 1 is KL(student || teacher).",
        SHARE,
    )
    distillation_mode: str = option(
        "topk_logits",
        "What is compared: whole distributions, those on the student's likeliest tokens, or the written token's "
        "log-probability.",
        choices=[*MODES],
    )
    distillation_topk: int | None = option(100, "How many tokens `topk_logits` compares.", COUNT)
    distillation_is_clip: float | None = option(
        2.0,
        "The most that a token counts for being likelier by now than when it was written, where weights changed since. "
        "None: each counts 1.",
        POSITIVE,
    )
    distillation_add_tail: bool = option(
        False, "`topk_logits` takes all other tokens as one more. False makes what is compared add up to 1."
    )

    @property
    def sync_ref_model(self) -> bool:
        """As of a reference that follows the policy; the teacher is one."""
        return self.teacher_model_kind == "ema"

    @property
    def follows(self) -> bool:
        return self.sync_ref_model

    @property
    def ref_model_mixup_alpha(self) -> float:
        return self.teacher_update_rate

    @property
    def ref_model_sync_steps(self) -> int:
        return self.teacher_sync_steps

    @property
    def skipped(self) -> int:
        """Tokens at the start of a completion that nothing is learned of."""
        return 0

    def check_self_teaching(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.check_rollouts()
        mode = self.distillation_mode
        if mode == "sampled_token" and self.distillation_alpha != 1:
            raise ValueError(
                f"distillation_mode='sampled_token' is of KL(student || teacher) alone, and distillation_alpha="
                f"{self.distillation_alpha:g}: set distillation_alpha=1, or another distillation_mode"
            )
        if mode == "topk_logits" and self.distillation_topk is None:
            raise ValueError("distillation_mode='topk_logits' requires distillation_topk: set it, such as to 100")
        sharding: Any = getattr(self, "sharding", None)
        split = getattr(self, "fsdp_split_vocabulary", False) or getattr(sharding, "tensor_parallel", 1) > 1
        if mode == "topk_logits" and split:
            raise ValueError(
                "distillation_mode='topk_logits' looks for the likeliest of all tokens, and the vocabulary is split "
                "over ranks: take distillation_mode='full_logits', or leave the vocabulary whole"
            )
        if self.follows and self.ref_model_storage != "same":
            raise ValueError(
                f"ref_model_storage={self.ref_model_storage!r} requires a frozen teacher, and "
                "teacher_model_kind='ema' moves it: leave one of them out"
            )


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


def check_template(template: str) -> None:
    """Refuses what no teacher's prompt can be made of.

    Raises:
        ValueError: naming what is missing, or too much.
    """
    marks = ("\0prompt", "\0context")
    try:
        made = filled(template, *marks)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"teacher_prompt_template={template!r} can't be filled in ({error!r}): its places are {{prompt}} and "
            "{privileged_context}, and other braces are doubled"
        ) from error
    if not all(mark in made for mark in marks):
        raise ValueError(
            f"teacher_prompt_template={template!r} needs both places, {{prompt}} and {{privileged_context}}"
        )


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


@dataclass(frozen=True)
class Sampled:
    """What is known of tokens that were written; log-probabilities in nats, at the temperature of sampling."""

    logprobs: Float[Tensor, " scores"]
    teacher: Float[Tensor, " scores"]
    weight: Float[Tensor, " scores"]
    old: Float[Tensor, " scores"]
    """Of the policy that wrote; the student's own where that did."""


def read_sampled(batch: RaggedBatch, stats: Stats, reference: Float[Tensor, " scores"] | None) -> Sampled:
    """The tokens of a batch whose rows are completions."""
    assert reference is not None, "a teacher is a reference"
    logprobs = stats["logprobs"]
    plain = logprobs.detach()
    weight = batch.score_values[WEIGHT].to(plain)
    return Sampled(logprobs, reference.to(plain), weight, batch.score_values.get(OLD, plain).to(plain))


def sampled_objective(options: SelfTeacherOptions, aux_coefficient: float) -> RowObjective:
    """The gradient of KL(student || teacher) by the tokens that the student drew: each is made less likely by how much
    likelier the student has it than the teacher."""

    def loss(sampled: Sampled, counts: Counts) -> Outcome:
        losses = (sampled.logprobs - sampled.teacher).detach() * sampled.logprobs
        losses = corrected(losses, sampled.logprobs, sampled.old, options.distillation_is_clip)
        return Outcome((losses * sampled.weight).sum() / (counts["weight"] or 1.0))

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
    mode = options.distillation_mode
    if mode == "sampled_token":
        return sampled_objective(options, aux_coefficient)
    support = None
    if mode == "topk_logits":
        assert options.distillation_topk is not None
        support = Support(options.distillation_topk, options.distillation_add_tail)
    return TokenObjective(
        compared(options),
        Want(entropies=options.token_metrics, divergences=True),
        aux_coefficient,
        temperature=options.temperature,
        beta=options.distillation_alpha,
        support=support,
    )
