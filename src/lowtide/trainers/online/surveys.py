"""What the policy writes of every prompt before it is trained, and what its rewards say of the prompt.

Completions are keyed by prompt and number, so that windows and ranks change nothing, and a run that begins again from
the same weights writes the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset
from jaxtyping import Float
from rich.progress import track
from torch import Tensor

from lowtide.data.sources.titles import entitled, title_of
from lowtide.methods.online.learning import Survey
from lowtide.objectives.advantages import weighted
from lowtide.terminal import Console

PLACES = 3
"""What keys the random numbers of a survey, among those of training, evaluation and resampling."""


def surveyed(trainer: Any, dataset: Any, name: str, survey: Survey) -> Any:
    """A dataset with the column of the survey, which rows may bring; of training, without the prompts that it leaves
    out.

    Raises:
        ValueError: the rows are a stream, or none is left.
    """
    if isinstance(dataset, Mapping):
        return type(dataset)({key: surveyed(trainer, part, key, survey) for key, part in dataset.items()})  # type: ignore
    if dataset is None or survey.column in (dataset.column_names or ()):
        return dataset
    title = title_of(dataset, name)
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"{title} is a stream, and {survey.completions} completions of each prompt are written before training: "
            f"load it whole, or give its rows the column `{survey.column}`"
        )
    rewards = rewards_of(trainer, dataset, name, survey.completions)
    found = dataset.add_column(survey.column, survey.value(rewards).tolist())  # type: ignore[call-arg]
    if survey.left_out is None or name != "train":
        return entitled(found, title)
    kept = (~survey.left_out(rewards)).nonzero().flatten().tolist()
    if not kept:
        raise ValueError(
            f"{title}: of {survey.completions} completions of each of its {len(dataset)} prompts none has a reward "
            "other than 0, so that nothing could be learned. Look at the rewards, take easier prompts or more "
            "completions, or set filter_all_incorrect=False"
        )
    return entitled(found.select(kept), title)


def rewards_of(trainer: Any, dataset: Dataset, name: str, each: int) -> Float[Tensor, "prompts completions"]:
    """The rewards of so many completions of each prompt; NaN where nothing rewards one."""
    maker, args = trainer.maker, trainer.options
    ranks, rank = args.data_ranks, args.data_rank
    total, size = len(dataset) * each, max(args.written_at_a_time // ranks, 1)
    rows, found = dataset.with_format(None), torch.zeros(0, dtype=torch.float64)
    quiet = bool(args.disable_tqdm or args.process_index > 0)
    starts = range(0, total, size * ranks)
    for start in track(starts, f"rewards of {name}", console=Console(stderr=True, quiet=quiet), disable=quiet):
        first = start + rank * size
        numbers = [min(number, total - 1) for number in range(first, first + size)]  # the last ones fill up
        own = [rows[number // each] for number in numbers]
        made = maker.written_before(own, (PLACES, *name.encode(), first), state=trainer.state)
        rewards = weighted(maker.rewards_of_all(made), maker.rewards.weights)
        found = torch.cat([found, rewards])
    return found[:total].view(-1, each)
