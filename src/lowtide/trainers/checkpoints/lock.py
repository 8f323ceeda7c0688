"""One run at a time in an output folder: two would write, rename and delete each other's checkpoints.

The lock is the system's own (`flock`) on a file in the folder, so that it ends with the process that holds it, however
that dies. The file says which process that is. Where a file system has no locks (some network file systems), that text
alone decides: a process of this machine that is gone holds nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from lowtide.own_files import check_no_links, separate_hard_links
from lowtide.parsing import parse_json

LOCK = ".lowtide.lock"
_MOST_BYTES = 4096
"""The most bytes that a lock file has."""
_STRANGER = (
    "{path} is no file that a run made: a run locks its output folder by a file of that name. Move it away, or name "
    "another output_dir"
)
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""What a file system without locks says."""

_held: dict[Path, tuple[int, int]] = {}
"""By folder, the thread of this process that holds its lock, and the descriptor."""


@contextlib.contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """While it lasts, other processes are refused the same folder. One thread may ask again for what it holds.

    Raises:
        ValueError: another process has the folder; names the process and its machine.
    """
    folder = folder.resolve()
    if folder in _held and _held[folder][0] == threading.get_ident():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    check_no_links(folder)
    path = folder / LOCK
    descriptor = _acquired(path, folder)
    _held[folder] = threading.get_ident(), descriptor
    try:
        separate_hard_links(folder)
        yield
    finally:
        del _held[folder]
        with contextlib.suppress(OSError):
            if _is_still(path, descriptor):
                path.unlink(missing_ok=True)  # before it is free: the next run makes a file of its own
        os.close(descriptor)


def leave_folders() -> None:
    """Removes the files of the locks that this process holds, before it ends without leaving `only_run_in`."""
    for folder in list(_held):
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink(missing_ok=True)


def _acquired(path: Path, folder: Path) -> int:
    """The descriptor of the lock file, locked."""
    while True:
        descriptor = _opened(path)
        try:
            locked = _flock(descriptor)
            holder = _holder(path, descriptor)
            if locked is False or (locked is None and _lives(holder)):
                raise ValueError(_refusal(folder, holder))
            if not _is_still(path, descriptor):  # its holder removed it in the meantime
                os.close(descriptor)
                continue
            mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(mine).encode(), 0)
            return descriptor
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise


def _opened(path: Path) -> int:
    """The descriptor of the lock file, which is made if it is not there; a link is not followed.

    Raises:
        ValueError: under its name lies something that no run made.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise ValueError(_STRANGER.format(path=path)) from None
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:  # another name of it may be a file of the user's
        os.close(descriptor)
        raise ValueError(_STRANGER.format(path=path))
    return descriptor


def _flock(descriptor: int) -> bool | None:
    """Whether the lock is ours now; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _holder(path: Path, descriptor: int) -> dict:
    """What the lock file says of the process that holds it; empty where it says nothing.

    Raises:
        ValueError: it holds something that no run wrote.
    """
    text = os.pread(descriptor, _MOST_BYTES, 0)
    if not text.strip(b"\0"):  # made a moment ago, or what a loss of power leaves
        return {}
    try:
        found = parse_json(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not {"pid", "host"} <= found.keys():
        raise ValueError(_STRANGER.format(path=path))
    return found


def _lives(holder: dict) -> bool:
    """Whether the process that a lock file names may still be there; one of another machine may."""
    if holder.get("host") != socket.gethostname():
        return bool(holder)
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _refusal(folder: Path, holder: dict) -> str:
    who = f"process {holder.get('pid', 'unknown')}"
    if holder.get("host") != socket.gethostname():
        who += f" on {holder.get('host', 'another machine')}"
    since = f" since {holder['since']}" if "since" in holder else ""
    return (
        f"output_dir {str(folder)!r} is in use: {who} trains into it{since}, and two runs would destroy each other's "
        f"checkpoints. Name another output_dir, or stop that process. If it is gone, delete {folder / LOCK}"
    )


def _forget_in_child() -> None:
    """A forked process (a worker of a data loader) would keep the lock when its parent is dead."""
    for _, descriptor in _held.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
