"""A rollout: what the policy wrote, how it was rewarded, and the batches that are learned from it.

Prompts, completions and numbers are data, so that a rollout is saved with a checkpoint and a run that resumes in the
middle of one goes on with the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lowtide.data.batches.completion_rounds import CompletionRound
from lowtide.data.batches.images import ImageReader
from lowtide.objectives.step_rewards import StepRewards
from lowtide.own_files import share_file
from lowtide.parsing import parse_json
from lowtide.ragged import RaggedBatch, Shown
from lowtide.rollout.generators.generator import Completion, Restart
from lowtide.rollout.images import PromptImages
from lowtide.score_rules import IGNORE

FINISHES = ("stop", "length")


@dataclass
class Rollout:
    """Completions of prompts, in the order of the rows that they were written for."""

    prompts: list[list[int]]
    """The tokens before each completion."""
    completions: list[Completion]
    version: int
    """The optimizer steps that the weights which wrote them had taken."""
    rewards: Float[Tensor, "completions functions"] = field(default_factory=lambda: torch.zeros(0, 0))
    """What each function gave; NaN where it gave nothing."""
    learned: list[bool] = field(default_factory=list)
    """Whether a completion is learned from; False for one that was cut off, where that is asked for."""
    row_values: dict[str, Tensor] = field(default_factory=dict)
    """[completions] each, as a batch has them: advantages."""
    score_values: dict[str, Tensor] = field(default_factory=dict)
    """[scores] each, of the tokens that are learned from: log-probabilities of the policy that wrote them."""
    images: PromptImages | None = None
    """Of the prompt before each completion; None of a model that reads text alone."""
    teacher_prompts: list[list[int]] | None = None
    """What a teacher reads before each completion in place of its prompt; None where it reads that too."""
    steps: StepRewards = field(default_factory=StepRewards.of)
    """Rewards at several places of completions, whose sums are among `rewards`."""

    def __post_init__(self) -> None:
        self.learned = self.learned or [True] * len(self.completions)

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def scored(self) -> list[list[bool]]:
        """Of each token of each completion, whether it is learned from."""
        return [
            list(each.written) if used else [False] * len(each.token_ids)
            for each, used in zip(self.completions, self.learned, strict=True)
        ]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each completion that the policy wrote."""
        return [sum(each.written) for each in self.completions]

    def of_scores(self, name: str) -> Float[Tensor, " scores"]:
        """Numbers of the tokens that are learned from: "logprobs" or "plain_logprobs" of their completions."""
        numbers = [
            number
            for each, flags in zip(self.completions, self.scored, strict=True)
            for number, used in zip(getattr(each, name), flags, strict=True)
            if used
        ]
        return torch.tensor(numbers, dtype=torch.float32)

    @property
    def taught(self) -> Rollout:
        """The same completions as a teacher with prompts of its own reads them; nothing was computed of them."""
        assert self.teacher_prompts is not None
        prompts = zip(self.prompts, self.teacher_prompts, strict=True)
        completions = [each.behind(*pair) for each, pair in zip(self.completions, prompts, strict=True)]
        return Rollout(self.teacher_prompts, completions, self.version, learned=self.learned)

    def batch(self, chosen: Sequence[int] | None = None, *, sharing: bool = True) -> RaggedBatch:
        """Some completions, by default all, as the rows of a batch."""
        chosen = range(len(self)) if chosen is None else chosen
        row_values = {name: values[list(chosen)] for name, values in self.row_values.items()}
        return self.rows_of([(number,) for number in chosen], sharing=sharing, row_values=row_values)

    def rows_of(
        self, groups: Sequence[Sequence[int]], *, sharing: bool = True, row_values: Mapping[str, Tensor]
    ) -> RaggedBatch:
        """Groups of completions of one prompt as the rows of a batch.

        Args:
            groups: the completions of each row, in their order.
            sharing: a prompt is a segment of its own, which is computed once.
            row_values: [rows] each.
        """
        scored = self.scored
        ends = [0, *accumulate(sum(flags) for flags in scored)]
        spans = [torch.arange(ends[number], ends[number + 1]) for group in groups for number in group]
        places = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.long)
        return grouped_batch(
            [self.prompts[group[0]] for group in groups],
            [
                [rounds_of(self.prompts[number], self.completions[number], scored[number]) for number in group]
                for group in groups
            ],
            sharing=sharing,
            shown=self._shown([group[0] for group in groups]),
            row_values=row_values,
            score_values={name: values[places] for name, values in self.score_values.items()},
        )

    def _shown(self, chosen: Sequence[int]) -> Shown | None:
        """The images of some prompts."""
        images = self.images
        if images is None:
            return None
        return Shown([images.among(number, self.prompts[number]) for number in chosen], images.position_rule)

    @classmethod
    def concat(cls, parts: Sequence[Rollout]) -> Rollout:
        """Rewarded rollouts of one policy as one. Nothing was computed of them yet, and prompts show no images."""
        assert not any(each.row_values or each.score_values or each.images for each in parts)
        taught = [each.teacher_prompts for each in parts if each.teacher_prompts is not None]
        return cls(
            [prompt for each in parts for prompt in each.prompts],
            [one for each in parts for one in each.completions],
            parts[0].version,
            torch.cat([each.rewards for each in parts]),
            [used for each in parts for used in each.learned],
            teacher_prompts=[prompt for each in taught for prompt in each] if len(taught) == len(parts) else None,
            steps=StepRewards.concat([each.steps for each in parts], [len(each) for each in parts]),
        )

    def chosen(self, numbers: Sequence[int]) -> Rollout:
        """Some completions with their rewards, as nothing else was computed of them; prompts show no images."""
        numbers = list(numbers)
        return Rollout(
            [self.prompts[number] for number in numbers],
            [self.completions[number] for number in numbers],
            self.version,
            self.rewards[numbers],
            [self.learned[number] for number in numbers],
            steps=self.steps.chosen(numbers),
        )

    def replaced(self, places: Sequence[int], other: Rollout) -> Rollout:
        """With the completions of another rollout of one policy in some places. Nothing was computed of either yet, and
        what images prompts show is to be said anew."""
        assert not any((self.row_values, self.score_values, other.row_values, other.score_values))
        assert self.teacher_prompts is None
        made = Rollout([*self.prompts], [*self.completions], self.version, self.rewards.clone(), [*self.learned])
        made.rewards[list(places)] = other.rewards.to(made.rewards.dtype)
        for number, place in enumerate(places):
            made.prompts[place], made.completions[place] = other.prompts[number], other.completions[number]
            made.learned[place] = other.learned[number]
        made.steps = self.steps.replaced(places, other.steps)
        return made

    # -- on disk -----------------------------------------------------------------------------------------------

    def save(self, path: Path, **more: Any) -> None:
        """Writes it to a file of safetensors; `more` is JSON that `load` gives back."""
        first: dict[Any, int] = {}
        seen = [() if self.images is None else self.images.of_prompt(number) for number in range(len(self))]
        named = [(tuple(prompt), each) for prompt, each in zip(self.prompts, seen, strict=True)]
        group = [first.setdefault(each, len(first)) for each in named]
        images, known = {}, {}
        if self.images is not None:
            images, known = self.images.on_disk([group.index(place) for place in range(len(first))])
        of = self.completions
        tensors = {
            **_packed("prompts", [list(prompt) for prompt, _ in first]),
            **images,
            **({} if self.teacher_prompts is None else _packed("teacher_prompts", self.teacher_prompts)),
            **_packed("token_ids", [each.token_ids for each in of]),
            "group": torch.tensor(group),
            "written": torch.tensor([own for each in of for own in each.written]),
            "logprobs": torch.tensor([p for each in of for p in each.logprobs], dtype=torch.float64),
            "plain_logprobs": torch.tensor([p for each in of for p in each.plain_logprobs], dtype=torch.float64),
            "finish": torch.tensor([FINISHES.index(each.finish) for each in of]),
            "learned": torch.tensor(self.learned),
            **_packed("contexts", [each.context for one in of for each in one.restarts]),
            "restarts": torch.tensor([[n, each.place] for n, one in enumerate(of) for each in one.restarts]).view(
                -1, 2
            ),
            "rewards": self.rewards,
            **{f"step.{name}": values for name, values in vars(self.steps).items()},
            **{f"row.{name}": values for name, values in self.row_values.items()},
            **{f"score.{name}": values for name, values in self.score_values.items()},
        }
        metadata = {"rollout": json.dumps({"version": self.version, **known, **more})}
        save_file({name: each.contiguous() for name, each in tensors.items()}, str(path), metadata)
        share_file(path)

    @classmethod
    def load(cls, path: Path, reader: ImageReader | None = None) -> tuple[Rollout, dict[str, Any]]:
        """A rollout, and what was saved with it.

        Args:
            reader: makes images ready, of a rollout whose prompts may show some.
        """
        with safe_open(str(path), "pt") as file:  # type: ignore[no-untyped-call]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            more = parse_json(file.metadata()["rollout"])
        prompts, ids = _unpacked("prompts", tensors), _unpacked("token_ids", tensors)
        columns = [
            tensors[name].split([len(each) for each in ids]) for name in ("written", "logprobs", "plain_logprobs")
        ]
        group = tensors["group"].tolist()
        completions = [
            Completion(tokens, logprobs.tolist(), plain.tolist(), written.tolist(), FINISHES[finish])  # type: ignore[arg-type]
            for tokens, written, logprobs, plain, finish in zip(ids, *columns, tensors["finish"].tolist(), strict=True)
        ]
        if "restarts" in tensors:
            contexts = _unpacked("contexts", tensors)
            for (number, place), context in zip(tensors["restarts"].tolist(), contexts, strict=True):
                completions[number].restarts.append(Restart(place, context))
        made = cls(
            [prompts[number] for number in group],
            completions,
            more.pop("version"),
            tensors["rewards"],
            tensors["learned"].tolist(),
            _named("row.", tensors),
            _named("score.", tensors),
            None if reader is None else PromptImages.from_disk(reader, tensors, more, group),
            _unpacked("teacher_prompts", tensors) if "teacher_prompts" in tensors else None,
            StepRewards(**found) if (found := _named("step.", tensors)) else StepRewards.of(),
        )
        return made, more


def grouped_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[CompletionRound]]],
    *,
    sharing: bool = True,
    shown: Shown | None = None,
    **values: Any,
) -> RaggedBatch:
    """Completions as a batch: a row is a prompt with one or several of them.

    Args:
        prompts: of each row.
        completions: of each row, in rounds.
        sharing: a prompt is a segment of its own, which is computed once for its row, and for rows that repeat it.
        shown: the images of the prompts; None of text alone.
        values: `row_values` and `score_values` of the batch.
    """
    token_ids, labels, prefix, row, images = [], [], [], [], []
    for number, prompt in enumerate(prompts):
        before = len(token_ids) if sharing else -1
        of_prompt = () if shown is None else shown.images[number]
        if sharing:
            images.append(of_prompt)
            token_ids.append(list(prompt))
            labels.append([IGNORE] * len(prompt))
            prefix.append(-1)
            row.append((number, -1))
        for place, rounds in enumerate(completions[number]):
            for each in rounds:
                repeated, after = each.placed(prompt, before)
                token_ids.append([*repeated, *each.token_ids])
                labels.append([*[IGNORE] * len(repeated), *each.labels])
                prefix.append(after)
                row.append((number, place))
                images.append(() if sharing else of_prompt)
    shown = None if shown is None else Shown(images, shown.position_rule)
    return RaggedBatch.from_segments(token_ids, labels, prefix=prefix, row=row, shown=shown, **values)


def rounds_of(prompt: Sequence[int], completion: Completion, scored: Sequence[bool]) -> list[CompletionRound]:
    """The rounds of a completion, each with the context that it was written in, without those that nothing is scored
    of.

    Args:
        scored: of each token of the completion, whether it is.
    """
    wanted = [token if used else IGNORE for token, used in zip(completion.token_ids, scored, strict=True)]
    starts = [Restart(0, list(prompt)), *completion.restarts]
    rounds = []
    for (start, context), stop in zip(starts, [*(each.place for each in starts[1:]), len(wanted)], strict=True):
        if start and not any(scored[start:stop]):
            continue
        seen = next((n for n, (a, b) in enumerate(zip(context, prompt, strict=False)) if a != b), None)
        seen = min(len(context), len(prompt)) if seen is None else seen
        own = [*context[seen:], *completion.token_ids[start:stop]]
        rounds.append(CompletionRound(own, [*[IGNORE] * len(context[seen:]), *wanted[start:stop]], seen))
    return rounds


def _packed(name: str, lists: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(each) for each in lists], dtype=torch.long)
    return {name: torch.tensor([n for each in lists for n in each], dtype=torch.long), f"{name}.lengths": lengths}


def _unpacked(name: str, tensors: Mapping[str, Tensor]) -> list[list[int]]:
    return [part.tolist() for part in tensors[name].split(tensors[f"{name}.lengths"].tolist())]


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
