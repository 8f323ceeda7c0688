"""Whether there are other ranks."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def distributed() -> bool:
    """Whether several ranks train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def launched() -> int:
    """How many processes a launcher has started, before they have met."""
    return max(int(os.environ.get("WORLD_SIZE", "1") or 1), 1)


def is_on(switch: str) -> bool:
    """Whether a launcher has turned something on by a variable."""
    return os.environ.get(switch, "").lower() in ("1", "true", "yes")


def is_first() -> bool:
    """Whether this is the process that speaks for all that a launcher has started, before they have met."""
    return int(os.environ.get("RANK", "0") or 0) == 0


def gathered(values: Tensor, copies: int = 1) -> Tensor:
    """The values of all ranks, one after the other; all have as many.

    Args:
        copies: so many neighbouring ranks hold the same values, which count once.
    """
    if not distributed():
        return values
    everyones = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, values.contiguous())
    return torch.cat(everyones[::copies])


def objects_of_all_ranks(own: T, copies: int = 1) -> list[T]:
    """What each rank has, in the order of ranks, pickled on the way: that of this one alone where there are no others.

    Args:
        copies: so many neighbouring ranks have the same, which counts once.
    """
    if not distributed():
        return [own]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return everyones[::copies]


def worst_of_ranks(number: int, device: torch.device) -> int:
    """The largest number that a rank says; all ranks ask at the same place."""
    if not distributed():
        return number
    flag = torch.tensor([float(number)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return int(flag.item())
