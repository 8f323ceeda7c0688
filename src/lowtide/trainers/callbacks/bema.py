"""`BEMACallback`: a bias-corrected exponential moving average of the weights (arXiv 2508.00180), which a reference may
take."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from lowtide.engine.forward import causal_model
from lowtide.engine.reference import ArrivedPolicy, FrozenModel
from lowtide.own_files import share_weights
from lowtide.ranks.shards import is_sharded

logger = logging.getLogger(__name__)
FILE = "bema.safetensors"
"""Of the averages, in a checkpoint."""


@dataclass(eq=False, repr=False)
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
        update_ref_model: whether the reference that the policy is compared with takes the averaged weights.
        ref_model_update_freq: steps between two such moves of the reference.
        ref_model_update_after: the step before which it stays.

    In a trainer of lowtide's the averages are in checkpoints, and a run that resumes has the same. A reference moves in
    these trainers alone, and where weights are not cut over ranks.
    """

    update_freq: int = 400
    ema_power: float = 0.5
    bias_power: float = 0.2
    lag: int = 10
    update_after: int = 0
    multiplier: float = 1.0
    min_ema_multiplier: float = 0.0
    device: str = "cpu"
    update_ref_model: bool = False
    ref_model_update_freq: int = 400
    ref_model_update_after: int = 0
    running_model: Any = field(default=None, init=False)
    """The model with the averaged weights."""
    _first: dict[str, Tensor] = field(default_factory=dict, init=False)
    _average: dict[str, Tensor] = field(default_factory=dict, init=False)
    _reference: Mapping[str, Tensor] = field(default_factory=dict, init=False)
    """The weights of the reference, by the names of the policy's."""
    _saved: dict[str, Tensor] | None = field(default=None, init=False)
    """What a checkpoint holds that training goes on from."""
    _saves: bool = field(default=True, init=False)

    def belongs_to(self, trainer: Any) -> None:
        """Called by the trainer that has this callback, once it is made.

        Raises:
            ValueError: the reference is to move, and cannot; says what to do.
        """
        trainer.kept_beside.append(self)
        self._saves = trainer.args.should_save
        if self.update_ref_model:
            self._reference = _weights_of_reference(trainer)

    @torch.no_grad()
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.update_ref_model and not self._reference:
            raise ValueError(
                "BEMACallback(update_ref_model=True) moves a reference, and knows of none: pass it in `callbacks` of a "
                "trainer that has a reference, such as DPOTrainer"
            )
        model = _unwrapped(model)
        self.running_model = _copied(model, self.device)
        self._begin(model)
        self._restore()

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
        moves = state.global_step - self.ref_model_update_after
        if self.update_ref_model and moves >= 0 and moves % self.ref_model_update_freq == 0:
            averaged = dict(self.running_model.named_parameters())
            for name, weight in self._reference.items():
                weight.copy_(averaged[name])

    def _update(self, model: nn.Module, step: int) -> None:
        age = self.lag + self.multiplier * step
        share, correction = max(age**-self.ema_power, self.min_ema_multiplier), age**-self.bias_power
        copies = dict(self.running_model.named_parameters())
        for name, weight in _trained(model):
            now, average = weight.detach().to(self.device), self._average[name]
            average.mul_(1 - share).add_(now, alpha=share)
            copies[name].copy_(average + correction * (now - self._first[name]))

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Writes the averages into a checkpoint."""
        if self.running_model is None or not self._saves:
            return
        state = {name: {key: each.cpu().contiguous() for key, each in part.items()} for name, part in self._state()}
        save_file({f"{name}.{key}": each for name, part in state.items() for key, each in part.items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Reads the averages from a checkpoint; without them, averaging begins anew."""
        if not (folder / FILE).is_file():
            logger.warning(f"{folder} has no {FILE}: BEMACallback begins anew at this checkpoint")
            return
        self._saved = load_file(folder / FILE)
        if self.running_model is not None:
            self._restore()

    def _state(self) -> list[tuple[str, Mapping[str, Tensor]]]:
        running = dict(self.running_model.named_parameters())
        averaged = {name: running[name] for name in self._average}
        return [
            ("first", self._first),
            ("average", self._average),
            ("averaged", averaged),
            ("reference", self._reference),
        ]

    @torch.no_grad()
    def _restore(self) -> None:
        saved, self._saved = self._saved, None
        for name, part in self._state() if saved is not None else ():
            for key, each in part.items():
                assert saved is not None
                each.copy_(saved[f"{name}.{key}"])

    @torch.no_grad()
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir, "bema")
            self.running_model.save_pretrained(folder)
            share_weights(folder)
            logger.info(f"the averaged weights are in {folder}")


def _weights_of_reference(trainer: Any) -> dict[str, Tensor]:
    """Of each trained weight that of the reference.

    Raises:
        ValueError: there is no reference that could take the policy's averaged weights.
    """
    what, args = "BEMACallback(update_ref_model=True)", trainer.args
    reference = getattr(trainer.runner, "reference", None)
    if getattr(args, "precompute_ref_log_probs", False) or getattr(args, "follows", False):
        option = "precompute_ref_log_probs=True" if not args.follows else args.following.option
        raise ValueError(f"{what} and {option} both say what becomes of the reference: keep one of them")
    if is_sharded(trainer.training_run.model):
        raise ValueError(f"{what} does not go with weights that are cut over ranks: leave it out")
    found: Mapping[str, Tensor] = {}
    if isinstance(reference, ArrivedPolicy):
        found = reference.copies
    elif isinstance(reference, FrozenModel):
        found = dict(causal_model(reference.model).named_parameters())
    trained = dict(_trained(_unwrapped(trainer.training_run.model)))
    for name, weight in trained.items():
        if name not in found or found[name].shape != weight.shape or not found[name].is_floating_point():
            raise ValueError(
                f"{what} needs a reference with the weights that are trained, and has none with {name}: train all "
                "weights and leave ref_model_storage out; with adapters take sync_ref_model=True instead"
            )
    return {name: found[name] for name in trained}


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
