"""Who goes backward and steps: loss scaling, the norm of the gradients, clipping, the optimizer's step, zeroing.

`Updater` is for weights that lie whole on each rank. Another way to hold weights is another class with these methods.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.compat.torch import let_go, parameters_of, reset_fully_sharded, without_exchange
from lowtide.engine.forward import direct_weights, tensor_parallel_of
from lowtide.memory.optimizers.narrow_step import unwrap_optimizer
from lowtide.memory.weights.streaming import stream_of
from lowtide.ops.logits.split_vocabulary import exchanging_nothing
from lowtide.ranks.replicas import Averaging, broadcast_weights
from lowtide.ranks.shards import is_gathered, local_gradients, local_twin, norm_of
from lowtide.ranks.world import distributed
from lowtide.step.recovery import surviving_optimizer_step

REMEDIES = "Lower `learning_rate`, set `max_grad_norm`, or train in bfloat16 or float32 rather than float16"
CLOSE = 0.99
"""Gradients whose norm is below this share of what they are clipped to stay as they are: torch would multiply by 1."""


class NotFiniteStep(ValueError):
    """A loss or a gradient is no number, so that a step would ruin the weights."""


class Updater:
    """Backward, scaling, norm, clipping, step and zeroing, for weights that lie whole on each rank.

    Args:
        optimizer: wrapped or not; may be set later, before the first step.
        accelerator: of accelerate, whose loss scaler float16 needs; None goes backward as torch does.
    """

    def __init__(self, optimizer: Any = None, accelerator: Any = None) -> None:
        self.optimizer, self.accelerator = optimizer, accelerator
        self._step: Callable[..., Any] | None = None
        self._averaging: Averaging | None = None

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer itself, below what wraps it."""
        return unwrap_optimizer(self.optimizer)

    @property
    def scaler(self) -> Any:
        """The loss scaler of float16; None elsewhere."""
        return None if self.accelerator is None else self.accelerator.scaler

    @property
    def grad_scale(self) -> float:
        """What backward multiplies the loss by."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def adopt(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Once the optimizer of a training is made, before it has states."""

    def policy(self, model: nn.Module) -> nn.Module:
        """What runs the micro-batches that are trained on: the model, or a wrapper of it."""
        return model

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Around a micro-batch that others of the same step follow."""
        return contextlib.nullcontext()

    def start(self, model: nn.Module) -> None:
        """Before the first step: ranks have equal weights."""
        if distributed():
            stream = stream_of(model)
            broadcast_weights(model, keep=() if stream is None else stream.weights)

    def backward(self, loss: Tensor) -> None:
        if self.accelerator is None:
            loss.backward()
        else:
            self.accelerator.backward(loss)

    def exchange(self, model: nn.Module) -> Averaging | None:
        """What brings the gradients of all ranks together; None on one."""
        if self._averaging is None and distributed():
            self._averaging = self.averaging(model)
        return self._averaging

    def averaging(self, model: nn.Module, group: Any = None) -> Averaging:
        """What averages the gradients of ranks that hold the same weights, by default of all."""
        first, last = direct_weights(model)
        return Averaging(model, first, last, group)

    def abandon(self, model: nn.Module) -> None:
        """After a step that was left in the middle."""

    @contextlib.contextmanager
    def rehearsing(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """Around a rehearsal; gives what the plan of its step has otherwise."""
        yield {}

    def train(self) -> None:
        """Tells schedule-free optimizers that steps follow."""
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()

    def has_gradients(self, model: nn.Module) -> bool:
        """Whether the gradients of a step are there."""
        return any(p.grad is not None for p in parameters_of(model))

    def not_reached(self, model: nn.Module) -> list[str]:
        """The weights that are trained and have no gradient, by name, where those of others are there; none where
        gradients lie elsewhere."""
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        names = [name for name, gradient in gradients.items() if gradient is None]
        return [] if len(names) == len(gradients) or stream_of(model) is not None else names

    def norm(self, model: nn.Module, clip_at: float | None = None) -> Tensor:
        """The norm of the gradients as they are before they are clipped to `clip_at`.

        Raises:
            NotFiniteStep: it is no number, and there is no loss scaler, which would skip the step.
        """
        if self.scaler is not None:
            self.accelerator.unscale_gradients()
        if (stream := stream_of(model)) is not None:
            stream.settle()
        gradients = {p: p.grad for p in parameters_of(model) if p.grad is not None}
        norm = self.total_norm(gradients)
        self.check_norm(norm, model)
        if clip_at is not None and (self.scaler is not None or norm.item() > CLOSE * clip_at):
            nn.utils.clip_grads_with_norm_(map(local_twin, gradients), clip_at, norm)
        return norm

    def total_norm(self, gradients: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """The norm of all gradients together."""
        return norm_of([*gradients.values()])

    def check_norm(self, norm: Tensor, model: nn.Module) -> None:
        """Refuses to step along a model's gradients that are no numbers; where a loss scaler does, by skipping a step.

        Raises:
            NotFiniteStep: the norm is none, though the loss is; names the first such gradient of those that are there.
        """
        if self.scaler is not None or math.isfinite(norm.item()):
            return
        gradients = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        worst = next((name for name, gradient in gradients if not torch.isfinite(gradient).all()), None)
        what = f"the gradient of {worst}" if worst else "the norm of all gradients"
        raise NotFiniteStep(f"the loss is finite, {what} is not. {REMEDIES}")

    def take_over(self, step: Callable[..., Any]) -> Callable[[], None]:
        """Lets `optimizer.step`, which others call, run `step`, which is to call this one's; returns what undoes it."""
        plain = self._step = self.optimizer.step

        @functools.wraps(plain)
        def taken_over(*args: Any) -> Any:
            return step(*args)

        def undo() -> None:
            self.optimizer.step, self._step = plain, None

        self.optimizer.step = taken_over
        return undo

    def step(self, *args: Any) -> Any:
        """The optimizer's step, which survives an out-of-memory that comes before it changes anything."""
        return surviving_optimizer_step(self.inner, self._step or self.optimizer.step, *args)

    def zero_grad(self, model: nn.Module) -> None:
        model.zero_grad()


class ShardedUpdater(Updater):
    """The same for weights that `fully_shard` has cut: gradients are reduced to shards in each backward, the optimizer
    steps the parts that lie here, and a norm is of all of them.

    No rank can repeat a step by itself, since the others wait for it in the next forward; only a rehearsal, which
    exchanges nothing, is repeated.
    """

    def start(self, model: nn.Module) -> None:
        """Ranks got equal weights before these were cut."""

    def exchange(self, model: nn.Module) -> None:
        """Nothing is left to exchange after backward."""

    def abandon(self, model: nn.Module) -> None:
        reset_fully_sharded(model)

    @contextlib.contextmanager
    def rehearsing(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """Weights are gathered, and gradients reduced, with their memory and without the other ranks: each rank finds
        out for itself whether it has room, and then they meet."""
        with without_exchange(model), exchanging_nothing():
            yield {"exchange": lambda: lambda: None}

    def zero_grad(self, model: nn.Module) -> None:
        let_go(model)
        super().zero_grad(model)

    def step(self, *args: Any) -> Any:
        with local_gradients(self.inner):
            return super().step(*args)


class SplitUpdater(Updater):
    """The same for weights of which each rank has a part, and computes with it (`engine.weights.sharded.split_layers`):
    the gradients of a part are complete where it lies, those of what is whole are equal on all ranks, and ranks that
    hold the same parts average theirs."""

    def start(self, model: nn.Module) -> None:
        """Ranks got equal weights before these were split."""

    def exchange(self, model: nn.Module) -> Averaging | None:
        ranks = tensor_parallel_of(model)
        assert ranks is not None, "the layers of this model are not split"
        if self._averaging is None and ranks.replicas is not None:
            self._averaging = self.averaging(model, ranks.replicas)
        return self._averaging

    def step(self, *args: Any) -> Any:
        with local_gradients(self.inner):
            return super().step(*args)


def updater_of(model: nn.Module) -> Updater:
    """Who goes backward and steps, by where a model's weights lie."""
    if is_gathered(model):
        return ShardedUpdater()
    return SplitUpdater() if tensor_parallel_of(model) is not None else Updater()
