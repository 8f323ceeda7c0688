"""The bytes that stay for the whole run: weights, gradients, optimizer states. Known before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lowtide.compat.torch import parts_of
from lowtide.memory.optimizers.muon import matrices_of
from lowtide.ranks.shards import local_of

BYTES_PER_PARAMETER: dict[str, float] = {
    "adamw_torch": 8,
    "adamw_torch_fused": 8,
    "adamw_torch_8bit": 2,
    "adamw_torch_4bit": 1,
    "adamw_bnb_8bit": 2,
    "adamw_8bit": 2,
    "paged_adamw_32bit": 8,
    "paged_adamw_8bit": 2,
    "lion_32bit": 4,
    "lion_8bit": 1,
    "adagrad": 4,
    "rmsprop": 4,
    "sgd": 0,
    "adamw_compressed": 10,
    "adamw_stochastic": 8,
    "adamw_stochastic_8bit": 2,
    "adamw_flash": 3 + 2 * 4 / 64,
    "muon": 4,
    "adamw_lora_fa": 8,
}
"""Bytes of state a trained parameter, for float32 parameters; two moments in their dtype for AdamW. For `adamw_flash`,
whose groups are small, with their scales."""
OF_EMBEDDINGS = {
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "paged_adamw_32bit"),
    "lion_8bit": "lion_32bit",
}
"""For bitsandbytes' optimizers in 8 bits, the one whose states embeddings have."""
IN_BFLOAT16 = {"adamw_compressed", "adamw_stochastic", "adamw_stochastic_8bit", "adamw_flash"}
"""Those that store trained weights in bfloat16, and their gradients with them; their states are no multiple of that."""


def optimizer_name(args: Any) -> str:
    """`TrainingArguments.optim`, which is one of transformers' or of ours."""
    return str(getattr(args.optim, "value", args.optim))


@dataclass(frozen=True)
class States:
    """Bytes by category; None where the optimizer's state is not known beforehand."""

    weights: int
    gradients: int
    optimizer: int | None

    @property
    def total(self) -> int:
        return self.weights + self.gradients + (self.optimizer or 0)


def predict_states(model: nn.Module, optimizer: str) -> States:
    """What a model will hold on this rank while it trains; of sharded weights, their part.

    Args:
        model: each storage is counted once, so tied weights are.
        optimizer: name as in `TrainingArguments.optim`.
    """
    weights = gradients = 0
    for parameter in {id(each): each for each in (*model.parameters(), *model.buffers())}.values():
        narrow = parameter.requires_grad and optimizer in IN_BFLOAT16
        parts = parts_of(local_of(parameter))  # of a quantized weight of torchao, codes and scales
        here = sum(part.numel() * (2 if narrow else part.element_size()) for part in parts)
        weights += here
        gradients += here if parameter.requires_grad else 0
    states = sum(sum(sizes) for _, sizes in states_of(model, optimizer))
    return States(weights, gradients, states if optimizer in BYTES_PER_PARAMETER else None)


def states_of(model: nn.Module, optimizer: str) -> Iterator[tuple[Tensor, list[int]]]:
    """Each trained parameter of a model, or the part of it that lies here, with its `state_sizes`. In 8 bits,
    transformers leaves embeddings' in 32; Muon is for matrices alone."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = {*matrices_of(model)} if optimizer == "muon" else set()
    for parameter in model.parameters():
        if parameter.requires_grad:
            name = OF_EMBEDDINGS.get(optimizer, optimizer) if parameter in embeddings else optimizer
            name = "adamw_torch" if name == "muon" and parameter not in matrices else name
            yield (here := local_of(parameter)), state_sizes(here, name)


def state_sizes(parameter: Tensor, optimizer: str) -> list[int]:
    """Bytes of each state that an optimizer keeps of a parameter; none where they are not known.

    Args:
        optimizer: name as in `TrainingArguments.optim`.
    """
    rate = BYTES_PER_PARAMETER.get(optimizer, 0.0)
    # transformers' optimizers keep moments in the dtype of the parameter, but for 8 and 4 bits.
    if rate in (4, 8) and optimizer not in IN_BFLOAT16:
        rate *= parameter.element_size() / 4
    largest = min(4.0, parameter.element_size())
    sizes = []
    while rate > 0:
        sizes.append(int(parameter.numel() * min(rate, largest)))
        rate -= largest
    return sizes


def wants_room(optimizer: Any) -> bool:
    """Whether an optimizer has yet to make its states, and on the device of its parameters."""
    on_gpu = any(parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"])
    paged = on_gpu and getattr(optimizer, "is_paged", False)
    made = any(isinstance(v, Tensor) and v.dim() > 0 for state in optimizer.state.values() for v in state.values())
    return not made and not paged and not hasattr(optimizer, "host_states")
