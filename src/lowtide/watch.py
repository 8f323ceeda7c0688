"""Notices when a rank runs out of memory in a step, so that all ranks leave the step together.

A rank that raised in the middle of a step would leave the others waiting for it in their next exchange. So what a
rank does by itself runs under a `Watch`, which keeps the failure; at the places where ranks meet anyway, each says
whether it failed, and then all of them raise `OutOfMemory`, with nothing changed but gradients.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.memory.living import largest_tensors
from lowtide.memory.out_of_memory import is_out_of_memory
from lowtide.metrics import distributed
from lowtide.ragged import RaggedBatch

HEAD = "linear_logprobs.py"
"""The file whose frames mean that the failure fell into the head."""


@dataclass(frozen=True)
class Failure:
    """Where a step ran out of memory; numbers and text alone, so that it holds nothing in memory."""

    phase: str
    """"baseline", "forward", "head", "backward" or "optimizer"."""
    micro_batch: int
    row_tokens: tuple[int, ...]
    """Tokens of each row of the micro-batch."""
    error: str
    largest: tuple[str, ...] = ()
    """The largest tensors that lived then, as text."""

    def __str__(self) -> str:
        rows = ", ".join(f"{tokens:,}" for tokens in self.row_tokens[:8]) + (
            ", ..." if len(self.row_tokens) > 8 else ""
        )
        return (
            f"in {self.phase} of micro-batch {self.micro_batch} "
            f"({len(self.row_tokens)} row(s) of {rows} tokens): {self.error}"
        )


class OutOfMemory(RuntimeError):
    """A step ran out of memory, on this rank or on another; raised on all of them."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure
        """None where it was another rank's."""


@dataclass
class Watch:
    """The failure of this rank in one attempt at a step, if there is one."""

    phase: str = "forward"
    micro_batch: int = 0
    part: RaggedBatch | None = None
    failure: Failure | None = field(default=None, init=False)

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Around what this rank does by itself: an exhausted memory ends it, and is kept."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            rows = tuple(self.part.row_tokens) if self.part is not None else ()
            text = str(error).strip().split("\n")[0] or type(error).__name__
            device = torch.device("cpu") if self.part is None else self.part.token_ids.device
            largest = largest_tensors(device)  # while the frames of the failure hold them
            self.failure = Failure(self._phase(error.__traceback__), self.micro_batch, rows, text, largest)
            traceback.clear_frames(error.__traceback__)  # they hold the tensors that did not fit
            self.part = None

    def _phase(self, trace: TracebackType | None) -> str:
        files = [frame.filename for frame in traceback.extract_tb(trace)]
        return "head" if self.phase == "forward" and any(name.endswith(HEAD) for name in files) else self.phase

    def meet(self, device: torch.device) -> None:
        """Where ranks exchange.

        Raises:
            OutOfMemory: one of them failed.
        """
        failed = self.failure is not None
        if distributed():
            flag = torch.tensor([float(failed)], device=device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            failed = bool(flag.item())
        if failed:
            raise OutOfMemory(str(self.failure or "another rank ran out of memory"), self.failure)


def random_state(device: torch.device) -> list[Tensor]:
    """The state of the generators that a forward draws from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    """Puts back what `random_state` gave."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
