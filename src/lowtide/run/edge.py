"""What a trainer's public calls do about failures that are not their own: an exhausted memory, and lost ranks.

Within a step both have a mechanism of their own (`lowtide.step.recovery`, `lowtide.step.rank_sync`). Here is everything
around it, which ends with one message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lowtide.memory.allocators.out_of_memory import drop_frames, first_line, free_caches, is_out_of_memory
from lowtide.ranks.failures import RankFailed, stopping_together
from lowtide.step.rank_sync import OutOfMemory

TO_DO = {
    "loading the model": "Load it in fewer bytes (dtype bfloat16 in model_init_kwargs, or a quantized base with "
    "adapters), or take a smaller model",
    "making the adapters": "Lower their rank `r`, name fewer `target_modules`, or load the base in bfloat16",
    "making the reference": "A frozen copy of the model does not fit: train new adapters (use_peft=True), whose "
    "reference is the model without them",
    "preparing the dataset": "Lower `dataset_num_proc`, read the rows as a stream, or take fewer of them",
    "precomputing the reference": "Lower `precompute_ref_batch_size`, or set `tokens_per_microbatch`",
    "rewarding what is written before training": "Set `tokens_per_generation_batch`, or lower `max_completion_length`",
    "making the trainer": "Take a smaller model, adapters, or an optimizer that keeps less",
    "training": "It was outside of forward, backward and the optimizer's step, where a step can be repeated: leave "
    "the process more memory, and resume from the last checkpoint",
    "evaluating": "Lower `per_device_eval_batch_size`, or set `tokens_per_microbatch`",
    "predicting": "Lower `per_device_eval_batch_size`, or set `tokens_per_microbatch`",
    "saving the model": "Leave the process more memory, and save again",
}
"""What is done, and what to do where memory runs out in it."""
RESUME = "Look at what that rank printed, and resume from the last checkpoint (resume_from_checkpoint)"
RESUMED = ("training", "evaluating", "predicting", "saving the model")
"""After what `RESUME` is said."""
START_AGAIN = "Look at what that rank printed, and start again"


@contextlib.contextmanager
def out_of_memory_while(doing: str, *, or_else: str = "") -> Iterator[None]:
    """Names what was done and what to do where memory runs out, on the device or on the host.

    Args:
        doing: of `TO_DO`.
        or_else: what else can be done, of which not every run has the option.

    Raises:
        OutOfMemory: memory ran out.
    """
    try:
        yield
        return
    except BaseException as error:
        if isinstance(error, OutOfMemory | RankFailed) or not is_out_of_memory(error):
            raise
        drop_frames(error)
        text = first_line(error)
    free_caches()
    raise OutOfMemory(f"out of memory while {doing}: {text}. {TO_DO[doing]}{or_else}") from None


@contextlib.contextmanager
def edge(doing: str) -> Iterator[None]:
    """Around a public call of a trainer: `out_of_memory_while`, and other ranks that stop.

    Raises:
        OutOfMemory: memory ran out.
        RankFailed: another rank stopped.
    """
    with stopping_together(doing, RESUME if doing in RESUMED else START_AGAIN), out_of_memory_while(doing):
        yield
