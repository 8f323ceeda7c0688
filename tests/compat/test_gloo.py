"""Exchanges by pairs of sends against torch's own collectives, on two ranks and on three."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lowtide.compat.gloo import exchange_between_ranks, gather_from_ranks, sum_own_of_ranks
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SENT = ((2, 0, 3), (1, 1, 0), (4, 2, 0))
"""Rows that each rank sends to each."""


def drawn(rows: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, (rows, 5), generator=generator).to(dtype)  # sums are exact in any order


def rank_main(rank: int, ranks: int, folder: str) -> None:
    with rank_of(Path(folder), rank, ranks):
        dist.init_process_group("gloo")
        for group in (dist.group.WORLD, dist.new_group([*range(ranks)][-2:])):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                compare(rank, group)


def compare(rank: int, group: dist.ProcessGroup) -> None:
    size, here = dist.get_world_size(group), dist.get_rank(group)
    for dtype in DTYPES:
        own = drawn(4, rank, dtype)
        expected = torch.empty(4 * size, 5, dtype=dtype)
        dist.all_gather_into_tensor(expected, own, group=group)
        found = torch.empty_like(expected)
        gather_from_ranks(found, own, group)
        assert torch.equal(found, expected)
        found = torch.zeros_like(expected)
        mine = found[4 * here : 4 * here + 4]
        mine.copy_(own)
        gather_from_ranks(found, mine, group)  # its part lies in place already
        assert torch.equal(found, expected)

        everyones = drawn(4 * size, rank, dtype)
        given = everyones.clone()
        expected = everyones.clone()
        dist.all_reduce(expected, group=group)
        found = torch.empty(4, 5, dtype=dtype)
        sum_own_of_ranks(found, everyones, group)
        assert torch.equal(found, expected[4 * here : 4 * here + 4])
        assert torch.equal(everyones, given)

        sent = [row[:size] for row in SENT[:size]]
        x = drawn(sum(sent[here]), rank, dtype)
        taken = [row[here] for row in sent]
        expected, found = (torch.zeros(sum(taken), 5, dtype=dtype) for _ in range(2))
        dist.all_to_all_single(expected, x, taken, list(sent[here]), group=group)
        exchange_between_ranks(found, x, taken, sent[here], group)
        assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_pairs_of_sends_give_what_torchs_collectives_give(ranks, tmp_path):
    run_ranks(rank_main, ranks, str(meeting_place(tmp_path)), ranks=ranks)
