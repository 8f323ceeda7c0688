"""What is at a place that a model is loaded from, told by the names of its files alone: before torch is imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers", "num_experts")
MOST = dict.fromkeys(LAYERS, 10_000) | {"hidden_size": 1_000_000, "vocab_size": 10_000_000}
"""Counts of a model's config, and what no model has more of: one that does takes hours and all memory to make."""


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
    check_config_file(path)


def check_config_file(folder: Path) -> None:
    """Refuses a folder whose config.json is no config.

    Raises:
        ValueError: it is no file or no JSON object, or says counts that no model has.
    """
    file = folder / "config.json"
    if not file.exists():
        return
    unread = f"the config of model {str(folder)!r} cannot be read: "
    if not file.is_file():
        raise ValueError(f"{unread}its config.json is no file")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"the config of model {str(folder)!r} is nested too deeply to be read") from None
    except ValueError as error:
        raise ValueError(f"{unread}its config.json is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{unread}its config.json holds a {type(config).__name__}, and no object")
    if not isinstance(config.get("model_type", ""), str):
        raise ValueError(f"{unread}it says model_type={config['model_type']!r}, which is a name")
    for part in (config, config.get("text_config"), config.get("vision_config")):
        if isinstance(part, dict):
            check_counts(part, str(folder))


def check_counts(config: Mapping[str, Any], name: str) -> None:
    """Refuses a config whose counts no model has.

    Raises:
        ValueError: names the key.
    """
    for key, most in MOST.items():
        count = config.get(key)
        if isinstance(count, int | float | str) and not (isinstance(count, int) and 0 <= count <= most):
            raise ValueError(f"the config of {name!r} says {key}={count!r}, and a model has 0 to {most:,}")
