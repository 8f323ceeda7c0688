"""LoRA-FA: the down projections of LoRA stay as they began, so that no LoRA layer keeps its input for backward.

A LoRA layer adds `s B (A x)` to a frozen product (A: rank x inputs, B: outputs x rank). A's gradient needs the layer's
whole input x, at the width of the model and in the dtype of the adapters. With A frozen, backward needs `A x` alone:
rank numbers a token. Gradients and moments of A are not there either. From LoRA-FA (arXiv 2308.03303).

The step is AdamW's on B, of the gradient that makes `s B A` change as nearly as it can like the whole weight under full
fine-tuning: `g (A A')^-1 / s^2`, of B's gradient g. peft's `create_lorafa_optimizer` takes the same; here it is
computed in float32, where peft's runs the product under bfloat16 autocast where there is one, the step is torch's fused
AdamW with the run's betas and epsilon, and a parameter is known by itself, not by its name, so that parameters can be
stepped one at a time. What else is trained (biases, `modules_to_save`, adapters of embeddings) takes AdamW's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from lowtide.compat.torch import version_of
from lowtide.process.ways_out import in_python

DELTA = 1e-8
"""Added to the diagonal of `A A'` before it is inverted, as peft does."""


@dataclass
class Projection:
    """What the gradient of an up projection is multiplied by."""

    down: nn.Parameter
    """[rank, inputs]: A, which is frozen."""
    scaling: float
    """s: what the product of both is multiplied by."""
    _made: tuple[int, Tensor] | None = None

    def __call__(self, grad: Float[Tensor, "outputs rank"]) -> Float[Tensor, "outputs rank"]:
        """The gradient to be stepped along, in the dtype of the one that is given."""
        version = version_of(self.down)
        if self._made is None or self._made[0] != version:  # a checkpoint may be loaded after the optimizer is made
            down = self.down.detach().float()
            gram = down @ down.T + DELTA * torch.eye(len(down), device=down.device)
            self._made = version, torch.linalg.pinv(gram, hermitian=True) / self.scaling**2
        return (grad.float() @ self._made[1]).to(grad.dtype)


class LoraFA(torch.optim.AdamW):
    """`torch.optim.AdamW` that projects the gradients of up projections before it steps.

    Args:
        params: as AdamW's.
        projections: by up projection; what is not among them takes AdamW's step.
        options: those of `torch.optim.AdamW`.
    """

    def __init__(self, params: ParamsT, projections: Mapping[nn.Parameter, Projection], **options: Any):
        self._projections = {id(up): projection for up, projection in projections.items()}
        super().__init__(params, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step of every parameter that has a gradient; gradients are left as they are."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        given: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                projection = self._projections.get(id(parameter))
                if projection is not None and parameter.grad is not None:
                    given[parameter] = parameter.grad
                    parameter.grad = projection(parameter.grad)
        super().step()
        for parameter, grad in given.items():
            parameter.grad = grad
        return loss


def projections_of(model: nn.Module) -> dict[nn.Parameter, Projection]:
    """By trained up projection of a linear LoRA layer, what projects its gradient.

    Raises:
        ValueError: an adapter is more than a product (DoRA), of which the projection does not hold.
    """
    return {up: Projection(down, scaling) for down, up, scaling in _pairs(model)}


def freeze_down_projections(model: nn.Module) -> int:
    """Freezes the down projections of all linear LoRA layers that are trained; gives how many there are."""
    pairs = list(_pairs(model))
    for down, _, _ in pairs:
        down.requires_grad_(False)
    return len(pairs)


def why_no_projections(model: nn.Module) -> str | None:
    """Why a model's adapters cannot be trained so; None where they can."""
    try:
        pairs = list(_pairs(model))
    except ValueError as error:
        return str(error)
    if pairs:
        return None
    return (
        "it trains the LoRA adapters of linear layers, and this model has none that are trained: set use_peft=True"
        f"{in_python(' (or pass a `peft_config`)')}, or take optim='adamw_torch_fused'"
    )


def _pairs(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter, float]]:
    """(down projection, up projection, scaling) of each trained adapter of a linear layer."""
    for path, module in model.named_modules():
        layer: Any = module
        if not isinstance(getattr(layer, "lora_A", None), nn.ModuleDict):
            continue
        for name, down in layer.lora_A.items():
            up = layer.lora_B[name]
            if not isinstance(down, nn.Linear) or not up.weight.requires_grad:
                continue
            if name in getattr(layer, "lora_variant", {}):
                kind = type(layer.lora_variant[name]).__name__
                raise ValueError(f"the adapter of {path} is more than a product ({kind}): take plain LoRA or rsLoRA")
            yield cast(nn.Parameter, down.weight), up.weight, float(layer.scaling[name])
