"""Muon for the matrices of a model's layers, AdamW for what else is trained: one optimizer over both.

Muon (Keller Jordan, 2024) keeps one moment of a matrix, and steps along the nearest orthogonal matrix to it, which a
few products in bfloat16 find (Newton-Schulz). It is for matrices between hidden states: embeddings, heads, norms and
biases are AdamW's. Both are torch's own (`torch.optim.Muon` and `torch.optim.AdamW`), each stepping its groups on the
states that this optimizer holds, so schedules, checkpoints and steps one parameter at a time know a single one.

The step's length is that of "Muon is Scalable for LLM Training" (arXiv 2502.16982, `match_rms_adamw`): 0.2 times the
root of the larger side, so that learning rate and weight decay are those of AdamW, for both kinds alike. torch's
default, `original`, wants rates some ten times as large for the matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from lowtide.compat.transformers import checkpointed_layers

ADJUSTMENTS = ("match_rms_adamw", "original")
"""What the length of a matrix's step follows, as `torch.optim.Muon` names it."""


class MuonWithAdamW(Optimizer):
    """`torch.optim.Muon` for some parameters, `torch.optim.AdamW(fused=True)` for the others.

    Args:
        params: parameters, or groups of them; each group becomes one of matrices and one of other parameters, `muon`
            says which.
        matrices: what Muon steps, with two dimensions each.
        lr, weight_decay: of both.
        betas, eps: of AdamW.
        of_muon: `momentum`, `nesterov`, `ns_steps`, and `adjust_lr_fn`, which is one of `ADJUSTMENTS`, by default the
            first; as `torch.optim.Muon` has them.

    Raises:
        ValueError: none of the parameters is among the matrices, or what torch's two refuse.
    """

    def __init__(
        self,
        params: ParamsT,
        matrices: Iterable[Tensor],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.0,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **of_muon: Any,
    ):
        self._matrices = {id(matrix) for matrix in matrices}
        self._of_muon = {"adjust_lr_fn": ADJUSTMENTS[0], **of_muon}
        self._of_adamw = {"betas": betas, "eps": eps, "fused": True}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        if not any(group["muon"] for group in self.param_groups):
            raise ValueError("Muon steps matrices of layers, and none is trained here: take optim='adamw_torch_fused'")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; a group that does not say whose it is becomes up to two."""
        if "muon" in param_group:
            self._add(param_group)
            return
        params = param_group["params"]
        every = [params] if isinstance(params, Tensor) else list(params)
        for muon in (True, False):
            chosen = [parameter for parameter in every if (id(parameter) in self._matrices) == muon]
            if chosen:
                self._add({**param_group, "params": chosen, "muon": muon})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step of every parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for muon in (True, False):
            groups = [group for group in self.param_groups if group["muon"] == muon]
            if groups:
                stepping = _kind(muon)(groups)  # takes the groups as they are, whose settings are all there
                stepping.state = self.state
                stepping.step()
        return loss

    def _add(self, group: dict[str, Any]) -> None:
        given = self._of_muon if group["muon"] else self._of_adamw
        for name, value in {**self.defaults, **given}.items():
            group.setdefault(name, value)
        _kind(group["muon"])([group])  # checks it, and fills in what else torch has
        super().add_param_group(group)


def _kind(muon: bool) -> Callable[[list[dict[str, Any]]], Optimizer]:
    return torch.optim.Muon if muon else torch.optim.AdamW


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters that Muon is for: those of two dimensions in the layers of a model of transformers,
    without embeddings. Embeddings of tokens, heads and what else stands outside of layers are none."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    inside = {parameter: None for layer in checkpointed_layers(model) for parameter in layer.parameters()}
    return [each for each in inside if each.dim() == 2 and each.requires_grad and each not in embeddings]
