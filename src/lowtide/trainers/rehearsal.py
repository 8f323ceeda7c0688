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

from lowtide.memory.allocators.measure import bytes_text, peak_bytes
from lowtide.memory.allocators.out_of_memory import free_caches, is_out_of_memory
from lowtide.memory.optimizers.narrow_step import unwrap_optimizer
from lowtide.memory.optimizers.states import states_of, wants_room
from lowtide.ragged import RaggedBatch
from lowtide.step.heaviest import heaviest_rows, rows_in_a_step
from lowtide.step.metrics import Totals
from lowtide.step.rank_sync import OutOfMemory, RankSync
from lowtide.step.recovery import StepSnapshot, surviving_step
from lowtide.step.train_step import Limits

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
    limits, lengths = trainer.limits, trainer.row_lengths()
    if lengths is None:
        logger.info("no rehearsal: the lengths of the rows are not known beforehand")
        return limits
    assert limits.rows is not None
    before = StepSnapshot(trainer.objective, trainer.args.device)
    sync = RankSync("rehearsal")
    with trainer.phases.during("rehearsal"):
        with sync.local():
            trainer.room = room_for_states(trainer)
        sync.meet(trainer.args.device)
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
        plan=trainer.rehearsal_plan(model),
    )
    model.zero_grad()
    return limits


def room_for_states(trainer: LowtideTrainer) -> list[Tensor]:
    """Memory of the size that the optimizer's states will take, if they are not there yet and their size is known.

    In pieces of the size of the states, which take their places when the optimizer makes them: so the first step has
    the memory of all others, and its activations leave no holes below the states. States that live in host memory take
    none.
    """
    optimizer = unwrap_optimizer(trainer.optimizer)
    if not wants_room(optimizer):
        return []
    wanted = [(p.device, sizes) for p, sizes in states_of(trainer.model, trainer.optimizer_name)]
    room: list[Tensor] = []
    try:
        for device, sizes in wanted:
            room += [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        held = sum(piece.nbytes for piece in room)
        room.clear()
        needed = sum(sum(sizes) for _, sizes in wanted)
        raise OutOfMemory(
            f"out of memory: the states of {type(optimizer).__name__} take {bytes_text(needed)}, and beside the "
            f"weights there was room for {bytes_text(held)} of them. Train adapters, take an optimizer that keeps less "
            "(optim='adamw_stochastic_8bit'), or optimizer_states_on_host=True on a GPU"
        ) from None
    return room
