"""Distillation across tokenizers (GOLD, General Online Logit Distillation: Patiño et al., 2025; TRL's
`trl.experimental.gold`): the teacher may have a vocabulary of its own.

Without `use_uld_loss` it is `methods.taught.gkd`. With it, the teacher reads the same text in its own tokens
(`data.two_tokenizers`); spans of text whose ends both tokenizers have are compared (`ops.logits.across_vocabularies`).
The loss of a row is the mean over its spans, and that of a batch the mean over its rows. Names and the loss are TRL
1.16's. It deviates

- in `uld_token_merge_strategy`: "bayesian" is the default, which compares both models' predictions of the same text.
  TRL's default, "observed", is there too: it compares what is predicted one token further on, which of spans of several
  tokens are other places of the text;
- where a completion was cut off, whose last token counts here; with `uld_crossentropy_weight`, whose mean is over
  rows, of means over their tokens; in an accumulated batch, which is one batch here;
- in tokenizers: SentencePiece's are aligned by text too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowtide.methods.method import Method, TokenObjective
from lowtide.methods.shared.options import zeros
from lowtide.methods.shared.paper import Paper
from lowtide.methods.taught import gkd
from lowtide.methods.taught.gkd import GKDOptions, PromptedTexts
from lowtide.objectives.distillation import weighed
from lowtide.ops.logits.across_vocabularies import Across, Common
from lowtide.ops.logits.logit_rows import Want
from lowtide.option import COUNT, NOT_NEGATIVE, POSITIVE, Range, option


@dataclass(kw_only=True)
class GOLDOptions(GKDOptions):
    """The options of distillation across tokenizers, under TRL's names."""

    learning_rate: float = option(1e-7, "The initial learning rate.")
    top_p: float = option(
        0.95, "Draw among the fewest likeliest tokens with so much probability.", Range(above=0, most=1)
    )
    max_completion_length: int | None = option(None, "TRL's name of `max_new_tokens` here.", COUNT)
    divergence_temperature: float | None = option(
        None, "Divisor of both models' logits in the divergence. None: `temperature`, as in TRL.", POSITIVE
    )
    use_uld_loss: bool = option(
        False, "The teacher has a vocabulary of its own. False: it has the student's, and the loss is GKD's."
    )
    teacher_tokenizer_name_or_path: str | None = option(
        None, "The teacher's tokenizer, where it is not beside the teacher."
    )
    use_extended_uld: bool = option(
        True, "Align tokens by the text that they stand for. False pairs them by place, as the paper does."
    )
    uld_token_merge_strategy: str = option(
        "bayesian",
        "Whose distribution stands for a span of several tokens: the last's (bayesian), or the one after the first "
        "(observed, TRL's default).",
        choices=["bayesian", "observed"],
    )
    uld_use_hybrid_loss: bool = option(
        False, "Compare the tokens that both vocabularies have by the divergence, and only the others in falling order."
    )
    uld_hybrid_matched_weight: float | None = option(
        None, "Weight of the former. None: the share of the teacher's vocabulary that both have.", NOT_NEGATIVE
    )
    uld_hybrid_unmatched_weight: float | None = option(
        None, "Weight of the latter. None: the rest of that share.", NOT_NEGATIVE
    )
    uld_crossentropy_weight: float = option(
        0.0, "Weight of the negative log-likelihood of the completions beside.", NOT_NEGATIVE
    )
    uld_distillation_weight: float = option(1.0, "Weight of the distance from the teacher.", NOT_NEGATIVE)
    uld_student_temperature: float = option(1.0, "Divisor of the student's logits in the distance.", POSITIVE)
    uld_teacher_temperature: float = option(1.0, "Divisor of the teacher's logits in the distance.", POSITIVE)
    uld_skip_student_eos: bool = option(True, "Leave the student's end of a completion out of what is compared.")
    uld_skip_teacher_eos: bool = option(True, "Leave the teacher's end of a completion out of what is compared.")

    @property
    def own_tokens(self) -> bool:
        return self.use_uld_loss

    def without_gradient(self) -> list[set[str]]:
        """As `TrainingConfig.without_gradient`: the distance from the teacher, and the likelihood."""
        names = ("uld_distillation_weight", "uld_crossentropy_weight") if self.use_uld_loss else ()
        return [zeros(self, name) for name in names] or [set()]

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        if self.max_completion_length is not None:
            if self.max_new_tokens not in (128, self.max_completion_length):
                raise ValueError(
                    f"max_new_tokens={self.max_new_tokens} and its other name max_completion_length="
                    f"{self.max_completion_length} contradict each other: keep max_completion_length"
                )
            self.max_new_tokens, self.max_completion_length = self.max_completion_length, None
        super().check()
        matched, others = self.uld_hybrid_matched_weight, self.uld_hybrid_unmatched_weight
        if (matched is None) != (others is None):
            raise ValueError(
                f"uld_hybrid_matched_weight={matched} and uld_hybrid_unmatched_weight={others} are both numbers, or "
                "both None: set the other too"
            )
        if not self.use_uld_loss:
            self._check_without_effect()
            return
        remedy = "leave it out, or set use_uld_loss=False"
        if self.asked is not None:
            raise ValueError(f"{self.asked} is of a teacher with the student's tokens: {remedy}")
        if self.packing:
            raise ValueError(f"packing=True puts texts together, of which each is aligned by itself: {remedy}")
        if self.seq_kd:
            raise ValueError(f"seq_kd=True has the teacher write, whose tokens are not the student's: {remedy}")
        if self.assistant_only_loss:
            raise ValueError(f"assistant_only_loss=True has several completions a row, and one is aligned: {remedy}")
        if self.uld_crossentropy_weight and self.uld_student_temperature != 1:
            raise ValueError(
                f"uld_crossentropy_weight={self.uld_crossentropy_weight:g} takes the likelihood of the logits as they "
                f"are, and uld_student_temperature={self.uld_student_temperature:g} divides them: leave one of them out"
            )
        sharding: Any = getattr(self, "sharding", None)
        if getattr(self, "fsdp_split_vocabulary", False) or getattr(sharding, "same_rows", 1) > 1:
            raise ValueError(
                "use_uld_loss=True compares two vocabularies whole, on a rank that holds whole rows: leave "
                "fsdp_split_vocabulary, tp_size, sp_size, cp_size and pipeline_parallel_size out"
            )

    def _check_without_effect(self) -> None:
        defaults = {each: GOLDOptions.__dataclass_fields__[each].default for each in ULD}
        for name in ULD:
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} requires use_uld_loss=True: set that, or leave it out"
                )


ULD = (
    *("teacher_tokenizer_name_or_path", "use_extended_uld", "uld_token_merge_strategy", "uld_use_hybrid_loss"),
    *("uld_hybrid_matched_weight", "uld_hybrid_unmatched_weight", "uld_crossentropy_weight", "uld_distillation_weight"),
    *("uld_student_temperature", "uld_teacher_temperature", "uld_skip_student_eos", "uld_skip_teacher_eos"),
)
"""What is read with `use_uld_loss` alone."""


def objective(
    options: GOLDOptions, *, aux_coefficient: float = 0.0, common: tuple[Sequence[int], Sequence[int]] | None = None
) -> TokenObjective:
    """The distance from the teacher.

    Args:
        common: the tokens that both vocabularies have, by the numbers of each; None where they are not known, as in a
            plan.
    """
    if not options.use_uld_loss:
        found, own = gkd.objective(options, aux_coefficient=aux_coefficient), options.divergence_temperature
        return replace(found, temperature=options.temperature if own is None else own)
    weights = options.uld_hybrid_matched_weight, options.uld_hybrid_unmatched_weight
    alike = None
    if options.uld_use_hybrid_loss and common is not None:
        both = None if weights[0] is None or weights[1] is None else (weights[0], weights[1])
        ours, theirs = (torch.tensor(each, dtype=torch.long) for each in common)
        alike = Common(ours, theirs, options.beta, both)
    return TokenObjective(
        weighed(options.uld_distillation_weight),
        Want(divergences=True),
        aux_coefficient,
        temperature=options.uld_student_temperature,
        beta=options.beta,
        across=Across(alike, options.uld_teacher_temperature),
        mean_over_rows=True,
    )


PAPER = Paper(
    "patino2025unlocking",
    "Unlocking On-Policy Distillation for Any Model Family",
    (
        "Carlos Miguel Patiño",
        "Kashif Rasul",
        "Quentin Gallouédec",
        "Ben Burtenshaw",
        "Sergio Paniego",
        "Vaibhav Srivastav",
        "others",
    ),
    2025,
    elsewhere="https://huggingface.co/spaces/HuggingFaceH4/general-on-policy-logit-distillation",
)
METHOD = Method(
    "gold", "distillation across tokenizers", GOLDOptions, PromptedTexts(), objective, PAPER, arguments=gkd.ARGUMENTS
)
