"""Deletes old checkpoints: of `save_total_limit`, as transformers chooses them, and only what runs wrote.

A checkpoint's manifest lists the files that were written. A folder without one, though it has a checkpoint's name, is
not lowtide's, and files beside those of the manifest are the user's: both stay.
"""

from __future__ import annotations

import logging
from pathlib import Path

from transformers.trainer_utils import sort_checkpoints

from lowtide.own_files import remove_files
from lowtide.trainers.checkpoints.manifest import MANIFEST, read_manifest

logger = logging.getLogger(__name__)


def rotate(run: Path, limit: int | None, best: str | None) -> None:
    """Deletes the oldest checkpoints of an output folder until `limit` are left; the last and the best stay.

    Args:
        limit: None deletes nothing.
        best: the folder of the best checkpoint.
    """
    written = [folder for folder in map(Path, sort_checkpoints(str(run), use_mtime=True)) if is_written(folder)]
    if limit is None or len(written) <= limit:
        return
    kept = {written[-1], *([Path(best)] if best else [])}
    old = [folder for folder in written if folder not in kept]
    for folder in old[: len(written) - max(limit, len(kept))]:
        remove_written(folder)


def keep_best(run: Path, best: Path) -> None:
    """Deletes all checkpoints of an output folder but one."""
    for folder in map(Path, sort_checkpoints(str(run))):
        if is_written(folder) and not folder.samefile(best):
            remove_written(folder)


def is_written(folder: Path) -> bool:
    """Whether a run of lowtide wrote a checkpoint."""
    return not folder.is_symlink() and (folder / MANIFEST).is_file()


def remove_written(folder: Path) -> list[Path]:
    """Removes the files of a checkpoint that its manifest lists; returns what stays, and says so in the log."""
    try:
        names = read_manifest(folder) or {}
    except ValueError:
        names = {}
    kept = remove_files(folder, [*names, MANIFEST] if names else [])
    if kept:
        logger.warning(f"{folder} stays with {kept[0].name}, which no run wrote: the rest of the checkpoint is deleted")
    return kept
