"""On-policy distillation (arXiv 2306.13649): the student writes, and its distribution of each token that it wrote is
brought to a teacher's.

Names, defaults and the loss are those of TRL 1.16's `DistillationTrainer`. What is written, and by whom, is what the
other methods whose policy writes have: windows, tools, several turns, vLLM; nothing is rewarded. The divergence is
formed as in `methods.taught.gkd`, a chunk of tokens at a time, and neither model's logits exist whole. It deviates
where vocabularies differ in rows that pad them, which TRL refuses: both distributions are over the rows that both have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset

from lowtide.methods.method import Method, TokenObjective
from lowtide.methods.online.learning import Learned, Learning, Rewarded, Values
from lowtide.methods.online.rollouts import Prompts, RolloutOptions
from lowtide.methods.shared.asked_teacher import NamingTeacherOptions, ServedTeacherOptions
from lowtide.methods.shared.options import VisionOptions
from lowtide.methods.shared.rows import Preparation, Prepared
from lowtide.methods.taught.gkd import PAPER
from lowtide.objectives.distillation import divergence
from lowtide.ops.logits.logit_rows import Want
from lowtide.option import COUNT, POSITIVE, SHARE, option


@dataclass(kw_only=True)
class DistillationOptions(RolloutOptions, VisionOptions, NamingTeacherOptions):
    """The options of on-policy distillation, under TRL's names and with its defaults."""

    num_generations: int = option(1, "Completions of a prompt. TRL's is always 1.", COUNT)
    temperature: float = option(
        1.0, "Divisor of the logits: the student's in writing, and both models' in the divergence.", POSITIVE
    )
    beta: float = option(
        1.0,
        "Of the generalized Jensen-Shannon divergence: 0 is KL(teacher || student), 1 is KL(student || teacher).",
        SHARE,
    )

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.check_rollouts()
        self.check_asked()


class Taught(Learning):
    """The teacher says all that is learned of a completion, in the step itself."""

    def wants_old(self, options: Any, *, stale: bool) -> bool:
        return False

    def learn(self, rewarded: Rewarded, options: Any) -> Learned:
        numbers = options.teacher_numbers(rewarded.rows) if isinstance(options, ServedTeacherOptions) else {}
        return Learned(torch.zeros(len(rewarded.group.rewards)), row_values=numbers)

    def blank(self, completions: int, scores: int) -> tuple[Values, Values]:
        return {}, {}


@dataclass(frozen=True)
class TaughtRows(Prompts):
    """Prompts, of which a column may name the teacher."""

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        options, columns = how.options, list(dataset.column_names or ())
        if options.teacher_names and columns:
            if options.teacher_column not in columns:
                raise ValueError(
                    f"the {name} dataset has no column `{options.teacher_column}`, which is to name the teacher of a "
                    f"row ({', '.join(options.teacher_names)}), only {', '.join(sorted(columns))}: add it, or set "
                    "teacher_column"
                )
            if isinstance(dataset, Dataset):
                named = dataset.unique(options.teacher_column)
                options.teacher_numbers([{options.teacher_column: each} for each in named])
        return super().prepare(dataset, how, name)


def objective(options: DistillationOptions, *, aux_coefficient: float = 0.0) -> TokenObjective:
    """The divergence from the teacher, over all tokens of a step."""
    want = Want(entropies=options.token_metrics, divergences=True)
    how = {"temperature": options.temperature, "beta": options.beta, "support": options.support}
    return TokenObjective(divergence, want, aux_coefficient, **how)


ARGUMENTS = (
    *("model", "teacher_model", "args", "train_dataset", "eval_dataset", "processing_class", "callbacks", "optimizers"),
    *("quantization_config", "peft_config", "tools", "rollout_func", "environment_factory"),
    "optimizer_cls_and_kwargs",
)
ROWS = TaughtRows(Taught(), with_images=True)
METHOD = Method(
    "distillation", "on-policy distillation", DistillationOptions, ROWS, objective, PAPER, arguments=ARGUMENTS
)
