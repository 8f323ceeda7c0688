"""`BEMACallback`: a bias-corrected exponential moving average of the weights (arXiv 2508.00180)."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from lowtide.engine.forward import causal_model
from lowtide.own_files import share_weights

logger = logging.getLogger(__name__)


class BEMACallback(TrainerCallback):
    """Keeps a stabilized copy of the trained weights, and saves it to `bema` in the output folder.

    Of the weights w at step t, and those w0 when averaging began, the copy has `ema + alpha * (w - w0)`, where `ema`
    moves to w by `beta = max((lag + multiplier * t) ** -ema_power, min_ema_multiplier)`, and
    `alpha = (lag + multiplier * t) ** -bias_power`. It takes twice the trained weights' bytes on `device`, and the
    model's once more. With adapters these alone are averaged and saved.

    Args:
        update_freq: steps between two updates.
        ema_power: how fast the average slows down; 0 is no averaging.
        bias_power: how fast the correction fades; 0 keeps it at 1.
        lag: steps that the schedule begins with.
        update_after: the step at which averaging begins.
        multiplier: what a step counts in the schedule.
        min_ema_multiplier: the least share that the average moves by.
        device: where the copies are.
    """

    def __init__(
        self,
        update_freq: int = 400,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: int = 10,
        update_after: int = 0,
        multiplier: float = 1.0,
        min_ema_multiplier: float = 0.0,
        device: str = "cpu",
    ) -> None:
        self.update_freq = update_freq
        self.ema_power = ema_power
        self.bias_power = bias_power
        self.lag = lag
        self.update_after = update_after
        self.multiplier = multiplier
        self.min_ema_multiplier = min_ema_multiplier
        self.device = device
        self.running_model: Any = None
        """The model with the averaged weights."""
        self._first: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model = _unwrapped(model)
        self.running_model = _copied(model, self.device)
        self._begin(model)

    def _begin(self, model: nn.Module) -> None:
        self._first = {name: weight.detach().clone().to(self.device) for name, weight in _trained(model)}
        self._average = {name: weight.clone() for name, weight in self._first.items()}

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model, since = _unwrapped(model), state.global_step - self.update_after
        if since == 0:
            self._begin(model)
        elif since > 0 and since % self.update_freq == 0:
            self._update(model, state.global_step)

    def _update(self, model: nn.Module, step: int) -> None:
        age = self.lag + self.multiplier * step
        share, correction = max(age**-self.ema_power, self.min_ema_multiplier), age**-self.bias_power
        copies = dict(self.running_model.named_parameters())
        for name, weight in _trained(model):
            now, average = weight.detach().to(self.device), self._average[name]
            average.mul_(1 - share).add_(now, alpha=share)
            copies[name].copy_(average + correction * (now - self._first[name]))

    @torch.no_grad()
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir, "bema")
            self.running_model.save_pretrained(folder)
            share_weights(folder)
            logger.info(f"the averaged weights are in {folder}")


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


def _unwrapped(model: Any) -> Any:
    """The model inside other libraries' wrappers; one with adapters keeps those."""
    inner = causal_model(model)
    while model is not inner and not hasattr(model, "peft_config"):
        model = model.module
    return model


def _copied(model: Any, device: str) -> Any:
    """A copy of a model on a device, without the gradients that it may hold."""
    held = {name: weight.grad for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = None
    try:
        return copy.deepcopy(model).to(device).requires_grad_(False)
    finally:
        for name, weight in model.named_parameters():
            weight.grad = held[name]
