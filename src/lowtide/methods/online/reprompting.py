"""A teacher that is the policy itself, prompted anew once completions are rewarded: it reads each of them after a
prompt with another one in it that succeeded, or with feedback (SDPO, arXiv 2601.20802).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch

from lowtide.data.prompts import TEACHER_IDS, prepare_prompts
from lowtide.data.teacher_prompts import PRIVILEGED, RepromptEncoder, Reprompts, check_template, feedback_of
from lowtide.methods.online.learning import ByAdvantage, GroupRewards, Learned, Rewarded, Values
from lowtide.methods.online.rollouts import Prompts, RewardedOptions
from lowtide.methods.online.self_taught import token_weights
from lowtide.methods.shared.rows import Preparation, Prepared
from lowtide.methods.taught.self_teacher import SelfTeacherOptions
from lowtide.objectives.advantages import deviation, weighted
from lowtide.option import COUNT, FINITE, NOT_NEGATIVE, SHARE, option
from lowtide.ragged import WEIGHT

logger = logging.getLogger(__name__)

OF = "self_distillation"
"""What metrics begin with."""
THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(kw_only=True)
class RepromptOptions(SelfTeacherOptions, RewardedOptions):
    """Of methods whose teacher is told what was rewarded, under TRL's names."""

    divergence_weight: ClassVar[str] = "distillation_weight"

    distillation_weight: float = option(
        1.0, "Share of the distillation in the loss; the rest is the policy's, by advantages as in GRPO.", SHARE
    )
    use_successful_as_teacher: bool = option(True, "Show the teacher a completion of the prompt that succeeded.")
    success_reward_threshold: float = option(1.0, "The least reward of a completion that succeeded.", FINITE)
    dont_reprompt_on_self_success: bool = option(True, "Never show the teacher the completion that it reads.")
    max_reprompt_len: int = option(10240, "Most tokens of a teacher's prompt; its end is kept.", COUNT)
    reprompt_template: str = option(
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n", "The teacher's prompt."
    )
    solution_template: str = option(
        "\nCorrect solution:\n\n{successful_previous_attempt}\n\n", "What it says of the completion that succeeded."
    )
    feedback_template: str = option(
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        "What it says of feedback.",
    )
    include_environment_feedback: bool = option(
        False, "Tell the teacher the feedback that rows have in the column `privileged_context`."
    )
    environment_feedback_only_without_solution: bool = option(
        False, "Tell it so only where no completion of the prompt succeeded."
    )
    remove_thinking_from_demonstration: bool = option(
        False, "Leave out what a completion that succeeded has between <think> and </think>."
    )

    diagnostics_warning_interval: int = option(
        10,
        "Windows in a row from which nothing is to be learned between two warnings of it, after the first. 0: none.",
        NOT_NEGATIVE,
    )
    diagnostics_flat_tolerance: float = option(
        1e-8,
        "Rewards that deviate by no more are alike in these warnings; likewise shares of completions.",
        NOT_NEGATIVE,
    )

    def most_told(self, tokens: int) -> int:
        shown = self.max_completion_length + len(self.solution_template) + len(self.reprompt_template)
        return min(tokens + shown * self.use_successful_as_teacher, self.max_reprompt_len)

    def check_reprompts(self) -> None:
        """Refuses templates that leave out what they are to say.

        Raises:
            ValueError: naming the option and what it lacks.
        """
        solution = ["solution"] * self.use_successful_as_teacher
        needs = ["prompt", *solution, *["feedback"] * self.include_environment_feedback]
        check_template("reprompt_template", self.reprompt_template, "prompt", "solution", "feedback", needs=needs)
        for name, place in (
            ("solution_template", "successful_previous_attempt"),
            ("feedback_template", "feedback_raw"),
        ):
            check_template(name, getattr(self, name), place, needs=[place])


@dataclass(frozen=True)
class RepromptedRows(Prompts):
    """A prompt, what the teacher reads where no completion of it succeeds, and what reward functions want."""

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        rows, report = super().prepare(dataset, how, name)
        if not how.options.compares:
            return rows, report
        source = f"the {name} dataset"
        if PRIVILEGED in (rows.column_names or ()) and not how.options.include_environment_feedback:
            logger.warning(
                f"{source} has the column `{PRIVILEGED}`, which the teacher is not told: "
                "include_environment_feedback=True has it told"
            )
        encoder = encoder_of(how.options, how.tokenizer, source)
        return prepare_prompts(rows, encoder, num_proc=how.options.dataset_num_proc, column=TEACHER_IDS), report


def encoder_of(options: RepromptOptions, tokenizer: Any, source: str) -> RepromptEncoder:
    """What makes the teacher's prompts under the options."""
    return RepromptEncoder(
        tokenizer,
        options.max_reprompt_len,
        cast(Any, options.chat_template_kwargs or {}),
        source=source,
        reprompts=Reprompts(options.reprompt_template, options.solution_template, options.feedback_template),
        gives_feedback=options.include_environment_feedback,
    )


@dataclass(frozen=True)
class Told:
    """What the teacher is told of a completion."""

    shown: int | None
    """The completion that it is shown, by its number among those of all ranks."""
    feedback: str | None


def spread_of(group: GroupRewards, reported: int | None, tolerance: float) -> dict[str, float]:
    """How much rewards deviate, and the share of prompts whose completions are rewarded alike."""
    total = weighted(group.rewards, group.weights)[: None if reported is None else reported // group.size * group.size]
    flat = deviation(total.view(-1, group.size)) <= tolerance
    whole = deviation(total[None]).item()
    return {f"{OF}/reward_std": whole, f"{OF}/flat_group_fraction": flat.double().mean().item()}


def told(rewarded: Rewarded, options: RepromptOptions) -> list[Told]:
    """Of each completion of this rank."""
    shown = demonstrations(rewarded.group, options)[rewarded.own]
    found = []
    for number, row in zip(shown, rewarded.rows, strict=True):
        gives = options.include_environment_feedback
        gives = gives and not (number is not None and options.environment_feedback_only_without_solution)
        found.append(Told(number, feedback_of(row) if gives else None))
    return found


def demonstrations(group: GroupRewards, options: RepromptOptions) -> list[int | None]:
    """Of each completion of all ranks the first of its prompt that succeeded, by its number; None where none did."""
    found: list[int | None] = []
    for first, good in zip(range(0, len(group.rewards), group.size), succeeded(group, options), strict=True):
        numbers = [first + place for place, flag in enumerate(good) if flag and options.use_successful_as_teacher]
        for own in range(first, first + group.size):
            others = [each for each in numbers if each != own or not options.dont_reprompt_on_self_success]
            found.append(others[0] if others else None)
    return found


def succeeded(group: GroupRewards, options: RepromptOptions) -> list[list[bool]]:
    """Whether each completion of a prompt succeeded, of each prompt of all ranks."""
    good = weighted(group.rewards, group.weights) >= options.success_reward_threshold
    return good.view(-1, group.size).tolist()


class Reprompting(ByAdvantage):
    """The teacher reads completions after a prompt with another one that succeeded, or with feedback; nothing is
    distilled of those for which there is neither, which count all the same."""

    def wants_old(self, options: RepromptOptions, *, stale: bool) -> bool:
        return stale and (options.distillation_weight < 1 or options.distillation_is_clip is not None)

    def teacher_prompts(
        self, rewarded: Rewarded, options: RepromptOptions, tokenizer: Any
    ) -> Callable[[], list[list[int]]] | None:
        known = rewarded.rollout.teacher_prompts
        if known is None:
            return None
        wanted = {number for number in demonstrations(rewarded.group, options) if number is not None}
        texts = rewarded.texts(wanted, tokenizer)
        if options.remove_thinking_from_demonstration:
            texts = {number: THOUGHT.sub("", text).strip() for number, text in texts.items()}
        encoder = encoder_of(options, tokenizer, "a dataset")

        def made() -> list[list[int]]:
            found = list(known)
            for place, (each, row) in enumerate(zip(told(rewarded, options), rewarded.rows, strict=True)):
                if each.shown is not None:
                    found[place] = encoder.told(row, place, texts[each.shown], each.feedback)
            return found

        return made

    def degenerate(self, metrics: Mapping[str, float], options: RepromptOptions) -> dict[str, str]:
        if not options.diagnostics_warning_interval:
            return {}
        tolerance, known = options.diagnostics_flat_tolerance, {**metrics}
        found = {}
        if known[f"{OF}/reward_std"] <= tolerance and known[f"{OF}/flat_group_fraction"] >= 1 - tolerance:
            found["flat"] = "all completions are rewarded alike, so that advantages are 0: look at what rewards them"
        if options.compares and known[f"{OF}/reprompt_sample_fraction"] <= tolerance:
            found["untold"] = (
                "nothing is distilled: no completion reached success_reward_threshold="
                f"{options.success_reward_threshold:g} that the teacher could be shown, and there is no feedback"
            )
        elif options.compares and known[f"{OF}/success_group_fraction"] <= tolerance:
            found["failed"] = (
                f"no completion reached success_reward_threshold={options.success_reward_threshold:g}: the teacher is "
                "told feedback alone"
            )
        return found

    def learn(self, rewarded: Rewarded, options: RepromptOptions) -> Learned:
        found, size = super().learn(rewarded, options), rewarded.group.size
        found.metrics.update(spread_of(rewarded.group, rewarded.reported, options.diagnostics_flat_tolerance))
        if not options.compares:
            return found
        each, lengths, own = told(rewarded, options), rewarded.lengths, rewarded.own_reported
        taught = [one.shown is not None or one.feedback is not None for one in each]
        weights = [token_weights(length, 0) * flag for length, flag in zip(lengths, taught, strict=True)]
        with_feedback = [feedback_of(row) is not None for row in rewarded.rows]
        flags = (
            [one.shown is not None for one in each],
            with_feedback,
            [one.feedback is not None for one in each],
            taught,
        )
        count, *sums = rewarded.summed(own, *(sum(of[:own]) for of in flags))
        names = ("success_sample", "feedback_available", "feedback_used", "reprompt_sample")
        metrics = {f"{OF}/{name}_fraction": n / max(count, 1) for name, n in zip(names, sums, strict=True)}
        groups = succeeded(rewarded.group, options)[: None if rewarded.reported is None else rewarded.reported // size]
        metrics[f"{OF}/success_group_fraction"] = sum(map(any, groups)) / max(len(groups), 1)
        return replace(
            found,
            score_values={**found.score_values, WEIGHT: torch.cat([torch.zeros(0), *weights])},
            metrics={**found.metrics, **metrics},
        )

    def blank(self, completions: int, scores: int) -> tuple[Values, Values]:
        rows, of_scores = super().blank(completions, scores)
        return rows, {**of_scores, WEIGHT: torch.full((scores,), completions / max(scores, 1))}
