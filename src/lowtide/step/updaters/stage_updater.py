"""Who goes backward and steps where each rank has a stage of the model: gradients and their norm over stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.engine.forward import direct_weights
from lowtide.engine.over_ranks.stage import Stage
from lowtide.ranks.replicas import Averaging
from lowtide.ranks.shards import Place, norm_of
from lowtide.step.updaters.updater import Updater


@dataclass
class StageExchange:
    """Brings together the gradients of weights that several ranks have: embedding and head that are one weight, and
    those of other pipelines, which have other rows."""

    stage: Stage
    averaging: Averaging | None
    overlap: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    def complete(self) -> Callable[[], None]:
        """Exchanges; returns what drops the gradients that no rank had."""
        tied = self.stage.tied
        if tied is not None and tied.requires_grad:
            tied.grad = torch.zeros_like(tied) if tied.grad is None else tied.grad
            dist.all_reduce(tied.grad, group=self.stage.pipeline.ends)
        return _nothing if self.averaging is None else self.averaging.complete()

    def forgo(self) -> None:
        """Takes part in the exchanges with other pipelines, for a rank that failed."""
        if self.averaging is not None:
            self.averaging.forgo()


def _nothing() -> None:
    """What is dropped where no gradient is averaged."""


class PipelineUpdater(Updater):
    """Backward, norm, clipping and step where each rank has a stage of the model: a norm is of all stages."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self._exchange: StageExchange | None = None

    def adopt(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Its states are this rank's, so that checkpoints have a file for each."""
        vars(optimizer)["place"] = Place((), self.stage.pipeline.rank, self.stage.pipeline.size)

    def start(self, model: nn.Module) -> None:
        """Ranks got equal weights before these were cut."""

    def exchange(self, model: nn.Module) -> Any:
        if self._exchange is None:
            first, last = direct_weights(model)
            replicas = self.stage.pipeline.replicas
            averaging = None if replicas is None else Averaging(model, first, last, replicas)
            self._exchange = StageExchange(self.stage, averaging)
        return self._exchange

    def total_norm(self, gradients: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """Of all stages; what the first and the last have both counts once."""
        pipeline = self.stage.pipeline
        counted = [g for p, g in gradients.items() if p is not self.stage.tied or pipeline.is_first]
        own = norm_of(counted)
        return pipeline.added_up(own.double() ** 2).sqrt().to(own.dtype)
