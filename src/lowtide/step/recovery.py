"""Survives an out-of-memory: the step is dropped and done again in smaller micro-batches.

The gradients are dropped, the random state and what the objective carries along are put back, the token budget is
halved, and the step is repeated, on all ranks together. Since the numbers do not depend on how a batch is cut, they
are those of a run that never failed; bit by bit those of one that had the smaller budget.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.torch import version_of
from lowtide.memory.allocators.out_of_memory import drop_frames, first_line, free_caches, is_out_of_memory
from lowtide.methods.method import Objective, Scorer
from lowtide.ragged import RaggedBatch
from lowtide.ranks.shards import LocalShard
from lowtide.ranks.world import worst_of_ranks
from lowtide.step.evaluate import score_in_parts
from lowtide.step.execute import Backward
from lowtide.step.metrics import Totals
from lowtide.step.models import Models
from lowtide.step.rank_sync import End, OutOfMemory, met, random_state, set_random_state
from lowtide.step.train_step import Step
from lowtide.step_plan import Limits, cut_rows, smaller

logger = logging.getLogger(__name__)


def surviving_step(
    models: Models,
    batch: RaggedBatch,
    objective: Objective,
    *,
    limits: Limits,
    totals: Totals,
    backward: Backward = Backward(),
    of_one_forward: Callable[[Step, Backward, Totals], Tensor] = Step.run,
) -> tuple[Tensor, Limits]:
    """`train_step`, repeated with half the token budget for as long as it runs out of memory.

    Args:
        models: their gradients are None, or are dropped with those of a failed attempt.
        of_one_forward: runs a step that is a single forward and backward, in its own way.

    Returns:
        the loss, and the limits that it took, for the steps to come.

    Raises:
        OutOfMemory: a micro-batch of one row does not fit; names the row's length, the phase and what to change. Or
            ranks wait for one another within a forward, so that the step cannot be repeated.
    """
    before, step = StepSnapshot(objective, models.device), None
    while True:
        attempt = Totals()
        try:
            if step is None:
                step = Step.planned(models, batch, objective, limits, backward)
            run = of_one_forward if step.plan.one_forward else Step.run
            loss = run(step, backward, attempt)
        except OutOfMemory as error:
            if models.waited_for:
                raise
            failed = error.with_traceback(None)  # its frames hold the tensors that did not fit
        else:
            totals.take_over(attempt)
            return loss, step.plan.limits
        backward.abandon()
        models.policy.zero_grad()
        free_caches()
        before.put_back()
        step, limits = _smaller(step, models, batch, objective, limits, failed)
        logger.warning(f"out of memory {failed}; the step is repeated with at most {limits.tokens:,} tokens a forward")


def _smaller(
    step: Step | None,
    models: Models,
    batch: RaggedBatch,
    objective: Objective,
    limits: Limits,
    failed: OutOfMemory,
) -> tuple[Step | None, Limits]:
    """The step in smaller micro-batches, if it need not be planned from the beginning, and smaller limits.

    Raises:
        OutOfMemory: there is nothing left to halve.
    """
    cuttable = models.why_not_chains(objective) is None
    if objective.baseline is not None:
        step = None  # what is scored first draws anew too, from rows that the step no longer has
    if step is not None:
        heaviest, longest = step.said.heaviest, step.said.longest
    else:
        heaviest, longest = (worst_of_ranks(size, models.device) for size in _sizes(limits, batch))
    if (budget := smaller(heaviest, longest, cuttable=cuttable)) is not None:
        limits = replace(limits, tokens=budget)
        return None if step is None else step.within(limits), limits
    one = f"{heaviest} tokens of one row" if cuttable else "one row"
    raise OutOfMemory(
        f"out of memory {failed}. It is a micro-batch of {one} of {longest:,} tokens, which cannot be cut: lower "
        "`max_length`, keep less (gradient_checkpointing=True, activation_offloading=True, adapters, an optimizer "
        "with smaller states), or take a larger device",
        failed.failure,
    )


class StepSnapshot:
    """What a step changes beside gradients and metrics: the random state, and what the objective carries along."""

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self.device, self.random = device, random_state(device)
        self.running = getattr(objective, "running", None)
        self.carried = {} if self.running is None else copy.deepcopy(vars(self.running))

    def put_back(self) -> None:
        set_random_state(self.random, self.device)
        if self.running is not None:
            vars(self.running).update(self.carried)


def _sizes(limits: Limits, batch: RaggedBatch) -> tuple[int, int]:
    """Tokens of the heaviest forward that the limits make of a batch, and of its longest row."""
    return max(part.heaviest for part in cut_rows(batch.segments, limits)), max(batch.row_tokens)


def surviving_scores(
    models: Models, batch: RaggedBatch, limits: Limits, scorer: Scorer, *, why_whole_rows: str | None = ""
) -> Tensor:
    """`score_in_parts`, repeated with half the token budget for as long as it runs out of memory.

    Each rank repeats by itself: nothing is exchanged in a pass without gradients. The limits of the steps to come are
    left alone, since an update takes more and finds out for itself. Where others wait for this rank inside of a
    forward, nothing is repeated.

    Args:
        models: as of `score_in_parts`.
        why_whole_rows: likewise.

    Raises:
        OutOfMemory: one row does not fit.
    """
    while True:
        try:
            return score_in_parts(models, batch, limits, scorer, why_whole_rows=why_whole_rows)
        except Exception as error:
            if models.waited_for or not is_out_of_memory(error):
                raise
            said = first_line(error)
            drop_frames(error)
        free_caches()
        heaviest, longest = _sizes(limits, batch)
        budget = smaller(heaviest, longest, cuttable=why_whole_rows is None)
        if budget is None:
            raise OutOfMemory(
                f"out of memory in scoring one row of {longest:,} tokens, which cannot be cut ({said}): lower "
                "what limits its length (`max_length`, `max_completion_length`), or take a larger device"
            )
        limits = replace(limits, tokens=budget)
        logger.warning(f"out of memory in scoring ({said}): it is repeated with at most {budget:,} tokens a forward")


def surviving_optimizer_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any], *args: Any) -> Any:
    """An optimizer's step, done again after an out-of-memory that came before any weight was touched.

    The gradients are still there, so nothing else has to be repeated. Moments are made at the first step, which is
    where an optimizer runs out of memory. Each rank repeats by itself, and they meet once it is over.

    Args:
        optimizer: whose states are looked at.
        step: runs it, through whatever wraps it.

    Raises:
        OutOfMemory: it fails again, or failed half way, on this rank or on another.
        RankFailed: another rank stopped at something else.
        Exception: what else stopped this rank.
    """
    result, failed, end = None, None, End.WELL
    try:
        result = _step_or_repeat(optimizer, step, *args)
    except Exception as error:
        failed, end = error, End.OUT_OF_MEMORY if isinstance(error, OutOfMemory) else End.ERROR
    device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
    worst, rank = met(end, failed, device)
    if worst == End.OUT_OF_MEMORY:
        raise OutOfMemory(
            f"rank {rank} ran out of memory in the optimizer's step, which this one has taken: what that rank printed "
            "says what to change, and a run resumes from the last checkpoint"
        )
    return result


def _step_or_repeat(optimizer: torch.optim.Optimizer, step: Callable[..., Any], *args: Any) -> Any:
    known, before = set(optimizer.state), _counts(optimizer)
    try:
        return step(*args)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        drop_frames(error)
        text = first_line(error)
    if _counts(optimizer) != before:
        raise OutOfMemory(
            f"out of memory in the optimizer's step, when some weights were updated and others not: {text}. Resume "
            "from the last checkpoint with an optimizer that keeps less, optim='adamw_8bit' say"
        )
    for parameter in [p for p in optimizer.state if p not in known]:
        del optimizer.state[parameter]
    free_caches()
    logger.warning(f"out of memory in the optimizer's step, before any weight changed; it is repeated: {text}")
    try:
        return step(*args)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"out of memory in the optimizer's step: weights, gradients and moments do not fit together: {text}. Train "
            f"adapters, take an optimizer that keeps less (optim='adamw_8bit'), or {_further(optimizer)}"
        ) from None


def _further(optimizer: torch.optim.Optimizer) -> str:
    """What else lets weights, gradients and moments fit."""
    cut = any(isinstance(parameter, LocalShard) for group in optimizer.param_groups for parameter in group["params"])
    return "more ranks" if cut else "optimizer_in_backward=True"


def _counts(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], float]:
    """What counts the steps that each parameter has taken: how often torch has written to it, and the optimizer's own
    count, which is all that shows of fused kernels and of bitsandbytes'. Where that is a tensor, how often it was
    written to: its value would have to be waited for."""
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own = optimizer.state.get(parameter, {}).get("step", 0)
            found[id(parameter), "written"] = version_of(parameter)
            found[id(parameter), "stepped"] = version_of(own) if isinstance(own, Tensor) else own
    return found
