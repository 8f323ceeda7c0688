"""Ranks read the same rows, and each takes its share of every batch; ranks with different rows are refused. So are
ranks that compute a batch together and hold different ones.

With different lengths they would run different numbers of steps, and wait for each other in the end; with different
rows of one length some would be trained on twice and others never.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from jaxtyping import Int
from torch import Tensor

from lowtide.ranks.group import RankGroup
from lowtide.ranks.world import distributed, objects_of_all_ranks


def check_same_rows(dataset: Any, lengths_of: Callable[[Any], np.ndarray | None], title: str) -> None:
    """Refuses a dataset that is another one on another rank; all ranks ask together.

    Args:
        dataset: prepared rows. A stream has no rows to compare yet.
        lengths_of: gives [rows], the tokens of each row of a dataset, or None.
        title: what messages call the dataset.

    Raises:
        ValueError: with the rows and tokens that each rank has.
    """
    if not distributed():
        return
    mine, lengths = None, lengths_of(dataset)
    if isinstance(dataset, Dataset) and lengths is not None:
        mine = len(dataset), int(lengths.sum()), _digest(dataset, lengths)
    everyones = objects_of_all_ranks(mine)
    first = everyones[0]
    other = next((rank for rank, each in enumerate(everyones) if each != first), None)
    if other is not None:
        same = ", of other content" if _text(first) == _text(everyones[other]) else ""
        raise ValueError(
            f"{title} differs among ranks: {_text(first)} on rank 0, {_text(everyones[other])} on rank "
            f"{other}{same}. Each rank takes its share of the same rows: give all of them the whole dataset"
        )


def check_same_batch(batch: Sequence[Int[Tensor, " _"]], together: RankGroup | None, device: torch.device) -> None:
    """Refuses a batch that is another one on another rank of a group; all ranks of it ask together.

    Args:
        batch: its tokens and the like.
        together: the ranks that compute it together; None where each rank has its own.
        device: of the group's exchanges.

    Raises:
        ValueError: with what to look at.
    """
    if together is None:
        return
    sums = [((torch.arange(len(each), device=each.device) % 8191 + 1) * each).sum() for each in batch]
    mine = torch.stack([*sums, torch.tensor(sum(map(len, batch)), device=sums[0].device)]).to(device)
    most = torch.cat([mine, -mine])
    dist.all_reduce(most, dist.ReduceOp.MAX, group=together.group)
    if not torch.equal(*most.abs().chunk(2)):
        raise ValueError(
            f"the {together.size} ranks that compute a batch together have different ones: a data collator, a "
            "sampler or a stream that draws random numbers has to draw the same on all of them, so seed it alike"
        )


def _digest(dataset: Dataset, lengths: np.ndarray) -> str:
    """Of the lengths of all rows and the content of some: reading all would take as long as an epoch."""
    some = sorted({0, len(dataset) // 2, len(dataset) - 1}) if len(dataset) else []
    rows = [sorted(dataset[number].items()) for number in some]
    content = np.ascontiguousarray(lengths, dtype=np.int64).tobytes() + repr(rows).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _text(held: tuple[int, int, str] | None) -> str:
    return "no rows known beforehand" if held is None else f"{held[0]:,} rows of {held[1]:,} tokens"
