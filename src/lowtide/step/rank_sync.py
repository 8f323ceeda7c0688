"""Notices when a rank fails in a step, so that all ranks leave the step together.

A rank that raised in the middle of a step would leave the others waiting for it in their next exchange. So what a
rank does by itself runs under a `RankSync`, which keeps the failure; at the places where ranks meet anyway, each says
whether and how it failed, and then all of them raise, with nothing changed but gradients: `OutOfMemory`, after which
the step can be repeated, or else `NotFinite`, or the error that stopped one of them.
"""

from __future__ import annotations

import contextlib
import enum
import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.memory.allocators.largest_tensors import LargestTensors
from lowtide.memory.allocators.out_of_memory import drop_frames, first_line, is_out_of_memory
from lowtide.ragged import RaggedBatch
from lowtide.ranks.failures import RankFailed, tell, who_stopped
from lowtide.ranks.world import distributed, worst_of_ranks

HEAD = "linear_logprobs.py"
"""The file whose frames mean that the failure fell into the head."""
WAITED_FOR = (
    "Ranks with sharded weights, or that split sequences or layers, wait for one another within a step, which is "
    "therefore not repeated: lower `tokens_per_microbatch` or `per_device_train_batch_size`, or take more ranks"
)
"""What to do where memory runs out on a rank that others wait for."""


@dataclass(frozen=True)
class Failure:
    """Where a step ran out of memory; numbers and text alone, so that it holds nothing in memory."""

    phase: str
    """"baseline", "reference", "forward", "head", "backward", "exchange", "optimizer" or "evaluation"."""
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
        if not rows:
            return f"in {self.phase}: {self.error}"
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


class NotFinite(ValueError):
    """The loss of a step is not finite, on this rank or on another; raised on all of them."""

    def __init__(self, loss: float | None = None, rank: int | None = None) -> None:
        whose = "another rank" if rank is None else f"rank {rank}"
        super().__init__(f"{whose}'s loss is not finite" if loss is None else f"the loss is {loss}")
        self.loss = loss
        """None where it was another rank's."""


def check_finite(loss: Tensor) -> None:
    """Refuses a loss that is no number.

    Raises:
        NotFinite: it is none.
    """
    if not math.isfinite(value := loss.item()):
        raise NotFinite(value)


class End(enum.IntEnum):
    """How a rank came through; where several ranks did differently, the largest counts."""

    WELL = 0
    OUT_OF_MEMORY = 1
    NOT_FINITE = 2
    ERROR = 3


@dataclass
class RankSync:
    """The failure of this rank in one attempt at a step, if there is one."""

    phase: str = "forward"
    micro_batch: int = 0
    part: RaggedBatch | None = None
    device: torch.device | None = None
    """Where it runs, if not where that part is."""
    remedy: str = ""
    """What to do where memory runs out and nothing is repeated."""
    failure: Failure | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    """Any other than an exhausted memory, or one that says by itself what to do about it."""

    @contextlib.contextmanager
    def local(self, *, waited_for: bool = False) -> Iterator[None]:
        """Around what this rank does by itself: an error ends it, and is kept until ranks meet.

        Args:
            waited_for: other ranks wait inside for what this one computes, as where they split sequences; an error
                is then raised at once, so that they need not wait for ever. A loss that is no number all of them see.

        Raises:
            OutOfMemory: this rank ran out of memory while others wait for it.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
                self.error = error
                if waited_for and self.end != End.NOT_FINITE:
                    raise
                return
            device = torch.device("cpu") if self.part is None else self.part.token_ids.device
            largest = LargestTensors(self.device or device)
            largest.take_in_frames(error.__traceback__)
            phase = self._phase(error.__traceback__)
            drop_frames(error)  # only then is there memory for what follows
            largest.take_in_living()
            rows = tuple(self.part.row_tokens) if self.part is not None else ()
            self.failure = Failure(phase, self.micro_batch, rows, first_line(error), largest.text())
            self.part = None
        if waited_for and self.failure is not None:
            self.remedy = self.remedy or WAITED_FOR
            raise self._exhausted()

    def _phase(self, trace: TracebackType | None) -> str:
        in_head = any(frame.f_code.co_filename.endswith(HEAD) for frame, _ in traceback.walk_tb(trace))
        return "head" if self.phase == "forward" and in_head else self.phase

    @property
    def failed(self) -> bool:
        return self.end != End.WELL

    @property
    def end(self) -> End:
        """How this rank came through."""
        if self.error is not None:
            return End.NOT_FINITE if isinstance(self.error, NotFinite) else End.ERROR
        return End.WELL if self.failure is None else End.OUT_OF_MEMORY

    def meet(self, device: torch.device) -> None:
        """Where ranks exchange.

        Raises:
            OutOfMemory: one of them ran out of memory.
            NotFinite: the loss of one of them is not finite.
            RankFailed: another one stopped at something else.
            Exception: what else stopped this rank.
        """
        worst, rank = met(self.end, self.error, device)
        if worst == End.NOT_FINITE:
            raise NotFinite(rank=rank)
        if worst == End.OUT_OF_MEMORY:
            raise self._exhausted(rank)

    def _exhausted(self, rank: int = 0) -> OutOfMemory:
        """What says that memory ran out, on which rank, and where it was on this one."""
        text = str(self.failure or f"rank {rank} ran out of memory")
        if self.remedy:
            text = f"{'out of memory ' if self.failure else ''}{text}. {self.remedy}"
        return OutOfMemory(text, self.failure)


RANKS = 1 << 20
"""More than there are ranks."""


def met(end: End, error: Exception | None, device: torch.device) -> tuple[End, int]:
    """(how the ranks came through that did worst, the last of them); all ranks ask at the same place.

    Args:
        error: what stopped this one, and is raised once all of them know.

    Raises:
        RankFailed: another one stopped at something other than memory or a loss that is no number.
    """
    worst = end * RANKS
    if distributed():
        if error is not None and end != End.OUT_OF_MEMORY:
            tell(error)
        try:
            worst = worst_of_ranks(worst + dist.get_rank(), device)
        except Exception:
            if error is None:
                raise
    if error is not None:
        raise error
    if worst // RANKS == End.ERROR:
        raise RankFailed(who_stopped())
    return End(worst // RANKS), worst % RANKS


def random_state(device: torch.device) -> list[Tensor]:
    """The state of the generators that a forward draws from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    """Puts back what `random_state` gave."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
