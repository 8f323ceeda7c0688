"""Process reward models (arXiv 2211.14275): whether each step of an answer is right, read at the step's last token.

Names, defaults and rows are those of the `PRMTrainer` that TRL had. What is learned is token classification at the ends
of steps; everything else is not scored.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from lowtide.data.stepwise import StepEncoder, prepare_steps
from lowtide.engine.heads.classes import TokenClasses
from lowtide.methods.method import Labels, Method, RowObjective
from lowtide.methods.shared.paper import Paper
from lowtide.methods.shared.rows import Preparation, Prepared, Tags
from lowtide.methods.token_classification import counts, loss, read_tags
from lowtide.option import COUNT, NOT_NEGATIVE, option

LABELS = ("LABEL_0", "LABEL_1")
"""Of a step that is wrong, and of one that is right."""


@dataclass(kw_only=True)
class PRMOptions:
    """The options of process reward models, under TRL's names and with its defaults."""

    learning_rate: float = option(1e-5, "The initial learning rate.")
    max_length: int | None = option(1024, "Most tokens of a row; its start is kept. None is no limit.", COUNT)
    max_prompt_length: int | None = option(512, "Most tokens of a prompt; its end is kept.", COUNT)
    max_completion_length: int | None = option(None, "Most tokens of all steps; their start is kept.", COUNT)
    step_separator: str = option("\n", "What ends each step; its last token is where the step is judged.")
    train_on_last_step_only: bool = option(False, "Learn of the last step of each row alone; evaluation takes all.")
    disable_dropout: bool = option(True, "Train without dropout.")
    dataset_num_proc: int | None = option(None, "Processes that prepare the dataset.", NOT_NEGATIVE)

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: likewise.
        """
        if not self.step_separator:
            raise ValueError("step_separator='' has no token where a step could be judged: set it, such as to '\\n'")


class Steps(Tags):
    """A prompt, the steps of an answer, and whether each is right; or tokens with labels."""

    def labels(self, dataset: Any, options: Any, *, said: str | None = None) -> tuple[str, ...]:
        return LABELS

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        options = how.options
        encoder = StepEncoder(
            how.tokenizer,
            options.step_separator,
            most=options.max_length,
            most_of_prompt=options.max_prompt_length,
            most_of_steps=options.max_completion_length,
            last_alone=options.train_on_last_step_only and name == "train",
            source=f"the {name} dataset",
        )
        rows = prepare_steps(dataset, encoder, num_proc=options.dataset_num_proc)
        return super().prepare(rows, how, name)


def objective(options: PRMOptions, *, aux_coefficient: float = 0.0, labels: Labels | None = None) -> RowObjective:
    """The cross-entropy of the judgements, over all steps of an optimizer step."""
    return RowObjective(
        read=read_tags,
        loss=functools.partial(loss, weights=None, smoothing=0.0),
        counts=functools.partial(counts, weights=None),
        aux_coefficient=aux_coefficient,
        mean_over="weights",
    )


PAPER = Paper(
    "uesato2022solving",
    "Solving Math Word Problems With Process- and Outcome-Based Feedback",
    ("Jonathan Uesato", "Nate Kushman", "Ramana Kumar", "Francis Song", "Noah Siegel", "others"),
    2022,
    "2211.14275",
)
METHOD = Method("prm", "process reward model", PRMOptions, Steps(), objective, PAPER, head=TokenClasses)
