"""What a rank notes of its own failure, for the report that it gives once ranks have met."""

from __future__ import annotations

import pytest
import torch

from lowtide.ragged import RaggedBatch
from lowtide.step.rank_sync import NotFinite, OutOfMemory, RankSync

CPU = torch.device("cpu")
ROWS = RaggedBatch.from_segments([[3] * 5, [4] * 7])


def test_a_failure_before_the_first_micro_batch_names_the_rows_of_the_step():
    sync = RankSync("baseline", part=ROWS)
    with sync.local():
        raise torch.OutOfMemoryError("CUDA out of memory")
    said = r"in baseline of micro-batch 0 \(2 row\(s\) of 5, 7 tokens\): CUDA out of memory"
    with pytest.raises(OutOfMemory, match=said):
        sync.meet(CPU)


def test_without_rows_the_phase_alone_is_named():
    sync = RankSync()
    with sync.local():
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(OutOfMemory, match=r"^in forward: CUDA out of memory"):
        sync.meet(CPU)


@pytest.mark.parametrize("error", [ZeroDivisionError("by 0"), NotFinite(float("nan"))])
def test_other_errors_are_raised_as_they_are_once_ranks_meet(error):
    sync = RankSync(part=ROWS)
    with sync.local():
        raise error
    assert sync.failed
    with pytest.raises(type(error)) as raised:
        sync.meet(CPU)
    assert raised.value is error


def test_ranks_that_wait_inside_are_told_at_once():
    sync = RankSync(part=ROWS)
    with pytest.raises(OutOfMemory, match="Ranks with sharded weights"), sync.local(waited_for=True):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(ZeroDivisionError), RankSync(part=ROWS).local(waited_for=True):
        raise ZeroDivisionError
