"""Before the first step, the heaviest micro-batch that data and budget can produce is run once.

What will not fit fails at once, and not hours later on the longest rows. Room is held where the optimizer's states
will be, and where a step has several micro-batches two are run, so that the second finds the gradients of the first.
Nothing is left behind but that room, which goes as the optimizer makes its states: gradients are dropped, the random
state and what the objective carries are put back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide.memory.measure import bytes_text, peak_bytes
from lowtide.memory.narrow_step import unwrap_optimizer
from lowtide.memory.out_of_memory import free_caches
from lowtide.metrics import Totals
from lowtide.planner.heaviest import heaviest_rows, row_lengths, rows_in_a_step
from lowtide.planner.states import optimizer_name, state_sizes
from lowtide.ragged import RaggedBatch
from lowtide.recovery import Before, surviving_step
from lowtide.step import Limits

if TYPE_CHECKING:
    from lowtide.trainers.base import LowtideTrainer

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
        trainer.room = room_for_states(trainer)
        for rows in heaviest_rows(lengths, limits.rows, limits.tokens):
            several = len(rows) < min(rows_in_a_step(trainer.args), len(lengths))
            limits = _run(trainer, model, rows, limits, several)
        if trainer.args.optimizer_in_backward:
            trainer.room.clear()  # states are made while activations are there
    before.put_back()
    free_caches()
    trainer.rehearsed_bytes = peak_bytes(trainer.args.device)
    logger.info(
        f"rehearsed the heaviest micro-batch: the longest row has {int(lengths.max()):,} tokens; peak "
        f"{bytes_text(trainer.rehearsed_bytes)}"
    )
    return limits


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


def room_for_states(trainer: LowtideTrainer) -> list[Tensor]:
    """Memory of the size that the optimizer's states will take, if they are not there yet and their size is known.

    In pieces of the size of the states, which take their places when the optimizer makes them: so the first step has
    the memory of all others, and its activations leave no holes below the states. States that live in host memory take
    none.
    """
    if len(trainer.optimizer.state) or hasattr(unwrap_optimizer(trainer.optimizer), "host_states"):
        return []
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    optimizer = optimizer_name(trainer.args)
    return [
        torch.zeros(size, dtype=torch.uint8, device=parameter.device)
        for parameter in trained
        for size in state_sizes(parameter, optimizer)
    ]
