"""Process reward models (arXiv 2211.14275) as rewards: how probable it is that a step of a completion is right.

A model reads what `lowtide prm` trains on: the prompt's text after the tokenizer's first token, then each step with the
separator behind it, at whose last token the step is judged. A conversation is read as the texts of its messages.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.data.batches.token_rows import IGNORED
from lowtide.data.formats.images import in_words
from lowtide.data.stepwise import StepEncoder
from lowtide.engine.forward import causal_model
from lowtide.engine.heads.classes import TOKEN_CLASSIFIERS, TokenClasses
from lowtide.engine.heads.value import STEP_SEPARATOR, TURNS_READ
from lowtide.engine.weights.complete_weights import ADAPTER_CONFIG, base_of_adapters
from lowtide.engine.weights.loading import saved_config
from lowtide.engine.weights.weight_files import read_json
from lowtide.rollout.rewards.completed import Completed
from lowtide.rollout.rewards.models import Group, ModelReward, Part, group_by_prompt, values_at_ends
from lowtide.rollout.rewards.steps import Column, TokensOf

RIGHT = 1
"""The label of a step that is right."""


def is_process_model(model: Any, init: Mapping[str, Any] | None = None) -> bool:
    """Whether a model, or a name, is of a token classifier."""
    if isinstance(model, nn.Module):
        try:
            return TokenClasses.why_not(causal_model(model)) is None
        except ValueError:
            return False
    if base_of_adapters(model) is not None:
        return read_json(Path(model, ADAPTER_CONFIG)).get("task_type") == TokenClasses.task_type
    named = getattr(saved_config(model, init or {}), "architectures", None) or ()
    return any(each in TOKEN_CLASSIFIERS for each in named)


class StepRow(NamedTuple):
    """A completion as the model reads it."""

    token_ids: list[int]
    ends: list[int]
    """The tokens at which its steps are judged."""
    places: list[int]
    """The tokens of the completion, as the policy wrote it, that end these steps."""


class ProcessReward(ModelReward):
    """A process reward model as a column of rewards: the probability of each step that it is right. The last step ends
    with the completion's last token. The arguments are those of `ModelReward`."""

    head = TokenClasses

    def _check_labels(self, labels: int | None) -> None:
        if labels != 2:
            raise ValueError(
                f"process reward model {self.name!r} has {labels} labels, and a step is right or wrong: two labels, of "
                "which the second is right"
            )

    @property
    def separator(self) -> str:
        """What stood behind each step in its training; a line break where its config does not say."""
        noted = getattr(getattr(self._inner, "config", None), TURNS_READ, None)
        found = noted.get(STEP_SEPARATOR) if isinstance(noted, Mapping) else None
        return found if isinstance(found, str) and found else "\n"

    @torch.no_grad()
    def column(self, completed: Completed) -> Column:
        """The rewards of the steps.

        Raises:
            ValueError: a completion has several turns, or its reward is not finite; names its row.
        """
        rows = [self._row(completed, number) for number in range(len(completed))]
        judged = [number for number, row in enumerate(rows) if row.ends]
        ids = [rows[number].token_ids for number in judged]
        firsts = [0]
        for number in judged:
            firsts.append(firsts[-1] + len(rows[number].ends))
        slots = [list(range(first, stop)) for first, stop in itertools.pairwise(firsts)]
        whole = self._groups([completed.prompts[number] for number in judged], [rows[number] for number in judged])
        found = self._forward(
            firsts[-1], max(map(len, ids), default=0), lambda: self._steps(whole, rows, judged, slots)
        )
        if not found.isfinite().all():
            first = int((~found.isfinite()).nonzero()[0])
            number = judged[next(n for n, own in enumerate(slots) if first in own)]
            raise ValueError(f"reward model {self.name!r} gives {found[first]:g} for {completed.where(number)}")
        given: list[list[tuple[int, float]]] = [[] for _ in rows]
        for number, own in zip(judged, slots, strict=True):
            given[number] = list(zip(rows[number].places, found[own].tolist(), strict=True))
        return Column.of(given)

    def _row(self, completed: Completed, number: int) -> StepRow:
        said = completed.completions[number]
        text = said if isinstance(said, str) else str(in_words(said[-1].get("content")))
        if completed.tokenizer is None:
            raise ValueError(
                f"process reward model {self.name!r} reads answers of one turn, and {completed.where(number)} may have "
                "several, with tools: leave one of them out"
            )
        places, steps, end, found = [], [], 0, TokensOf(completed, number)
        for piece in text.split(self.separator):
            end += len(piece) + len(self.separator)
            if piece.strip():
                steps.append(piece)
                places.append(found.at(min(end, found.characters)))
        if not steps:
            return StepRow([], [], [])
        places[-1] = len(found.ids) - 1
        prompt = completed.prompts[number]
        prompt = prompt if isinstance(prompt, str) else "\n".join(in_words(each.get("content")) for each in prompt)
        encoded = StepEncoder(self.tokenizer, self.separator)(
            {"prompt": prompt, "completions": steps, "labels": [True] * len(steps)}, number
        )
        ends = [place for place, label in enumerate(encoded["labels"]) if label != IGNORED]
        return StepRow(encoded["input_ids"], ends, places)

    def _groups(self, prompts: Sequence[Any], rows: Sequence[StepRow]) -> list[Group]:
        """The rows of a prompt with what they begin with apart, before their first step's end."""
        found = []
        for group in group_by_prompt(prompts, [row.token_ids for row in rows], self._shares):
            own = [rows[number] for number in group.numbers]
            common = min(len(group.prefix), *(row.ends[0] for row in own))
            ends = [[place - common for place in row.ends] for row in own]
            rests = [row.token_ids[common:] for row in own]
            found.append(Group(own[0].token_ids[:common], rests, group.numbers, ends))
        return found

    def _steps(
        self, whole: Sequence[Group], rows: Sequence[StepRow], judged: Sequence[int], slots: Sequence[Sequence[int]]
    ) -> Iterator[Part]:
        """The probabilities of steps, micro-batch by micro-batch."""
        if self.padding_free:
            for groups, part in self._laid(whole):
                places = [slot for group in groups for number in group.numbers for slot in slots[number]]
                yield places, functools.partial(self._judged, part)
            return
        chosen = [rows[number] for number in judged]
        for numbers in self._alike([row.token_ids for row in chosen]):
            places = [slot for number in numbers for slot in slots[number]]
            yield places, functools.partial(self._judged_padded, [chosen[number] for number in numbers])

    def _judged(self, part: Any) -> Tensor:
        return values_at_ends(self.model, part, self.head).softmax(-1)[:, RIGHT]

    def _judged_padded(self, rows: Sequence[StepRow]) -> Tensor:
        logits = self._own_logits([row.token_ids for row in rows])
        chosen = torch.cat([each[row.ends] for each, row in zip(logits, rows, strict=True)])
        return chosen.float().softmax(-1)[:, RIGHT]
