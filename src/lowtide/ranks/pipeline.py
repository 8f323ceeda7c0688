"""Pipeline parallelism: ranks that hold the same rows, and of which each has some neighbouring layers of the model.

Hidden states go from each rank to the next one, and their gradients back. What the last rank computes of them (a loss,
log-probabilities) it tells the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from lowtide.ranks.group import RankGroup

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Pipeline(RankGroup):
    """The ranks that the layers of a model are split between, in the order of the layers."""

    replicas: dist.ProcessGroup | None = None
    """Ranks that hold the same layers, whose gradients are averaged; None where this one alone does."""
    ends: dist.ProcessGroup | None = None
    """The first and the last rank; None for all."""

    @classmethod
    def of_size(cls, size: int) -> Pipeline:
        """Groups of so many neighbouring ranks, and of them this rank's; all ranks call it together."""
        ranks = dist.get_world_size()
        lines = [[*range(start, start + size)] for start in range(0, ranks, size)]

        def own_of(groups: list[list[int]]) -> dist.ProcessGroup | None:
            if len(groups[0]) in (1, ranks):
                return None
            own, _ = dist.new_subgroups_by_enumeration(groups)
            return cast(dist.ProcessGroup, own)

        replicas = own_of([[*each] for each in zip(*lines, strict=True)])
        return cls(own_of(lines), replicas, own_of([[line[0], line[-1]] for line in lines]))

    @property
    def is_first(self) -> bool:
        """Whether this rank has the embedding."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the head."""
        return self.rank == self.size - 1

    # -- between neighbours ------------------------------------------------------------------------------------------

    def sending(self, x: Tensor, ahead: bool) -> dist.P2POp:
        """What sends a tensor to the next rank, or to the one before."""
        return self._operation(dist.isend, x.detach().contiguous(), ahead)

    def receiving(self, room: Tensor, ahead: bool) -> dist.P2POp:
        """What receives a tensor from the next rank, or from the one before."""
        return self._operation(dist.irecv, room, ahead)

    def exchange(self, *operations: dist.P2POp) -> None:
        """Runs them, and waits until they are over."""
        for work in dist.batch_isend_irecv([*operations]):
            work.wait()

    def _operation(self, what: Any, tensor: Tensor, ahead: bool) -> dist.P2POp:
        peer = self.rank + (1 if ahead else -1)
        return dist.P2POp(what, tensor, group=self.group, group_peer=peer)

    # -- told to all -------------------------------------------------------------------------------------------------

    def told(self, found: T) -> T:
        """What the last rank found; of the others, what they pass counts nothing."""
        told: list[Any] = [found if self.is_last else None]
        dist.broadcast_object_list(told, group=self.group, group_src=self.size - 1)
        return told[0]
