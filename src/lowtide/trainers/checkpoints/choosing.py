"""Which checkpoint of an output folder a run resumes from: the last one that is whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from lowtide.trainers.checkpoints.output_folder import check_is_checkpoint, checkpoints_of
from lowtide.trainers.checkpoints.soundness import OPTIMIZERS, RANDOM, SCHEDULER, damage

OPTIONAL = (OPTIMIZERS, SCHEDULER, RANDOM)
"""States that a run can go on without, where it is told to."""


@dataclass(frozen=True)
class Chosen:
    """A checkpoint that was looked into."""

    folder: Path
    damaged: Mapping[str, str] = field(default_factory=dict)
    """States that a run goes on without, since their files are damaged, and what is wrong with each."""
    passed_over: tuple[str, ...] = ()
    """Later checkpoints that are not whole: which, and why."""


def last_whole(output_dir: Path, *, without_states: bool = False) -> Chosen | None:
    """The last whole checkpoint of an output folder; None where there is no checkpoint at all.

    Args:
        without_states: whether the run may go on without optimizer, scheduler and random states.

    Raises:
        ValueError: there are checkpoints, and none of them is whole; says what is wrong with each.
    """
    passed_over: list[str] = []
    for folder in checkpoints_of(output_dir):
        found = damage(folder)
        broken = {name: reason for name, reason in found.items() if not (without_states and is_optional(name))}
        if not broken:
            return Chosen(folder, found, tuple(passed_over))
        passed_over.append(f"{folder.name} ({said(broken)})")
    if passed_over:
        raise ValueError(
            f"no checkpoint in {output_dir} is whole: {', '.join(passed_over)}. Start the run anew in another "
            "output_dir, or bring an undamaged copy of a checkpoint"
        )
    return None


def named(folder: Path, output_dir: Path, *, without_states: bool = False) -> Chosen:
    """A checkpoint that was asked for by its folder.

    Raises:
        ValueError: it is none, or it is not whole; says which file, why, and what to resume from instead.
    """
    check_is_checkpoint(folder, output_dir)
    found = damage(folder)
    broken = {name: reason for name, reason in found.items() if not (without_states and is_optional(name))}
    if broken:
        hint = "Resume from another checkpoint ('latest' takes the last whole one)"
        if all(is_optional(name) for name in broken):
            hint += ", or go on without these states with resume_without_states=True"
        raise ValueError(f"{folder} cannot be resumed from: {said(broken)}. {hint}")
    return Chosen(folder, found)


def is_optional(name: str) -> bool:
    """Whether a run can go on without a file of this name."""
    return any(fnmatch(name, pattern) for pattern in OPTIONAL)


def said(damaged: Mapping[str, str]) -> str:
    """Files and what is wrong with them, in words."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in damaged.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
