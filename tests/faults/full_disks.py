"""a full disk or a limit on files is said with the bytes wanted and free, and leaves the checkpoints before it whole"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lowtide.trainers.checkpoints.soundness import damage

from .case import Case
from .tiny_run import refusal, trainer

FULL = "the disk is full"
KILOBYTES = (40, 60, 80, 100, 140, 180)
"""Sizes of a disk that the first or the second checkpoint does not fit on."""
LIMITS = {"model": 15_000, "optimizer": 30_000}
"""The largest file of the process, in bytes, by what does not fit."""
OPTIONS: dict[str, Any] = {"hidden_size": 32, "save_total_limit": None, "eval_strategy": "no"}


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A disk of its own.

    Raises:
        CalledProcessError: mounting is not permitted.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def can_mount() -> bool:
    """Whether this process may mount a disk."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder, "disk"), 64):
                return True
        except (subprocess.CalledProcessError, FileNotFoundError):
            return False


def check_stops(output: Path, wanted: str) -> None:
    """A run that cannot write stops with one message, and resumes where there is room."""
    text = refusal(lambda: trainer(output, **OPTIONS).train())
    assert "the checkpoint could not be written to" in text, text
    assert wanted in text, text
    assert "inline_container" not in text, text
    assert "The checkpoint needs " in text, text
    assert not (output / ".saving").exists()
    kept = sorted(output.glob("checkpoint-*"))
    assert all(damage(each) == {} for each in kept), kept
    assert [each.name for each in kept] == [f"checkpoint-{2 * n + 2}" for n in range(len(kept))]


def check_disk(kilobytes: int, folder: Path) -> None:
    """A disk of a few kilobytes."""
    with small_disk(folder / "disk", kilobytes) as disk:
        check_stops(disk / "run", FULL)


def check_limit(size: int, folder: Path) -> None:
    """Files end at a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        check_stops(folder / "run", "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert trainer(folder / "run", **OPTIONS).train().global_step == 12


def cases(seed: int) -> Iterator[Case]:
    """Disks of several sizes where this user may mount them, and limits on files."""
    if os.geteuid() == 0 and can_mount():
        for kilobytes in KILOBYTES:
            yield Case(f"a disk of {kilobytes} kB", partial(check_disk, kilobytes))
    for name, size in LIMITS.items():
        yield Case(f"files of {size:,} bytes, less than the {name} has", partial(check_limit, size))
