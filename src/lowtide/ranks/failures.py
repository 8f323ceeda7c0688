"""What a rank tells the others when it stops, and what they say of it.

A rank that stops in the middle of something leaves the others in a collective that fails, at once where its process is
gone, else after `ddp_timeout`. What the collective says names neither the rank nor the reason. So a rank that stops at
an error leaves a line in the store of the process group, and the others look there: who left a line stopped by itself,
and who leaves none any more was killed, stopped or cut off. A script may catch the error and go on: a line
belongs to what its rank had begun, by number, so that a rank which looks late still finds it. Where the first
rank has the store, it keeps it for some seconds when its process ends at an error.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from lowtide.compat.torch import default_store, hang_up
from lowtide.ranks.world import distributed

T = TypeVar("T")
PATIENCE = 5.0
"""Seconds for the other ranks to leave their line, and for the store to answer."""
LEFT = "left by another rank"
"""What the line of a rank begins with that stopped because another one had; what its collective said comes after it."""
WAITED = "timed out"
"""What a collective says that waited for a rank, in small letters."""
LINE = 500
"""Characters of a line."""
SIGNS = (
    *("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe"),
    *("timed out waiting", "timeout caused pair closure", "gloo/transport"),
)
"""What gloo's collectives say where another rank has left; NCCL's have an error of their own."""


class RankFailed(RuntimeError):
    """This rank stopped because another one did; the message says which one and why."""

    def __init__(self, message: str, *, complete: bool = False) -> None:
        super().__init__(message)
        self.complete = complete
        """Whether the message also says what was done, and what to do."""


@dataclass
class _Begun:
    """What this process began, one after the other: mostly the same on all ranks."""

    number: int = 0
    running: bool = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Around what is begun; what it does inside, as the evaluations of training, belongs to it."""
        if self.running or not distributed():
            yield
            return
        self.number, self.running = self.number + 1, True
        _within_patience(lambda: _store().set(_begun_key(dist.get_rank()), str(self.number)))
        try:
            yield
        finally:
            self.running = False


_begun = _Begun()


def is_left_by_another(error: BaseException) -> bool:
    """Whether an error is that of a collective in which another rank was missing."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


@contextlib.contextmanager
def stopping_together(doing: str, remedy: str) -> Iterator[None]:
    """Around what ranks do together: tells them why this rank stops, and says in a sentence why another did.

    Args:
        doing: what is done, as in "training".
        remedy: what to do after it.

    Raises:
        RankFailed: another rank stopped.
    """
    try:
        with _begun.one():
            yield
        return
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        others = isinstance(error, RankFailed)
        if not distributed() or (others and error.complete):
            raise
        if not others and not is_left_by_another(error):
            tell(error)
            raise
        why = str(error) if others else who_stopped(_plain(error))
    raise RankFailed(f"{why}, while this rank was {doing}. {remedy}", complete=True) from None


@contextlib.contextmanager
def meeting(seconds: float) -> Iterator[None]:
    """Around the making of the process group.

    Args:
        seconds: how long ranks wait for each other.

    Raises:
        RankFailed: not all ranks came.
    """
    try:
        yield
        return
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        said = _plain(error)
    world, address = os.environ.get("WORLD_SIZE"), os.environ.get("MASTER_ADDR")
    raise RankFailed(
        f"not all {world} ranks (WORLD_SIZE) met at {address}:{os.environ.get('MASTER_PORT')} within {seconds:g} s "
        f"({said}): look at what the others printed, start them all again, or raise `ddp_timeout`",
        complete=True,
    ) from None


def tell(error: BaseException) -> None:
    """Leaves a line for the other ranks on what stopped this one."""
    _within_patience(lambda: _store().set(_key(dist.get_rank(), _begun.number), _line(error)))
    if dist.get_rank() == 0:
        _keep_store_at_exit()


def leave() -> None:
    """At the end of a command: threads of the process group that are left to the interpreter's end may then ask for its
    lock, and end the process with a failure."""
    if distributed():
        _within_patience(dist.destroy_process_group)


def first_says_the_same(error: BaseException) -> bool:
    """Whether the first rank, which is not this one, stopped at the same error: printing it once is enough."""
    if not distributed() or dist.get_rank() == 0:
        return False
    deadline = time.monotonic() + PATIENCE / 5
    found = None
    while found is None and time.monotonic() < deadline:
        found = _within_patience(lambda: _line_of(0, _store()))
        time.sleep(0.02)
    return found == _line(error)


def who_stopped(said: str = "") -> str:
    """Which other ranks stopped, and why.

    Args:
        said: what this rank's collective said of it.
    """
    _within_patience(lambda: _leave(said))
    lines, ranks = _within_patience(_lines) or {}, dist.get_world_size()
    _within_patience(lambda: _store().set(_read_key(dist.get_rank(), _begun.number), ""))
    own = [f"rank {rank} stopped at {line}" for rank, line in lines.items() if not _left(line)]
    if own:
        return "; ".join(own)
    silent = [str(rank) for rank in _others() if rank not in lines]
    if not silent:
        return _all_lost_each_other(said, lines)
    which = f"rank {silent[0]} of {ranks} does" if len(silent) == 1 else f"ranks {', '.join(silent)} of {ranks} do"
    return f"{which} not answer any more: killed, stopped or cut off ({said})"


def _all_lost_each_other(said: str, lines: dict[int, str]) -> str:
    """What to say where no rank stopped by itself: mostly one was slower than the others waited.

    Args:
        lines: by rank, what each of the others left.
    """
    waited = [f"rank {rank}" for rank, line in lines.items() if WAITED in line.lower()]
    if WAITED in said.lower():
        waited.append(f"rank {dist.get_rank()}")
    if not waited:
        return f"the ranks lost each other ({said})"
    return (
        f"no rank stopped by itself, but {' and '.join(waited)} waited for a slower one for longer than `ddp_timeout` "
        f"({said}; raise it on a busy machine)"
    )


def _line(error: BaseException) -> str:
    said = getattr(error, "message", error) if isinstance(error, SystemExit) else error
    return f"{type(error).__name__}: {said}".split("\n")[0][:LINE]


def _plain(error: BaseException) -> str:
    """What a collective says, without the place in its source and the address."""
    text = re.sub(r"\[[^]]*\](:\d+)?", "", str(error).strip().split("\n")[0])
    return text.partition("This is typically")[0].strip(" .")


def _leave(said: str) -> None:
    """Leaves the line of a rank that stopped because of another, unless it has said why it stopped itself."""
    store, key = _store(), _key(dist.get_rank(), _begun.number)
    if not store.check([key]):
        store.set(key, f"{LEFT}: {said}"[:LINE])


def _left(line: str) -> bool:
    """Whether a line is that of a rank that stopped because of another."""
    return line.startswith(LEFT)


@functools.cache
def _keep_store_at_exit() -> None:
    """Once in a process."""
    atexit.register(_keep_store)


def _keep_store() -> None:
    """Closes the connections, at which the other ranks look into the store, and waits until they have, or until those
    that stopped by themselves have said so."""
    if not distributed() or dist.get_backend() != "gloo":
        return
    own, others, store = _key(dist.get_rank(), _begun.number), _others(), _store()

    def others_have_read() -> bool:
        return all(_needs_no_store(rank, store) for rank in others)

    if not _within_patience(lambda: store.check([own])):
        return  # it went on after that error
    _within_patience(dist.destroy_process_group)
    hang_up(store)
    deadline = time.monotonic() + 2 * PATIENCE
    while time.monotonic() < deadline and not _within_patience(others_have_read):
        time.sleep(0.05)


def _needs_no_store(rank: int, store: Any) -> bool:
    """Whether another rank has read what this one left, or has stopped by itself."""
    line = _line_of(rank, store)
    return store.check([_read_key(rank, _begun.number)]) or (line is not None and not _left(line))


def _others() -> list[int]:
    return [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]


def _begun_key(rank: int) -> str:
    return f"lowtide/begun/{rank}"


def _key(rank: int, begun: int) -> str:
    return f"lowtide/stopped/{begun}/{rank}"


def _read_key(rank: int, begun: int) -> str:
    return f"lowtide/read/{begun}/{rank}"


def _line_of(rank: int, store: Any) -> str | None:
    """The line that a rank left in what this one has begun, whatever came after it, or why it stopped in its latest."""
    key = _key(rank, _begun.number)
    if store.check([key]):
        return store.get(key).decode()
    if store.check([_begun_key(rank)]) and store.check([key := _key(rank, int(store.get(_begun_key(rank))))]):
        line = store.get(key).decode()
        return None if _left(line) else line
    return None


def _lines() -> dict[int, str]:
    """The lines of the other ranks, as soon as one has stopped by itself, or all have left one."""
    store, lines, deadline = _store(), {}, time.monotonic() + PATIENCE / 2
    while time.monotonic() < deadline:
        lines = {rank: line for rank in _others() if (line := _line_of(rank, store)) is not None}
        if len(lines) == len(_others()) or not all(map(_left, lines.values())):
            break
        time.sleep(0.05)
    return lines


def _store() -> Any:
    return default_store()


def _within_patience(ask: Callable[[], T]) -> T | None:
    """What a question to the store gives; None where it fails, or its host does not answer: it may be what stopped."""
    found: list[T] = []

    def asked() -> None:
        with contextlib.suppress(Exception):
            found.append(ask())

    thread = threading.Thread(target=asked, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # from Python 3.12 on none is started at the interpreter's end
        asked()
    else:
        thread.join(PATIENCE)
    return found[0] if found else None
