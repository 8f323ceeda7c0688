"""Ranks that hold the same rows and compute a batch together."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


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
