"""Liger's kernels (arXiv 2410.10989) for rotary embeddings, norms and gated MLPs, put into one model, and taken out.

A fused norm or gated MLP keeps one tensor for backward where the model's own operations keep several. Liger's losses
are left out: the fused head is there for that, and would be lost with the forward that they replace. Liger patches the
modules of the model, and in the modeling file of its family the rotary function and some classes; the latter hold for
other models of that family as well, for as long as the kernels are in. All of it is noted and put back.

Equal to rounding: the mathematics are the model's, the kernels sum in another order. CUDA alone. Before `tiled_mlp`,
which runs the MLPs that it finds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import nn

from lowtide.compat.liger import kernels_of, patch_model, patches
from lowtide.compat.torch import children_of

LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Options of Liger's patches that are switched off; which kernels a model type can have is in their defaults."""


@dataclass(frozen=True)
class LigerKernels:
    """What became of `liger_kernels`."""

    applied: tuple[str, ...]
    """The kinds of kernels that the model has now; none if it could have none."""
    reason: str
    """One line: which, or why none."""
    undo: Callable[[], None]
    """Gives the model and its family back what they had."""


def liger_kernels(model: nn.Module) -> LigerKernels:
    """Puts Liger's kernels into a model, where they can run.

    Args:
        model: of transformers, wrapped or not, on its device.
    """
    reason = _not_installed() or why_no_kernels(model) or _elsewhere(model)
    if reason is not None:
        return LigerKernels((), f"no Liger kernels: {reason}", lambda: None)
    inner = _of_transformers(model)
    kind = inner.config.model_type
    known = kernels_of(kind)
    undo = _remember(inner)
    forward = inner.forward
    try:
        patch_model(inner, **LOSSES)
        if inner.forward != forward:
            raise RuntimeError(f"Liger replaced the forward of {type(inner).__name__}, although asked for no loss")
    except BaseException:
        undo()
        raise
    applied = tuple(name for name, default in known.items() if default and name not in LOSSES)
    return LigerKernels(applied, f"Liger kernels: {', '.join(applied)}", undo)


def why_no_kernels(model: nn.Module) -> str | None:
    """Why Liger, where it is installed, has no kernels for a model; None if it has."""
    inner = _of_transformers(model)
    if inner is None:
        return f"liger-kernel patches models of transformers, and this is a {type(model).__name__}"
    kind = inner.config.model_type
    if kind in patches():
        return None
    return f"liger-kernel has none for model type {kind}: leave it out, or take torch_compile=True in its place"


def _of_transformers(model: nn.Module) -> Any:
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def _not_installed() -> str | None:
    return "liger-kernel is not installed (pip install liger-kernel)" if find_spec("liger_kernel") is None else None


def _elsewhere(model: nn.Module) -> str | None:
    return None if is_on_cuda(model) else "the model is not on a CUDA device"


def is_on_cuda(model: nn.Module) -> bool:
    """Whether the whole model is on CUDA devices."""
    return all(p.device.type == "cuda" for p in model.parameters())


def _remember(model: nn.Module) -> Callable[[], None]:
    """How to put back what a patch of a model may change: attributes of its modules, their classes and their files."""
    modules = [*model.modules()]
    kinds = {kind for module in modules for kind in type(module).__mro__ if kind.__module__.startswith("transformers.")}
    files = [sys.modules[name] for name in {kind.__module__ for kind in kinds}]
    owners: list[Any] = [*modules, *kinds, *files]
    before = [(owner, dict(vars(owner))) for owner in owners]
    children = [(module, dict(children_of(module))) for module in modules]

    def undo() -> None:
        for owner, attributes in before:
            now = dict(vars(owner))
            for name in now.keys() - attributes.keys():
                delattr(owner, name)
            for name, value in attributes.items():
                if now.get(name) is not value:
                    _set(owner, name, value)
        for module, own in children:
            children_of(module).clear()
            children_of(module).update(own)

    return undo


def _set(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute as it lay in `vars(owner)`; those of a module without its own ideas of parameters."""
    if isinstance(owner, nn.Module):
        owner.__dict__[name] = value
    else:
        setattr(owner, name, value)
