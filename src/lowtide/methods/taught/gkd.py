"""Generalized knowledge distillation (arXiv 2306.13649): the student's distribution of each token is brought to a
teacher's, on completions of the dataset, of the student itself or of the teacher.

Names, defaults and the loss are TRL 1.16's. The teacher's hidden states stand beside the student's, and the divergence
is formed a chunk of tokens at a time: neither model's logits exist whole. It deviates in what it draws: who writes the
completions of a micro-batch follows from the seed and the micro-batch's place, so that a run that resumes draws the
same; and vocabularies may differ in rows that pad them, where TRL refuses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.images import ImageReader
from lowtide.data.batches.prompted import PromptedCollator, with_longest
from lowtide.methods.method import Method, TokenObjective
from lowtide.methods.online.rollouts import WritingOptions
from lowtide.methods.sft import TextOptions
from lowtide.methods.shared.asked_teacher import NamingTeacherOptions, unsaid
from lowtide.methods.shared.options import TurnOptions
from lowtide.methods.shared.paper import Paper
from lowtide.methods.shared.rows import Drawing, Preparation, Prepared, Texts
from lowtide.objectives.distillation import divergence
from lowtide.ops.logits.logit_rows import Want
from lowtide.option import COUNT, POSITIVE, SHARE, Group, option
from lowtide.score_rules import ScoreRule

WITH_PROMPTS = ("messages", "conversations", "prompt", "instruction", "labels", "completion_mask")
"""Columns of rows that have a prompt."""


@dataclass(kw_only=True)
class GKDOptions(TextOptions, TurnOptions, WritingOptions, NamingTeacherOptions):
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
    divergence_temperature: float = option(
        1.0, "Divisor of both models' logits in the divergence. TRL's is always 1.", POSITIVE
    )
    lmbda: float = option(
        0.5,
        "Probability with which the student writes the completions of a micro-batch; else they are the data's.",
        SHARE,
    )
    seq_kd: bool = option(False, "Where the student does not write, the teacher does, in place of the data.")
    teacher_logprobs: list[str] | str | None = option(
        None,
        "A folder of a teacher's log-probabilities of the data's completions, which `lowtide teacher-logprobs` wrote: "
        "no teacher is loaded. Several folders: each row's are those of the first that has it.",
        group=Group.REFERENCE,
    )
    max_new_tokens: int = option(128, "Most tokens of a completion that is written.", COUNT)
    temperature: float = option(0.9, "Divisor of the logits in writing; the divergence has its own.", POSITIVE)

    @property
    def writes(self) -> bool:
        """Whether completions are written at all."""
        return self.lmbda > 0 or self.seq_kd

    @property
    def most_written(self) -> int:
        return self.max_new_tokens

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
        self.check_turns()
        self.check_writing()
        self._check_teacher()
        if not self.writes:
            return
        remedy = "leave it out, or set lmbda=0 and seq_kd=False, which distils on the data's completions alone"
        if self.packing:
            raise ValueError(f"packing=True packs rows of the data, and completions are written anew: {remedy}")
        if self.completion_only_loss is False:
            raise ValueError(f"completion_only_loss=False scores prompts, which are not written anew: {remedy}")

    def _check_teacher(self) -> None:
        self.check_asked()
        folder, url = self.teacher_logprobs, self.teacher_model_server_url or self.teacher_model_server_urls
        if folder is not None and url is not None:
            raise ValueError(
                f"a server ({url!r}) and teacher_logprobs={folder!r} are two teachers: leave one of them out"
            )
        if self.teacher_names:
            raise ValueError(
                f"teacher_model_server_urls or teacher_model_names_or_paths names several teachers "
                f"({', '.join(self.teacher_names)}), which are told apart by a column of prompts: take "
                "on-policy distillation (DistillationConfig), or write the log-probabilities of each teacher's rows "
                "and name the folders (teacher_logprobs)"
            )
        if self.asked is not None and self.seq_kd and self.lmbda < 1:
            raise ValueError(
                f"seq_kd=True has the teacher write, and {self.asked} asks it for log-probabilities alone: load the "
                "teacher, or leave seq_kd out"
            )
        if folder is not None and not folder:
            raise ValueError(f"teacher_logprobs={folder!r} names no folder: name one, or leave it out")
        if folder is not None and self.writes:
            raise ValueError(
                f"teacher_logprobs={folder!r} is of the data's completions, and lmbda={self.lmbda:g} has the student "
                "write others: set lmbda=0"
            )


class PromptedTexts(Texts):
    """Texts, of which the first scored token begins what may be written anew."""

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        columns = dataset.column_names or ()
        if how.options.writes and how.formatting_func is None and columns and not {*columns} & {*WITH_PROMPTS}:
            raise ValueError(
                f"the {name} dataset has the columns {', '.join(columns)}, and no prompts to write after: give rows "
                "with `messages`, or with `prompt` and `completion`; or set lmbda=0 and seq_kd=False, which distils on "
                "the data's texts"
            )
        return super().prepare(dataset, how, name)

    def collator(
        self, options: Any, *, sharing: bool, score_rule: ScoreRule, reader: ImageReader | None = None
    ) -> Callable:
        most = options.most_written if options.writes else 0
        return PromptedCollator(score_rule, reader, sharing=sharing, most=most)

    def drawing(
        self,
        options: Any,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        reader: ImageReader | None = None,
    ) -> Drawing | None:
        """Completions as long as they get: what a step is rehearsed and planned on. The trainer has them written."""
        rule, says = None if reader is None else reader.position_rule, unsaid(options)
        writes = functools.partial(with_longest, most=options.most_written, rule=rule) if options.writes else None
        if writes is None or says is None:
            return says if writes is None else writes
        return lambda batch, epoch: says(writes(batch, epoch), epoch)


def objective(options: GKDOptions, *, aux_coefficient: float = 0.0) -> TokenObjective:
    """The divergence from the teacher, and what the metrics need to know of each token."""
    want = Want(entropies=options.token_metrics, top1=options.token_metrics, divergences=True)
    how = {"temperature": options.divergence_temperature, "beta": options.beta, "support": options.support}
    return TokenObjective(divergence, want, aux_coefficient, **how)


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
METHOD = Method(
    "gkd", "generalized knowledge distillation", GKDOptions, PromptedTexts(), objective, PAPER, arguments=ARGUMENTS
)
