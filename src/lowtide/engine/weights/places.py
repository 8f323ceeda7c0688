"""What is at a place that a model is loaded from, told by the names of its files alone: before torch is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lowtide.own_files import is_strange
from lowtide.parsing import read_object

LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers", "num_experts")
HEADS = ("num_attention_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads")
COUNTS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(LAYERS, (0, 10_000)),
    **dict.fromkeys(HEADS, (1, 100_000)),
    "hidden_size": (1, 1_000_000),
    "vocab_size": (0, 10_000_000),
}
"""Counts of a model's config: the least of each, and what no model has more of, since one that does takes hours and all
memory to make."""
SINGLE = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
"""Those that are one number for all layers."""
DTYPES = re.compile(r"(torch\.)?(auto|b?float16|float(32|64)?|half|double|float8_\w+|float4_\w+)")
"""Names of what weights may be stored in."""
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
READ = (".bin", ".jinja", ".json", ".model", ".safetensors")
"""Files of a model's folder that are read, which never ends where they are pipes or devices."""


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
    if not path.is_dir() and (name.startswith((".", "/", "~")) or not HUB_NAME.fullmatch(name)):
        siblings = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, siblings, n=1)
        hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else ""
        no_name = "" if name.startswith((".", "/", "~")) else ", and a name on the hub is NAME or OWNER/NAME"
        raise ValueError(f"{option} {name!r} cannot be loaded: there is no such folder{hint or no_name}")
    check_config_file(path)


def check_config_file(folder: Path) -> None:
    """Refuses a folder whose config.json is no config, or where a pipe or device has the name of a file that is read.

    Raises:
        ValueError: names the file; or config.json is no JSON object, or says counts that no model has.
    """
    if not os.path.isdir(folder):  # Path.is_dir raises where no folder can have such a name
        return
    file, unread = folder / "config.json", f"the config of model {str(folder)!r} cannot be read: "
    strange = [each for each in sorted(folder.glob("*")) if each.suffix in READ and is_strange(each)]
    if strange:
        raise ValueError(f"model {str(folder)!r} cannot be loaded: {strange[0].name} is neither a file nor a folder")
    if file.is_dir():
        raise ValueError(f"{unread}its config.json is a folder")
    if not file.exists():
        return
    try:
        config = read_object(file, "its config.json")
    except ValueError as error:
        raise ValueError(f"{unread}{error}") from error
    if not isinstance(config.get("model_type", ""), str):
        raise ValueError(f"{unread}it says model_type={config['model_type']!r}, which is a name")
    quantized = config.get("quantization_config") or {}
    if not isinstance(quantized, dict) or not isinstance(quantized.get("quant_method") or "", str):
        raise ValueError(
            f"{unread}it says quantization_config={quantized!r:.80}, which is no object with a quant_method"
        )
    for part in (config, config.get("text_config"), config.get("vision_config")):
        if isinstance(part, dict):
            check_counts(part, str(folder))
            _check_dtype(part, str(folder))


def check_counts(config: Mapping[str, Any], name: str) -> None:
    """Refuses a config whose counts no model has.

    Raises:
        ValueError: names the key.
    """
    for key, (least, most) in COUNTS.items():
        count = config.get(key)
        if isinstance(count, list | dict) and key in SINGLE:
            raise ValueError(f"the config of {name!r} says {key}={count!r:.80}, which is one number")
        fits = isinstance(count, int) and not isinstance(count, bool) and least <= count <= most
        if isinstance(count, int | float | str) and not fits:
            raise ValueError(f"the config of {name!r} says {key}={count!r:.80}, and a model has {least} to {most:,}")


def _check_dtype(config: Mapping[str, Any], name: str) -> None:
    for key in ("dtype", "torch_dtype"):
        dtype = config.get(key)
        if (
            dtype is not None
            and not (isinstance(dtype, str) and DTYPES.fullmatch(dtype))
            and not isinstance(dtype, dict)
        ):
            raise ValueError(
                f"the config of {name!r} says {key}={dtype!r:.80}, which names nothing that weights are stored in: "
                "take float32, bfloat16 or float16"
            )


def named_base(adapters: Mapping[str, Any], file: Path) -> str | None:
    """The model that adapters were trained on, as the content of their `file` names it; None where it names none.

    Raises:
        ValueError: it is no text.
    """
    base = adapters.get("base_model_name_or_path") or None
    if base is not None and not isinstance(base, str):
        raise ValueError(f"{file} says base_model_name_or_path={base!r:.80}, and a model's name is text")
    if base is not None and "\0" in base:
        raise ValueError(f"{file} says base_model_name_or_path={base!r:.80}, and no model's name holds a null byte")
    return base
