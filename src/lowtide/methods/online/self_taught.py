"""What methods share in which the policy teaches itself: told more than the student, it reads what that wrote.

The teacher is the policy as it arrived, as it is, or a moving average of it. It reads the same completions after
prompts of its own, so that both distributions of a token are of the same place in the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from lowtide.methods.online.rollouts import Prompts, RolloutOptions
from lowtide.methods.shared.options import Following, StoredReference
from lowtide.methods.shared.rows import Preparation, Prepared
from lowtide.objectives.outcome import Counts, Outcome
from lowtide.ops.logits.linear_logprobs import TokenStats
from lowtide.ops.logits.logit_rows import Support, Want
from lowtide.option import COUNT, POSITIVE, SHARE, option
from lowtide.ragged import WEIGHT

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
    def following(self) -> Following | None:
        if self.teacher_model_kind != "ema":
            return None
        return Following(self.teacher_update_rate, self.teacher_sync_steps, "teacher_model_kind='ema'")

    @property
    def is_live(self) -> bool:
        return self.teacher_model_kind == "live"

    @property
    def skipped(self) -> int:
        """Tokens at the start of a completion that nothing is learned of."""
        return 0

    def most_told(self, tokens: int) -> int:
        """Tokens at most of a teacher's prompt that has so many before anything is written."""
        return tokens

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


def check_template(name: str, template: str, *places: str, needs: Sequence[str]) -> None:
    """Refuses a template that can't be filled in, or that leaves out what it is to say.

    Args:
        name: the option.
        places: the names that may stand in braces.
        needs: those that have to.

    Raises:
        ValueError: naming what is missing, or too much.
    """
    words = " and ".join(f"{{{each}}}" for each in places)
    try:
        made = template.format(**{each: f"\0{each}" for each in places})
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{name}={template!r} can't be filled in ({error!r}): it takes {words}, and other braces are doubled"
        ) from error
    for each in needs:
        if f"\0{each}" not in made:
            raise ValueError(f"{name}={template!r} has no place {{{each}}}: put it in")


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
        support = Support(options.distillation_topk, options.distillation_add_tail)
    return TokenObjective(
        compared(options),
        Want(entropies=options.token_metrics, divergences=True),
        aux_coefficient,
        temperature=options.temperature,
        beta=options.distillation_alpha,
        support=support,
    )
