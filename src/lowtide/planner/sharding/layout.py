"""A model's parameters as sharding sees them: shapes, widths, which are trained, and the layer that each is gathered
with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lowtide.memory.optimizers.states import BYTES_PER_PARAMETER

FOLLOWS = (4, 8)
"""States of so many bytes are moments in the dtype of what they step; others have a width of their own."""
MASTER = 4
"""Bytes of an element of ZeRO's masters."""


@dataclass(frozen=True)
class Parameter:
    """One weight; a tied one is one."""

    name: str
    shape: tuple[int, ...]
    width: int
    """Bytes of an element, as stored."""
    trained: bool
    layer: str = ""
    """The layer that it is in, as `model.layers.3`; empty outside."""
    whole_gradient: int = 0
    """Elements of its gradient, where a rank has that whole and the weight split."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def gradient(self) -> int:
        """Elements of its gradient, if it is trained."""
        return self.whole_gradient or self.numel


@dataclass(frozen=True)
class Layout:
    """What a model is made of."""

    parameters: tuple[Parameter, ...]
    hidden_size: int
    state: float | None = 8
    """Bytes of optimizer state for an element of a float32 parameter; None: not known, the trace says it."""
    embedding: str = ""
    """Name of the input embedding's weight."""
    tied: bool = False
    """Whether the head has no weight of its own."""
    buffers: int = 0
    """Bytes that are no parameters: every rank has them whole."""
    plan: Mapping[str, str] = field(default_factory=dict)
    """transformers' `tp_plan`: how the matrices of each module are split."""

    @classmethod
    def of(cls, model: nn.Module, optimizer: str) -> Layout:
        """Reads a model, which may be on `meta` or fake.

        Args:
            model: of transformers, with or without adapters.
            optimizer: name as in `TrainingArguments.optim`.
        """
        layers = _layers(model)
        parameters = tuple(
            Parameter(name, tuple(p.shape), p.element_size(), p.requires_grad, _layer_of(name, layers))
            for name, p in model.named_parameters()
        )
        names = {id(p): name for name, p in model.named_parameters()}
        get_input = getattr(model, "get_input_embeddings", None)
        embedding = get_input().weight if get_input else None
        head = getattr(model, "get_output_embeddings", lambda: None)()
        return cls(
            parameters,
            _hidden_size(model),
            BYTES_PER_PARAMETER.get(optimizer),
            names.get(id(embedding), ""),
            embedding is not None and getattr(head, "weight", None) is embedding,
            sum(b.numel() * b.element_size() for b in model.buffers()),
            dict(getattr(model, "tp_plan", None) or {}),
        )

    @classmethod
    def joined(cls, layouts: Sequence[Layout]) -> Layout:
        """The first, with the parameters and buffers of all."""
        parameters = tuple(parameter for each in layouts for parameter in each.parameters)
        return replace(layouts[0], parameters=parameters, buffers=sum(each.buffers for each in layouts))

    @property
    def trained(self) -> list[Parameter]:
        return [p for p in self.parameters if p.trained]

    def with_parameters(self, parameters: Iterable[Parameter]) -> Layout:
        """The same with others."""
        return replace(self, parameters=tuple(parameters))

    def state_bytes(self, elements: int, width: int) -> int:
        """Optimizer states of so many elements that are stepped in a width."""
        rate = self.state or 0
        return int(elements * rate * (width / 4 if rate in FOLLOWS else 1))


def byte_sum(parameters: Iterable[Parameter], width: int | None = None) -> int:
    """Bytes of whole parameters, in a width or as stored."""
    return sum(p.numel * (width or p.width) for p in parameters)


def _layers(model: nn.Module) -> list[str]:
    """Names of the outermost lists of modules."""
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def _layer_of(name: str, lists: Iterable[str]) -> str:
    for outer in lists:
        if name.startswith(f"{outer}."):
            return f"{outer}.{name.removeprefix(f'{outer}.').split('.')[0]}"
    return ""


def _hidden_size(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return int(getattr(config, "hidden_size", 0) or 0)
