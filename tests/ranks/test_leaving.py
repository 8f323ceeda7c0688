"""How a rank leaves at the end of its command."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch.distributed as dist

from lowtide.ranks import failures
from tests.support.ranks.processes import run_ranks


def leave_twice(rank: int, folder: str) -> None:
    """The second time where no thread is started any more, as at the end of an interpreter from Python 3.12 on."""
    refused = mock.patch.object(failures.threading.Thread, "start", side_effect=RuntimeError("at interpreter shutdown"))
    for number, starting in enumerate((contextlib.nullcontext(), refused)):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=2)
        dist.barrier()
        with starting:
            failures.leave()
        assert not dist.is_initialized()


def test_the_process_group_ends_with_a_command(tmp_path):
    run_ranks(leave_twice, str(tmp_path))


def test_without_a_group_there_is_nothing_to_leave():
    failures.leave()
