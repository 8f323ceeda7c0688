"""The reference that a policy is compared with: its log-probabilities, at the lowest price that the run allows.

In order of preference: the policy with its adapters switched off, which costs nothing; log-probabilities computed
before training, after which no reference is resident; a frozen copy.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.engine.forward import install, score_shared
from lowtide.ragged import RaggedBatch


class AdapterOff:
    """The policy without its adapters: the model that they were put on."""

    def __init__(self, model: nn.Module, *, padding_free: bool) -> None:
        self.model, self.padding_free = model, padding_free

    def __call__(self, batch: RaggedBatch) -> Tensor:
        with adapters_off(self.model):
            return logprobs(self.model, batch, padding_free=self.padding_free)


class FrozenModel:
    """Another model, or a copy of the policy as it was; or the policy itself, for as long as it is not trained."""

    def __init__(self, model: nn.Module, *, padding_free: bool) -> None:
        self.model, self.padding_free = model, padding_free

    @classmethod
    def of(cls, model: nn.Module, *, padding_free: bool) -> FrozenModel:
        """Another model, which is frozen and made ready here."""
        install(model, padding_free=padding_free)
        return cls(model.eval().requires_grad_(False), padding_free=padding_free)

    @classmethod
    def copy_of(cls, model: nn.Module, *, padding_free: bool = True) -> FrozenModel:
        """A copy of a model as it is, in the dtype that it is stored in."""
        return cls.of(copy.deepcopy(model), padding_free=padding_free)

    def __call__(self, batch: RaggedBatch) -> Tensor:
        return logprobs(self.model, batch, padding_free=self.padding_free)

    @torch.no_grad()
    def follow(self, policy: nn.Module, share: float) -> None:
        """Moves the weights towards the policy's: `share` of the policy's and the rest of its own."""
        theirs = dict(policy.named_parameters())
        for name, parameter in self.model.named_parameters():
            parameter.lerp_(theirs[name].detach().to(parameter), share)


@torch.no_grad()
def logprobs(model: nn.Module, batch: RaggedBatch, *, padding_free: bool) -> Tensor:
    """[scores]: a model's log-probabilities of a micro-batch, without gradient and without dropout."""
    training = model.training
    model.eval()
    try:
        return score_shared(model, batch, padding_free=padding_free).logprobs
    finally:
        model.train(training)


@contextlib.contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The base model of a PEFT model, wrapped by others or not."""
    while not hasattr(model, "disable_adapter"):
        model = model.module
    with model.disable_adapter():
        yield
