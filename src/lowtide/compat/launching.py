"""`accelerate launch`, run as a module, whose ranks meet on this machine alone where they are all on it.

torch's agent (`StaticTCPRendezvous`) opens its `TCPStore` on every interface of the machine, and whoever reaches the
port may write into it. The store takes a socket that listens already (`master_listen_fd`): here one of the loopback
interface. gloo, by which ranks on a CPU exchange tensors, listens where the host's name leads to, and is given the same
interface.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as static

LOOPBACK = "127.0.0.1"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def store_of_this_machine(
    port: int = 0, world_size: int | None = None, timeout: timedelta = timedelta(minutes=10)
) -> TCPStore:
    """A store that listens on the loopback interface alone; port 0 takes a free one."""
    listening = socket.create_server((LOOPBACK, port), backlog=2048)
    port = listening.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, world_size, True, timeout, multi_tenant=True, master_listen_fd=listening.detach(),
        wait_for_workers=False,
    )  # fmt: skip


def _store(host: str, port: int, agents: int, is_master: bool, timeout: timedelta, **more: Any) -> TCPStore:
    """As torch's, for the agents of several machines; that of one alone has its store on the loopback interface."""
    if agents != 1 or host not in (LOOPBACK, "localhost"):
        return TCPStore(host, port, agents, is_master, timeout, **more)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault(GLOO_INTERFACE, "lo")
    return store_of_this_machine(port, agents, timeout)


def meet_on_this_machine() -> None:
    """The agent that this process becomes has its store as `_store` says."""
    module: Any = static
    module.TCPStore = _store


def ended_by_signals(launch: Callable[[], object]) -> None:
    """Launches; a signal that the agent passed on to the ranks, which say what it led to, is no traceback of the agent
    beside that, but the status of a process that it ended."""
    try:
        launch()
    except SignalException as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    from accelerate.commands.launch import main

    meet_on_this_machine()
    ended_by_signals(main)
