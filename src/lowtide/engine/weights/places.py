"""What is at a place that a model is loaded from, told by the names of its files alone: before torch is imported."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path


def check_model_place(name: str, option: str = "model") -> None:
    """Refuses a path where no model is. A name that may be one on the hub is left alone.

    Args:
        option: what named it.

    Raises:
        ValueError: nothing is there, or no folder of a model; names the nearest folder that is.
    """
    path = Path(name)
    if path.is_file():
        raise ValueError(f"{option} {name!r} cannot be loaded: it is a file, and a model is a folder")
    if path.is_dir() and not any([*path.glob("*.json"), *path.glob("shard-*")]):
        inside = sorted(each.parent.name for each in path.glob("*/*config.json"))
        hint = f": did you mean {path / inside[0]}?" if inside else ""
        raise ValueError(f"{option} {name!r} cannot be loaded: the folder has no config.json{hint}")
    if not path.is_dir() and name.startswith((".", "/", "~")):
        siblings = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, siblings, n=1)
        hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else ""
        raise ValueError(f"{option} {name!r} cannot be loaded: there is no such folder{hint}")
