"""How a rank leaves at the end of its command."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from lowtide.compat.torch import hang_up
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


WAITED, CLOSED = "Timed out waiting 5000ms for recv operation to complete", "Connection closed by peer"
LOST = {
    (WAITED, CLOSED): "no rank stopped by itself, but rank 0 waited for a slower one for longer than `ddp_timeout`",
    (WAITED, WAITED): "waited for a slower one for longer than `ddp_timeout`",
    (CLOSED, CLOSED): "the ranks lost each other",
}
"""By what the collectives of two ranks say, none of which stopped by itself: what each of them is to say."""


def lose_each_other(rank: int, folder: str) -> None:
    for number, (said, wanted) in enumerate(LOST.items()):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=2)
        found = failures.who_stopped(said[rank])
        assert wanted in found, found
        assert said[rank] in found, found
        dist.barrier()
        failures.leave()


def read_late(rank: int, folder: str) -> None:
    """The first rank stops and has the store; the second says at once that it stops, and reads a second later."""
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = Path(folder) / "port"
    if store is not None:
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    while not port.exists():
        time.sleep(0.01)
    store = store or TCPStore("127.0.0.1", int(port.read_text()), 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()
    if rank == 0:
        failures.tell(ZeroDivisionError("as planned"))
        failures._keep_store()
        os._exit(0)  # the store with it
    read = failures._lines

    def late() -> dict[int, str]:
        time.sleep(1)
        return read()

    with mock.patch.object(failures, "_lines", late):
        found = failures.who_stopped(CLOSED)
    assert found == "rank 0 stopped at ZeroDivisionError: as planned"


def test_the_store_is_kept_until_what_was_left_in_it_is_read(tmp_path):
    run_ranks(read_late, str(tmp_path))


def test_where_no_rank_stopped_the_one_that_waited_is_named(tmp_path):
    run_ranks(lose_each_other, str(tmp_path))


def test_the_process_group_ends_with_a_command(tmp_path):
    run_ranks(leave_twice, str(tmp_path))


def hang_up_alone(rank: int) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    own = socket.create_connection(server.getsockname())
    with server.accept()[0] as end_of_own:
        native = socket.create_connection(server.getsockname()).detach()
        with server.accept()[0] as end_of_native:
            hang_up(SimpleNamespace(port=None))
            end_of_native.settimeout(5)
            assert end_of_native.recv(1) == b""
        own.send(b"x")
        assert end_of_own.recv(1) == b"x"
    os.close(native)


def test_connections_that_python_made_are_kept():
    run_ranks(hang_up_alone, ranks=1)


def test_without_a_group_there_is_nothing_to_leave():
    failures.leave()
