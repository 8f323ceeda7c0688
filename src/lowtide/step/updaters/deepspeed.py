"""DeepSpeed's ZeRO as the updater of a step: its engine goes backward, brings gradients together, clips and steps.

DeepSpeed is told of an accumulation of 1, and before each micro-batch whether it is the last of the step: the whole
batch of a step is cut by lowtide. It divides gradients by the number of ranks, as DistributedDataParallel does, so that
the step's loss, whose mean over ranks is that of the whole batch, is right as it is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.compat.deepspeed import engine_of, going_on, masters
from lowtide.compat.torch import mark_stepped
from lowtide.engine.weights.sharded.zero import stop_gathering
from lowtide.memory.allocators.host_heap import trim_heap
from lowtide.ranks.shards import Place
from lowtide.step.updaters.updater import NotFiniteStep, Updater

REMEDIES = "The weights are those before the step. Lower `learning_rate`, or set `max_grad_norm`"

MASTER = "master"
"""The name of a flat part of the weights among its states."""


class DeepSpeedUpdater(Updater):
    """Backward, exchange, norm, clipping and step by an engine of DeepSpeed.

    Args:
        config: of DeepSpeed, with every value filled in.
        device: where the model runs.
    """

    engine: Any = None

    def __init__(self, config: Mapping[str, Any], device: torch.device) -> None:
        super().__init__()
        self.config, self.device = config, device
        self.known_norm = torch.zeros(())
        """The norm of the last step's gradients, once it is taken."""

    def adopt(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Makes the engine: from here on the optimizer steps the parts that lie on this rank. Another training by the
        same engine begins with the weights that the model has by then."""
        if self.engine is not None:
            self.engine.optimizer.refresh_fp32_params()
            return
        stop_gathering(model)
        self.engine = engine_of(model, optimizer, self.config, self.device)
        self.engine.set_gradient_accumulation_boundary(True)
        _save_parts(optimizer, self.engine)

    def policy(self, model: nn.Module) -> nn.Module:
        return self.engine

    def start(self, model: nn.Module) -> None:
        """Ranks got equal weights when the engine was made."""

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        with going_on(self.engine):
            yield

    def exchange(self, model: nn.Module) -> None:
        """Nothing is left to exchange after the last backward."""

    def has_gradients(self, model: nn.Module) -> bool:
        return True

    def norm(self, model: nn.Module, clip_at: float | None = None) -> Tensor:
        """A number that is filled in by the step, which clips."""
        self.known_norm = torch.zeros(())
        return self.known_norm

    def step(self, *args: Any) -> None:
        """The engine's step.

        Raises:
            NotFiniteStep: gradients are no numbers; the weights are as before.
        """
        if self.device.type == "cpu":
            trim_heap(near=1)  # gradients that were brought together leave holes, beside which the step takes buffers
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        if not self.engine.was_step_applied():
            raise NotFiniteStep(f"the loss is finite, the norm of all gradients is not. {REMEDIES}")
        self.known_norm.fill_(math.nan if norm is None else float(norm))  # a config may leave it out
        mark_stepped(self.optimizer)


def _save_parts(optimizer: Any, engine: Any) -> None:
    """Lets an optimizer's `state_dict` be that of the parts which lie on this rank, the weights that it steps among
    them: in bfloat16 those have more digits than the model's own."""
    kind = f"zero{max(engine.zero_optimization_stage(), 2)}"  # stages 1 and 2 cut states alike

    def state_dict() -> dict[str, Any]:
        state = {n: {**optimizer.state[part], MASTER: part.detach()} for n, part in enumerate(masters(engine))}
        groups = [{name: value for name, value in each.items() if name != "params"} for each in optimizer.param_groups]
        return {"state": state, "param_groups": groups, "kind": kind}

    def load_state_dict(saved: Mapping[str, Any]) -> None:
        parts = masters(engine)
        sizes = [each[MASTER].shape for each in saved["state"].values() if MASTER in each]
        if saved.get("kind") != kind or sizes != [part.shape for part in parts]:
            raise ValueError(
                f"the optimizer's states were written by {saved.get('kind', 'a run without DeepSpeed')}, and this run "
                f"is {kind} with other parts: resume with the same config, or with resume_without_states=True"
            )
        for part, values in zip(parts, saved["state"].values(), strict=True):
            part.detach().copy_(values[MASTER])
            for name, value in values.items():
                if name != MASTER:
                    own = optimizer.state[part].get(name)
                    optimizer.state[part][name] = value.to(own) if isinstance(own, Tensor) else value
        for group, then in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update(then)

    optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict
    optimizer.place = Place((0,), dist.get_rank(), dist.get_world_size())
