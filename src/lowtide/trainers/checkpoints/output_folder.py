"""What a run finds in its output folder, and whether it may write there: asked before anything is loaded, torch too."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.trainers.checkpoints.manifest import MANIFEST

CHECKPOINT = "checkpoint"
"""How the names of checkpoints' folders begin: `PREFIX_CHECKPOINT_DIR` of transformers."""
STAGING = ".saving"
"""The folder of an output folder in which a checkpoint is written."""
TRAINER_STATE = "trainer_state.json"
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)")
OF_RUNS = {"training_args.bin", "run.yaml", "metrics.jsonl", TRAINER_STATE}
"""Files that show that a run has written into its output folder."""
OF_FOLDERS = re.compile(rf"{CHECKPOINT}-\d+|{re.escape(STAGING)}")
"""Names that a run gives to folders in its output folder."""


def check_output(folder: Path, read: Mapping[str, Any], *, saves: bool = True) -> None:
    """Refuses an output folder that cannot be one, or that the run reads from.

    Args:
        read: by option or argument, what the run reads: those that are paths are looked at.
        saves: whether the run writes checkpoints; without them it only needs a name that a folder can have.

    Raises:
        ValueError: names the file, or the option that names the same folder.
    """
    if "\0" in str(folder):
        raise ValueError(f"output_dir={str(folder)!r} has a zero byte, which no name of a folder has")
    if os.path.expandvars(folder) != str(folder) and not folder.exists():
        raise ValueError(
            f"output_dir={str(folder)!r} names a variable of the environment, which is not put in: write "
            f"{os.path.expandvars(folder)!r}"
        )
    if os.path.lexists(folder) and not folder.is_dir():
        raise ValueError(f"output_dir={str(folder)!r} is a file: name a folder, or one that is not there yet")
    if saves or not folder.is_dir():
        check_writable(folder)
    if not saves:
        return
    for name, value in read.items():
        path = Path(value) if isinstance(value, str | os.PathLike) and os.fspath(value) else None
        if path is not None and path.is_dir() and path.expanduser().resolve() == folder.resolve():
            raise ValueError(
                f"output_dir={str(folder)!r} is the folder of {name} too, whose files the run would write over: name "
                "another output_dir"
            )
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if OF_FOLDERS.fullmatch(path.name) and not path.is_dir():
            raise ValueError(
                f"{path} is a file, and a run makes a folder of that name: move it away, or name another output_dir"
            )


def model_of_others(folder: Path) -> str:
    """Says that there are weights in an output folder, of a model that no run wrote; empty where there are none."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    weights = sorted(filter(WEIGHTS.fullmatch, names))
    if not weights or names & OF_RUNS or any(map(OF_FOLDERS.fullmatch, names)):
        return ""
    return (
        f"output_dir={str(folder)!r} holds {weights[0]}, and no run of lowtide has written there: where a model is "
        "saved into it, its files replace those. Name another output_dir to keep them"
    )


def check_writable(folder: Path) -> None:
    """Refuses a folder that cannot be made or written into: a run of hours should not end in finding that. A folder is
    made there for a moment.

    Raises:
        ValueError: naming the folder and the system's reason.
    """
    there = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    try:
        with tempfile.TemporaryDirectory(prefix=STAGING, dir=there):
            pass
    except OSError as error:
        where = "" if there == folder else f": no folder can be made in {str(there)!r}"
        raise ValueError(
            f"output_dir={str(folder)!r} cannot be written{where} ({error.strerror}). Name a folder that this run may "
            "write to"
        ) from error


def checkpoints_of(output_dir: Path) -> list[Path]:
    """The checkpoints of an output folder, the last step first."""
    found = {}
    for path in output_dir.glob(f"{CHECKPOINT}-*") if output_dir.is_dir() else ():
        if (match := re.fullmatch(rf"{CHECKPOINT}-(\d+)", path.name)) and path.is_dir():
            found[int(match[1])] = path
    return [found[step] for step in sorted(found, reverse=True)]


def check_is_checkpoint(folder: Path, output_dir: Path) -> None:
    """Refuses a folder that is no checkpoint.

    Raises:
        ValueError: naming the last one of the output folder.
    """
    if not (folder / TRAINER_STATE).is_file() and not (folder / MANIFEST).is_file():
        last = next(iter(checkpoints_of(output_dir)), None)
        there = f"The last one in {output_dir} is {last}" if last else f"There is none in {output_dir} either"
        raise ValueError(f"resume_from_checkpoint: {str(folder)!r} is no checkpoint folder. {there}")
