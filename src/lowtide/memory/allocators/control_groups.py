"""The memory limits that Linux's control groups put on the process: those of its own group and of all groups above.

A container, a SLURM job or a systemd service is a group, and groups are nested: memory of a process counts in each
group above it, so that the smallest limit is the one that holds. `/proc/self/cgroup` names the process's group,
`/proc/self/mountinfo` says where groups are mounted, in version 2 or 1. In a container the group that is named need not
be visible; then what is mounted is the container's own group.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class Limit(NamedTuple):
    """What a group may hold, and holds, in bytes."""

    most: int
    used: int
    """Without the pages of files that nobody has read lately, which the kernel gives up before it ends a process."""


class _Files(NamedTuple):
    """The names of a version's files, and of its fields in `memory.stat`."""

    most: str
    used: str
    idle_pages: str


VERSIONS = {
    "cgroup2": _Files("memory.max", "memory.current", "inactive_file"),
    "cgroup": _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the type of the file system: versions 2 and 1."""
WITH_GROUPS_ABOVE = "hierarchical_memory_limit"
"""The field of version 1 that also says what groups above allow, those that are not visible among them."""


def memory_limits(root: Path = ROOT) -> list[Limit]:
    """The limits that hold for the process; none where groups set none.

    Args:
        root: where `/proc` and `/sys` are.
    """
    return [limit for kind, top, own in _mounted(root) for limit in _of_groups(VERSIONS[kind], top, own)]


def _mounted(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """(type, where it is mounted, the process's group in it) of each hierarchy of groups that may limit memory."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, system = (part.split() for part in line.partition(" - "))
        kind, options = system[0], system[-1].split(",")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options):
            shown, top = _unescaped(mount[3]).rstrip("/"), root / _unescaped(mount[4]).lstrip("/")
            group = _own_group(root, kind)
            inside = group.startswith(f"{shown}/") and ".." not in group.split("/")
            yield kind, top, top / group[len(shown) + 1 :] if inside else top


def _own_group(root: Path, kind: str) -> str:
    """The process's group, as the kernel names it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0" if kind == "cgroup2" else "memory" in controllers.split(","):
            return group
    return "/"


def _of_groups(files: _Files, top: Path, own: Path) -> Iterator[Limit]:
    """The limits of a group and of those above it, as far as they are mounted."""
    for folder in (own, *own.parents):
        stat = dict(re.findall(r"^(\w+) (\d+)$", _text(folder / "memory.stat"), re.MULTILINE))
        above = folder != own and _text(folder / "memory.use_hierarchy").strip() == "0"  # version 1: not counted there
        said = (_text(folder / files.most).strip(), stat.get(WITH_GROUPS_ABOVE, ""))
        found = [int(each) for each in said if each.isdigit()]
        if found and not above:
            used = int(_text(folder / files.used).strip() or 0)
            yield Limit(min(found), max(used - int(stat.get(files.idle_pages, 0)), 0))
        if folder == top:
            return


def _text(path: Path) -> str:
    """A file's text; empty where there is none to read."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def _unescaped(path: str) -> str:
    """A path of `mountinfo`, which writes spaces as `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)
