"""Generalized knowledge distillation (arXiv 2306.13649): the student's distribution of each token is brought to a
teacher's, on completions of the dataset, of the student itself or of the teacher.

Names, defaults and the loss are TRL 1.16's. The teacher's hidden states stand beside the student's, and the divergence
is formed a chunk of tokens at a time: neither model's logits exist whole. Vocabularies may differ in rows that pad
them, where TRL refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.methods.method import Method, TokenObjective
from lowtide.methods.options import TeacherOptions
from lowtide.methods.paper import Paper
from lowtide.methods.rows import Texts
from lowtide.methods.sft import TextOptions
from lowtide.objectives.distillation import divergence
from lowtide.ops.linear_logprobs import Want
from lowtide.option import POSITIVE, SHARE, option


@dataclass(kw_only=True)
class GKDOptions(TextOptions, TeacherOptions):
    """The options of generalized knowledge distillation, under TRL's names and with its defaults."""

    truncation_mode: str = option(
        "keep_end", "Which end of a row `max_length` keeps.", choices=["keep_start", "keep_end"]
    )
    disable_dropout: bool = option(True, "Train without dropout, so that student and teacher are comparable.")
    beta: float = option(
        0.5,
        "Of the generalized Jensen-Shannon divergence: 0 is KL(teacher || student), 1 is KL(student || teacher).",
        SHARE,
    )
    lmbda: float = option(
        0.5, "Share of the batches whose completions the student writes (0: the dataset's alone).", SHARE
    )
    divergence_temperature: float = option(
        1.0, "Divisor of both models' logits in the divergence. TRL's is always 1.", POSITIVE
    )

    @property
    def last_turn_only(self) -> bool:
        """The completion of a conversation is its last message, as in TRL, unless all of the assistant's are scored."""
        return not self.assistant_only_loss

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.check_texts()


def objective(options: GKDOptions, *, aux_coefficient: float = 0.0) -> TokenObjective:
    """The divergence from the teacher, and what the metrics need to know of each token."""
    want = Want(entropies=options.token_metrics, top1=options.token_metrics, divergences=True)
    return TokenObjective(
        divergence, want, aux_coefficient, temperature=options.divergence_temperature, beta=options.beta
    )


ARGUMENTS = (
    *("model", "teacher_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    *("compute_metrics", "callbacks", "optimizers", "peft_config", "formatting_func", "quantization_config"),
    "optimizer_cls_and_kwargs",
)
PAPER = Paper(
    "agarwal2024policy",
    "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
    (
        "Rishabh Agarwal",
        "Nino Vieillard",
        "Yongchao Zhou",
        "Piotr Stanczyk",
        "Sabela Ramos",
        "Matthieu Geist",
        "others",
    ),
    2024,
    "2306.13649",
)
METHOD = Method("gkd", "generalized knowledge distillation", GKDOptions, Texts(), objective, PAPER, arguments=ARGUMENTS)
