"""Self-distillation fine-tuning (arXiv 2601.19897): the policy writes after a plain prompt, and its distribution of
each token is brought to its own after a prompt with a demonstration in it.

Names, defaults and the loss are those of TRL 1.16's experimental `SDFTTrainer`. It deviates for adapters under
`teacher_model_kind="ema"`, whose average starts from the adapters as they arrived, in TRL from zero; and a completion
that is skipped whole does not count among those that the loss is a mean over.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.data.teacher_prompts import check_template
from lowtide.methods.method import Method
from lowtide.methods.online.self_taught import SelfTaught, TaughtPrompts, objective
from lowtide.methods.shared.paper import Paper
from lowtide.methods.taught.self_teacher import SelfTeacherOptions
from lowtide.option import NOT_NEGATIVE, option


@dataclass(kw_only=True)
class SDFTOptions(SelfTeacherOptions):
    """The options of self-distillation fine-tuning, under TRL's names and with its defaults."""

    generate_from_teacher: bool = option(False, "Write completions after the teacher's prompts.")
    teacher_prompt_template: str = option(
        "{prompt}\n\n{privileged_context}", "The teacher's prompt, of the prompt and the column `privileged_context`."
    )
    num_loss_tokens_to_skip: int = option(
        0, "Tokens at the start of a completion that nothing is learned of.", NOT_NEGATIVE
    )

    @property
    def writes_as_teacher(self) -> bool:
        return self.generate_from_teacher

    @property
    def skipped(self) -> int:
        return self.num_loss_tokens_to_skip

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.check_self_teaching()
        places = ("prompt", "privileged_context")
        check_template("teacher_prompt_template", self.teacher_prompt_template, *places, needs=places)


ARGUMENTS = (
    *("model", "args", "train_dataset", "eval_dataset", "processing_class", "callbacks", "optimizers", "peft_config"),
    *("quantization_config", "optimizer_cls_and_kwargs"),
)
PAPER = Paper(
    "shenfeld2026selfdistillation",
    "Self-Distillation Enables Continual Learning",
    ("Idan Shenfeld", "Mehul Damani", "Jonas Hubotter", "Pulkit Agrawal"),
    2026,
    "2601.19897",
)
METHOD = Method(
    "sdft",
    "self-distillation fine-tuning",
    SDFTOptions,
    TaughtPrompts(SelfTaught()),
    objective,
    PAPER,
    arguments=ARGUMENTS,
)
