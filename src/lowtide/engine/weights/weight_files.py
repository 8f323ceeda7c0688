"""The files of a model: which of them cannot be read, and why.

What is raised for a broken file is raised deep inside of safetensors, torch or json, and names no file. So after a
failure the files are looked through, one by one: headers and sizes of safetensors, the index of a sharded model.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lowtide.parsing import read_object

INDEXES = ("*.safetensors.index.json", "*.bin.index.json")
AGAIN = "copy or download the folder again"
RUNS_CODE = "holds Python objects other than tensors, which could run code and are never loaded"


@contextlib.contextmanager
def broken_files_named(name: str) -> Iterator[None]:
    """Has a failure to load a model or its adapters name the file at fault, where one is.

    Args:
        name: the folder, or the name on the hub.

    Raises:
        ValueError: a file cannot be read; names it.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        fault = find_fault(model_folder(name))
        if fault is None:
            raise
        remedy = "take one that is saved as safetensors" if fault.endswith(RUNS_CODE) else AGAIN
        raise ValueError(f"model {name!r} cannot be loaded: {fault}: {remedy}") from error


def find_fault(folder: Path | None) -> str | None:
    """The first file of a model's folder that cannot be read, and what is wrong with it; None where all can be."""
    if folder is None or not folder.is_dir():
        return None
    for index in _matching(folder, *INDEXES):
        if fault := _fault_of_index(index):
            return fault
    for path in _matching(folder, "*.safetensors", "pytorch_model*.bin", "adapter_model*.bin"):
        if fault := _fault_of_weights(path):
            return f"{path} {fault}"
    return None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: it holds none; names the file.
    """
    try:
        return read_object(path)
    except ValueError as error:
        raise ValueError(f"{error}: {AGAIN}") from error


def _matching(folder: Path, *patterns: str) -> list[Path]:
    return [path for pattern in patterns for path in sorted(folder.glob(pattern))]


def model_folder(name: str) -> Path | None:
    """The folder of a model, in the hub's cache for one that was downloaded."""
    if os.path.isdir(name):
        return Path(name)
    with contextlib.suppress(Exception):  # no valid name of the hub's
        cached = try_to_load_from_cache(name, "config.json")
        return Path(cached).parent if isinstance(cached, str) else None
    return None


def saved_module(folder: str, name: str) -> dict[str, Tensor]:
    """The weights of one module in the files of a model, by their names within it; empty where there are none.

    Args:
        folder: of the model; nothing is read if it is empty.
        name: of the module, as in `model.named_modules()`.
    """
    found: dict[str, Tensor] = {}
    for path in _matching(Path(folder), "model*.safetensors") if folder else ():
        with safe_open(str(path), "pt") as file:  # type: ignore[no-untyped-call]
            for key in file.keys():  # noqa: SIM118
                if key.startswith(f"{name}."):
                    found[key.removeprefix(f"{name}.")] = file.get_tensor(key)
    return found


def stored_as_whole_numbers(name: str) -> list[str]:
    """The weights in safetensors files of a model, by hub name or folder, whose numbers are whole."""
    found = []
    for path in _matching(model_folder(name) or Path(), "model*.safetensors"):
        with safe_open(str(path), "pt") as file:  # type: ignore[no-untyped-call]
            found += [key for key in file.keys() if file.get_slice(key).get_dtype()[0] in "IU"]  # noqa: SIM118
    return found


def _fault_of_index(index: Path) -> str | None:
    """What is wrong with the index of a sharded model, or with the list of its shards."""
    try:
        shards = read_json(index).get("weight_map")
    except ValueError as error:
        return str(error).removesuffix(f": {AGAIN}")
    if not isinstance(shards, dict):
        return f"{index} has no `weight_map`, which tells the shard of each weight"
    gone = sorted({str(shard) for shard in shards.values() if not (index.parent / str(shard)).is_file()})
    return f"{index.parent / gone[0]} is not there, which {index.name} names" if gone else None


def _is_pickle(path: Path) -> bool:
    """Whether a file is read as a pickle to its end, of which nothing is carried out."""
    try:
        with path.open("rb") as file:
            return any(operation.name == "STOP" for operation, _, _ in pickletools.genops(file))
    except ValueError:
        return False


def _fault_of_weights(path: Path) -> str | None:
    """What is wrong with a file of weights."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                return None
        weights = torch.load(path, map_location="meta", weights_only=True)
    except SafetensorError as error:
        size = path.stat().st_size
        return f"({size:,} bytes) is truncated, or no safetensors file ({str(error).strip()})"
    except pickle.UnpicklingError as error:
        refused = "Unsupported" in str(error) or "GLOBAL" in str(error)
        if refused and (zipfile.is_zipfile(path) or _is_pickle(path)):
            return RUNS_CODE
        return f"({path.stat().st_size:,} bytes) cannot be read ({type(error).__name__})"
    except Exception as error:
        return f"({path.stat().st_size:,} bytes) cannot be read ({_first_line(error)})"
    return None if isinstance(weights, dict) else f"holds a {type(weights).__name__} where named weights belong"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
