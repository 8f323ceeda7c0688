"""`SyncRefModelCallback`: moves a reference model towards the policy (TR-DPO, arXiv 2404.09656)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback


class SyncRefModelCallback(TrainerCallback):
    """Every `ref_model_sync_steps` steps, `ref_model_mixup_alpha` of the policy's weights goes into the reference.

    `DPOConfig(sync_ref_model=True)` does so by itself, for policies with adapters and quantized weights too. This is
    for scripts that hold the reference themselves.

    Args:
        ref_model: with the policy's parameters, one for one; None does nothing.
        accelerator: unwraps the policy.
    """

    def __init__(self, ref_model: nn.Module | None, accelerator: Any = None) -> None:
        self.ref_model, self.accelerator = ref_model, accelerator

    @staticmethod
    @torch.no_grad()
    def sync_target_model(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
        """Sets each parameter of the target to `(1 - alpha) * target + alpha * model`, on the target's device."""
        for theirs, ours in zip(target_model.parameters(), model.parameters(), strict=True):
            theirs.lerp_(ours.detach().to(theirs), alpha)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.ref_model is None or state.global_step % args.ref_model_sync_steps:
            return
        model = kwargs["model"]
        if self.accelerator is not None:
            model = self.accelerator.unwrap_model(model)
        self.sync_target_model(model, self.ref_model, args.ref_model_mixup_alpha)
