"""What the error says of a run that ran out of memory for good: what was held, and the setting that would have helped.

Where and on which rows is said where it failed (`lowtide.step.rank_sync`); here come the bytes by category and, from
the table of techniques, what lowers the largest of them, with the effect that an estimate predicts.
"""

from __future__ import annotations

import logging

from lowtide.memory.allocators.measure import bytes_text, peak_bytes, unused_bytes
from lowtide.memory.allocators.out_of_memory import free_caches
from lowtide.memory.optimizers.states import predict_states
from lowtide.planner.advice import Advice, advise
from lowtide.planner.estimate import Estimate
from lowtide.planner.tracing_process import ROOM_BYTES
from lowtide.ranks.world import distributed
from lowtide.step.rank_sync import OutOfMemory
from lowtide.trainers.predictions import advised
from lowtide.trainers.reports.reported import Reported

MOST = 2
"""Settings that are named."""

logger = logging.getLogger(__name__)


def explained(trainer: Reported, error: OutOfMemory) -> OutOfMemory:
    """The same error with what was held and what to change. A part that cannot be made, as memory may still be short,
    is left out."""
    trainer.model.zero_grad()  # half formed, and in the way of what follows
    free_caches()
    text = [str(error)]
    for part in (_peak, _largest, _advice):
        try:
            text += part(trainer, error)
        except Exception as reason:  # the report is of another error
            logger.info(f"no {part.__name__.strip('_')} in the report of an out-of-memory: {reason}")
    return OutOfMemory(". ".join(text), error.failure)


def _peak(trainer: Reported, error: OutOfMemory) -> list[str]:
    held = _held(trainer)
    return [
        f"The peak was {bytes_text(sum(held.values()))}: {', '.join(f'{k} {bytes_text(v)}' for k, v in held.items())}"
    ]


def _largest(trainer: Reported, error: OutOfMemory) -> list[str]:
    return [f"The largest tensors then: {', '.join(error.failure.largest)}"] if error.failure else []


def _advice(trainer: Reported, error: OutOfMemory) -> list[str]:
    """What a change would save is predicted on one process only, and where there is memory for it."""
    affordable = not distributed() and unused_bytes() >= ROOM_BYTES
    rows = error.failure.row_tokens if error.failure is not None else ()
    now: Estimate | ValueError | None = None
    if affordable:
        advice, now = advised(trainer, _held(trainer), rows, beside=0)
    else:
        advice = advise(trainer.site, _held(trainer), rows)
    peak = now.tensor_bytes if isinstance(now, Estimate) else None
    return [f"What helps first: {'; or '.join(_text(each, peak) for each in advice[:MOST])}"] if advice else []


def _held(trainer: Reported) -> dict[str, int]:
    """Bytes by category at the peak; the rest beside the states counts as activations."""
    states = predict_states(trainer.model, trainer.optimizer_maker.name)
    rest = peak_bytes(trainer.args.device) - states.total
    found = {
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": states.optimizer or 0,
        "activations": max(rest, 0),
    }
    return {name: count for name, count in found.items() if count}


def _text(advice: Advice, now: int | None) -> str:
    exact = "exact" if advice.changes is None else "not exact"
    effect = ""
    if advice.peak_bytes is not None and now is not None:
        effect = f", predicted peak of tensors {bytes_text(advice.peak_bytes)} in place of {bytes_text(now)}"
    return f"{advice.text} ({exact}{effect})"
