"""Ranks that hold the same rows and compute a batch together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RankGroup:
    """The ranks of one group; those of it hold the same rows."""

    group: dist.ProcessGroup | None = None
    """None for all ranks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RankGroup:
        """A copy of a model belongs to the same ranks."""
        return self

    @functools.cached_property
    def size(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self.group)

    @functools.cached_property
    def rank(self) -> int:
        """This rank's number in the group."""
        return dist.get_rank(self.group)

    @functools.cached_property
    def leader(self) -> int:
        """The first rank of the group, by its number among all ranks."""
        return dist.get_process_group_ranks(self.group)[0]

    def add_up(self, total: Tensor) -> None:
        """Adds up a tensor over the ranks, in place."""
        dist.all_reduce(total, group=self.group)

    def added_up(self, x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """The sum over the ranks, without a gradient."""
        total = x.clone(memory_format=torch.contiguous_format)
        self.add_up(total)
        return total

    def share(self, count: int) -> slice:
        """Those of so many things that this rank does, of which each rank does about equally many; all of them where
        there is not one for each rank."""
        if count < self.size:
            return slice(0, count)
        first, end = (count * (self.rank + more) // self.size for more in (0, 1))
        return slice(first, end)

    def all_objects(self, own: T) -> list[T]:
        """What each rank has, in the order of ranks."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self.group)
        return found

    def of_first(self, own: T) -> T:
        """What the first rank has."""
        found = [own]
        dist.broadcast_object_list(found, src=self.leader, group=self.group)
        return found[0]

    @contextlib.contextmanager
    def own_random(self, device: torch.device) -> Iterator[None]:
        """While it lasts, this rank draws other random numbers than the rest of its group: dropout of its part.

        They follow from the state of the generators before, so that a repeated step draws them again.
        """
        seed = int(torch.randint(1 << 62, ()))
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed + self.rank)
            yield
