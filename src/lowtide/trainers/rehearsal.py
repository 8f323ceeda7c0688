"""Before the first step, the heaviest micro-batch that data and budget can produce is run once.

What will not fit fails at once, and not hours later on the longest rows. Room is held where the optimizer's states
will be, and where a step has several micro-batches two are run, so that the second finds the gradients of the first.
Nothing is left behind: gradients are dropped, the random state and what the objective carries are put back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch import Tensor, nn

from lowtide.memory.measure import bytes_text, peak_bytes
from lowtide.memory.out_of_memory import free_caches
from lowtide.metrics import Totals
from lowtide.planner.states import predict_states
from lowtide.ragged import RaggedBatch
from lowtide.recovery import Before, surviving_step
from lowtide.step import Limits

if TYPE_CHECKING:
    from lowtide.trainers.base import LowtideTrainer

STARTS = 256
"""Row lengths to begin with, in the search for rows that fill a budget."""

logger = logging.getLogger(__name__)


def rehearse(trainer: LowtideTrainer, model: nn.Module) -> Limits:
    """Runs the heaviest micro-batch; smaller ones if it does not fit.

    Returns:
        the limits of a micro-batch that fits.

    Raises:
        OutOfMemory: the longest row alone does not fit; says what to change.
    """
    limits, dataset = trainer.limits, trainer.train_dataset
    lengths = row_lengths(dataset)
    if lengths is None:
        logger.info("no rehearsal: the lengths of the rows are not known beforehand")
        return limits
    assert limits.rows is not None
    before = Before(trainer.objective, trainer.args.device)
    with trainer.phases.during("rehearsal"):
        room = room_for_states(trainer)
        for rows in heaviest_rows(lengths, limits.rows, limits.tokens):
            several = len(rows) < min(rows_in_a_step(trainer), len(lengths))
            limits = _run(trainer, model, rows, limits, several)
        del room
    before.put_back()
    free_caches()
    trainer.rehearsed_bytes = peak_bytes(trainer.args.device)
    logger.info(
        f"rehearsed the heaviest micro-batch: the longest row has {int(lengths.max()):,} tokens; peak "
        f"{bytes_text(trainer.rehearsed_bytes)}"
    )
    return limits


def rows_in_a_step(trainer: LowtideTrainer) -> int:
    """On one rank."""
    return trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps


def _run(trainer: LowtideTrainer, model: nn.Module, rows: Sequence[int], limits: Limits, several: bool) -> Limits:
    """One micro-batch, or two of them, forward and backward; returns the limits that it took."""
    dataset: Any = trainer.train_dataset
    batch = trainer.as_ragged(trainer.data_collator([dataset[row] for row in rows]))
    _, limits = surviving_step(
        trainer.models(model),
        RaggedBatch.concat([batch, batch]) if several else batch,
        trainer.objective,
        limits=limits,
        totals=Totals(),
        **trainer.rehearsal_ways(model),
    )
    model.zero_grad()
    return limits


def row_lengths(dataset: Any) -> np.ndarray | None:
    """[rows]: the tokens of each prepared row; None for streams and for data of other kinds."""
    if not isinstance(dataset, Dataset):
        return None
    columns = [name for name in dataset.column_names if name.endswith("_ids") and name != "position_ids"]
    if not columns:
        return None
    table = dataset.with_format("arrow").select_columns(columns)
    found = []
    for part in table.iter(batch_size=10_000):
        lists: Any = part
        if not all(pa.types.is_list(field.type) or pa.types.is_large_list(field.type) for field in lists.schema):
            return None
        found.append(sum(lists[name].combine_chunks().value_lengths().to_numpy() for name in columns))
    return np.concatenate(found) if found else None


def heaviest_rows(lengths: np.ndarray, most: int, budget: int | None) -> list[list[int]]:
    """The rows of the micro-batches that can take most: the longest rows together; and, where a budget cuts them off,
    the rows that fill it best.

    Args:
        lengths: [rows], tokens of each row.
        most: rows in a micro-batch.
        budget: tokens in a micro-batch.
    """
    by_length: dict[int, list[int]] = {}
    for row in np.argsort(-lengths, kind="stable")[: STARTS * most].tolist() if budget is None else range(len(lengths)):
        by_length.setdefault(int(lengths[row]), []).append(row)
    distinct = sorted(by_length, reverse=True)
    longest = _filled(distinct, by_length, most, budget)
    fullest = longest
    for start in range(1, min(len(distinct), STARTS) if budget is not None else 0):
        other = _filled(distinct[start:], by_length, most, budget)
        if lengths[other].sum() > lengths[fullest].sum():
            fullest = other
    return [longest] if fullest is longest else [longest, fullest]


def _filled(distinct: Sequence[int], by_length: dict[int, list[int]], most: int, budget: int | None) -> list[int]:
    """Rows taken longest first for as long as they go together."""
    chosen: list[int] = []
    room = budget
    for length in distinct:
        count = most - len(chosen)
        if room is not None:
            count = min(count, room // length)
        taken = by_length[length][:count]
        chosen += taken
        room = None if room is None else room - length * len(taken)
    return sorted(chosen)


def room_for_states(trainer: LowtideTrainer) -> Sequence[Tensor]:
    """Memory of the size that the optimizer's states will take, if they are not there yet and their size is known."""
    if len(trainer.optimizer.state):
        return []
    states = predict_states(trainer.model, str(getattr(trainer.args.optim, "value", trainer.args.optim)))
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trained)
    share = (states.optimizer or 0) / max(count, 1)
    return [torch.zeros(int(p.numel() * share), dtype=torch.uint8, device=p.device) for p in trained]
