"""Files that a run writes: whole or not at all, never through a link, and readable as their neighbours are. What no run
wrote is never deleted."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

DEVICES = Path("/dev")
MARK = ".lowtide"
"""The file by which a folder is known as one that a run made and may delete."""
_WRITTEN = re.compile(r".*\.(bin|html|jinja|json|jsonl|md|model|npz|parquet|pt|pth|safetensors|txt|yaml)")
"""Files that runs write into their output folder, transformers' among them."""
_FOLDERS = ("beginning", "completions", "runs")
"""Folders that they write there."""


def usual_mode(most: int = 0o666) -> int:
    """The permissions that a new file has, or with 0o777 a new folder."""
    try:
        status = Path("/proc/self/status").read_text()
        umask = int(status.split("Umask:", 1)[1].split(None, 1)[0], 8)
    except (OSError, IndexError, ValueError):
        umask = os.umask(0o077)  # another thread that makes a file meanwhile makes it private
        os.umask(umask)
    return most & ~umask


def is_strange(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder, links followed: a pipe, or a device."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A new file beside `path` to write into, which takes its place at the end. After an error what was there stays.

    A link in its place is replaced, and what that points to is left alone.

    Raises:
        FileExistsError: a pipe or a device is there, or the system's link to one, as `/dev/stdout`, which a file would
            take the place of.
    """
    if is_strange(path) and (not path.is_symlink() or path.parent.resolve() == DEVICES):
        raise FileExistsError(f"{path} is neither a file nor a folder: name a file to write")
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    beside = Path(name)
    try:
        os.fchmod(descriptor, usual_mode())
        os.close(descriptor)
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_output(path: Path, text: str) -> None:
    """Writes what a command was asked to write to a path: into a pipe or a device as it lies there, else as a file."""
    if is_strange(path):
        path.write_text(text, encoding="utf-8")
        return
    with writing(path) as beside:
        beside.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, which is gone at the end unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        made.chmod(usual_mode(0o777))
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def share_weights(folder: Path) -> None:
    """Gives files that safetensors wrote in a folder the usual permissions; it leaves them to their owner alone."""
    for path in folder.rglob("*.safetensors"):
        share_file(path)


def share_file(path: Path) -> None:
    """Gives a file the usual permissions, if it has those of a temporary one; another user's stays as it is."""
    with contextlib.suppress(OSError):
        if not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600:
            path.chmod(usual_mode())


def check_no_links(folder: Path) -> None:
    """Refuses an output folder in which a link has a name that a run writes to.

    Raises:
        ValueError: names the link, and what it points to.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_symlink() and (path.name in _FOLDERS or _WRITTEN.fullmatch(path.name)):
            raise ValueError(
                f"output_dir {str(folder)!r} holds {path.name}, a link to {os.readlink(path)}: a run writes under that "
                "name, and would write over what the link points to. Remove the link, or name another output_dir"
            )


def separate_hard_links(folder: Path) -> None:
    """Gives each output of a folder that has a second name, a hard link, a file of its own with the same content. What
    a run writes would otherwise be written over what the other name stands for. One process at a time may call it.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1 and _WRITTEN.fullmatch(path.name):
            with writing(path) as beside:
                shutil.copyfile(path, beside)
                beside.chmod(status.st_mode & 0o777)


def remove_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """Removes these files of a folder, then the folders that are empty; returns what is left.

    A name that leads out of the folder, by itself or through a link, is left alone.
    """
    inside = folder.resolve()
    for name in names:
        path = folder / name
        if ".." not in Path(name).parts and path.parent.resolve().is_relative_to(inside):
            with contextlib.suppress(OSError):
                path.unlink()
    below = sorted((path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()), reverse=True)
    for each in (*below, folder):
        with contextlib.suppress(OSError):
            each.rmdir()
    return sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


def make_marked(folder: Path) -> None:
    """A new folder that is known as a run's, in place of what an earlier run left under its name; a link is not
    followed.

    Raises:
        OSError: there is a file or a folder under that name which no run made.
    """
    remove_marked(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()


def remove_marked(folder: Path) -> None:
    """Removes a folder that a run made, or a link in its place.

    Raises:
        OSError: it is something that no run made.
    """
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir() and (not any(folder.iterdir()) or (folder / MARK).is_file()):
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        raise FileExistsError(
            f"{folder} was made by no run, and a run makes and deletes a folder of that name: move it away, or name "
            "another output_dir. If an earlier version of lowtide left it, delete it"
        )
