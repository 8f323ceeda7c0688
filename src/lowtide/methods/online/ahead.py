"""Options of completions that a server writes beside training, under the names of TRL 1.16's asynchronous GRPO.

TRL's trainer takes completions as they come, and drops those that are older than `max_staleness`. Here windows are
paced: each is written by the weights as they were a fixed number of windows before, and none is dropped. So a run is
the same each time, and is resumed with the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.methods.online.rollouts import ReferredOptions
from lowtide.option import COUNT, NOT_NEGATIVE, POSITIVE, Range, option
from lowtide.rollout.generators.vllm.limits import Limits


@dataclass(kw_only=True)
class AheadOptions(ReferredOptions):
    """Of methods that correct for completions which older weights wrote."""

    max_staleness: int = option(
        0,
        "Optimizer steps that the weights which wrote a window may be behind when its turn comes. 0: writes and learns "
        "in turns.",
        NOT_NEGATIVE,
    )
    queue_maxsize: int = option(1024, "The most completions that are asked for before their turn.", COUNT)
    weight_sync_steps: int = option(
        1, "The most optimizer steps between copies of the weights; a window is always preceded by one.", COUNT
    )
    max_inflight_tasks: int = option(
        -1,
        "The most completions that a rank asks a server for at a time; -1: all of a batch, 32 of `vllm serve`.",
        Range(least=1, also=-1),
    )
    request_timeout: float | None = option(
        None, "Seconds that a server may take for a request of completions. None: `vllm_server_timeout`.", POSITIVE
    )
    weight_sync_timeout: float | None = option(
        None,
        "Seconds that a server may take for a copy of the weights. None: `vllm_server_timeout` for each bucket.",
        POSITIVE,
    )
    heartbeat_stale_after_s: float = option(
        300.0, "Seconds that a window may be rewarded for beside training, before the run ends.", POSITIVE
    )

    @property
    def windows_ahead(self) -> int:
        """Windows that are asked for before they are learned from."""
        steps = self.gradient_accumulation_steps  # type: ignore[attr-defined]
        repeats = self.steps_of_generation * self.num_iterations
        fresh = self.max_staleness * steps // repeats
        held = max(steps // repeats, 1)  # those that are written by one copy of the weights, which is all a server has
        return min(fresh, held, self.queue_maxsize // self.written_at_a_time)

    @property
    def server_limits(self) -> Limits:
        at_a_time = None if self.max_inflight_tasks < 0 else self.max_inflight_tasks
        times = {"request_timeout": self.request_timeout, "weight_sync_timeout": self.weight_sync_timeout}
        held = self.windows_ahead + 2  # those that windows are written by, and the newest
        return replace(super().server_limits, **times, max_inflight_tasks=at_a_time, adapters_held=held)

    def check_rollouts(self) -> None:
        """As of any rollouts.

        Raises:
            ValueError: likewise.
        """
        super().check_rollouts()
        repeats = self.steps_of_generation * self.num_iterations
        steps = -(-repeats // self.gradient_accumulation_steps)  # type: ignore[attr-defined]
        if self.weight_sync_steps > steps:
            raise ValueError(
                f"weight_sync_steps={self.weight_sync_steps} is above {steps}, the optimizer steps that learn from a "
                "window, each of which is written by weights of its own: set it to 1, or raise steps_per_generation"
            )
        if not self.max_staleness:
            return
        beside = f"max_staleness={self.max_staleness} has completions written beside training,"
        if not self.served:
            raise ValueError(
                f"{beside} which a server does: set use_vllm=True and vllm_mode='server', or max_staleness=0"
            )
        if not self.corrects:
            raise ValueError(
                f"{beside} by older weights, for which vllm_importance_sampling_correction=True corrects: set it, or "
                "max_staleness=0"
            )
        if self.max_staleness < steps:
            raise ValueError(
                f"{beside} by weights that are at least {steps} steps behind, since {steps} optimizer steps learn from "
                f"a window: set max_staleness to {steps} or above, or to 0"
            )
        if self.queue_maxsize < self.written_at_a_time:
            raise ValueError(
                f"queue_maxsize={self.queue_maxsize} holds no window of {self.written_at_a_time} completions, which "
                "max_staleness asks for before their turn: raise it to that, or lower steps_per_generation"
            )
