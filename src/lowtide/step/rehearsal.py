"""Before the first step, the heaviest micro-batch that data and budget can produce is run once.

What will not fit fails at once, and not hours later on the longest rows. Memory is held where the optimizer's states
will be, and where a step has several micro-batches two are run, so that the second finds the gradients of the first.
In a pipeline as many are run as there are stages, since the first stage holds so many at once. Nothing is left behind
but that memory, which goes as the optimizer makes its states: gradients are dropped, the random state and what the
objective carries are put back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lowtide.data.batches.heaviest import heaviest_rows, rows_in_a_step
from lowtide.memory.allocators.measure import bytes_text, peak_bytes
from lowtide.memory.allocators.out_of_memory import free_caches, is_out_of_memory
from lowtide.memory.optimizers.states import states_of, wants_room
from lowtide.ragged import RaggedBatch
from lowtide.step.rank_sync import OutOfMemory, RankSync
from lowtide.step.recovery import StepSnapshot
from lowtide.step.runner import StepRunner
from lowtide.step_plan import Limits, cut_rows

logger = logging.getLogger(__name__)


def rehearse(
    runner: StepRunner,
    lengths: np.ndarray | None,
    batch_of: Callable[[Sequence[int]], RaggedBatch],
    together: int = 1,
) -> None:
    """Runs the heaviest micro-batch of the rows; smaller ones if it does not fit, which lowers the token budget.

    Args:
        lengths: [rows], the tokens of each row; None where they are not known, and nothing is run.
        batch_of: a batch of some rows, by their numbers.
        together: rows of the batch that one row becomes.

    Raises:
        ValueError: the options do not say how many rows a micro-batch has at most.
        OutOfMemory: the longest row alone does not fit; says what to change.
    """
    if lengths is None:
        logger.info("no rehearsal: the lengths of the rows are not known beforehand")
        return
    limits = runner.limits
    if limits.rows is None:
        raise ValueError("a rehearsal requires per_device_train_batch_size: set it in the runner's options")
    before = StepSnapshot(runner.objective, runner.device)
    sync = RankSync("rehearsal")
    with runner.phases.during("rehearsal"):
        with sync.local():
            runner.reserved = reserved_for_states(runner)
        sync.meet(runner.device)
        for rows in heaviest_rows(lengths, -(-limits.rows // together), limits.tokens):
            batch = batch_of(rows)
            step = min(rows_in_a_step(runner.options), together * len(lengths))
            times = min(max(2, runner.stages), -(-step // batch.rows))
            several = sum(part.forwards for part in cut_rows(batch.segments, Limits(tokens=limits.tokens))) > 1
            runner.rehearsal(batch if several else batch.times(times))  # a later one finds an earlier one's gradients
        if runner.in_backward is not None:
            runner.reserved.clear()  # states are made while activations are there
    before.put_back()
    free_caches()
    runner.rehearsed_bytes = peak_bytes(runner.device)
    logger.info(
        f"rehearsed the heaviest micro-batch: the longest row has {int(lengths.max()):,} tokens; peak "
        f"{bytes_text(runner.rehearsed_bytes)}"
    )


def reserved_for_states(runner: StepRunner) -> list[Tensor]:
    """Memory of the size that the optimizer's states will take, if they are not there yet and their size is known.

    In pieces of the size of the states, which take their places when the optimizer makes them: so the first step has
    the memory of all others, and its activations leave no holes below the states. States that live in host memory take
    none.
    """
    optimizer = runner.updater.inner
    if not wants_room(optimizer):
        return []
    wanted = [(p.device, sizes) for p, sizes in states_of(runner.model, runner.optimizer_name)]
    reserved: list[Tensor] = []
    try:
        for device, sizes in wanted:
            reserved += [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        held = sum(piece.nbytes for piece in reserved)
        reserved.clear()
        needed = sum(sum(sizes) for _, sizes in wanted)
        raise OutOfMemory(
            f"out of memory: the states of {type(optimizer).__name__} take {bytes_text(needed)}, and beside the "
            f"weights there was room for {bytes_text(held)} of them. Train adapters, take an optimizer that keeps less "
            "(optim='adamw_stochastic_8bit'), or optimizer_states_on_host=True on a GPU"
        ) from None
    return reserved
