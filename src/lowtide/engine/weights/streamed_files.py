"""Whether a model's files can be used as its memory: looked at before anything is loaded.

A disk or a file that fails under a mapping is a signal, and no exception: the process ends. So headers and sizes are
read first. Weights are used as they are stored, since one that is cast as it is loaded is a resident copy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lowtide.engine.weights.complete_weights import base_of_adapters
from lowtide.engine.weights.weight_files import AGAIN, find_fault, model_folder

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""The dtypes of floating-point numbers by their names in safetensors files."""


def check_streamable(name: str, init: Mapping[str, Any], *, what: str = "model") -> None:
    """Refuses a model whose files cannot be used as they are.

    Args:
        name: a folder or a name on the hub; one that is not downloaded yet is looked at once it is loaded.
        init: the arguments that it will be loaded with.
        what: the trainer's argument.

    Raises:
        ValueError: it is not on disk as safetensors, a file is missing or truncated, or weights are stored in another
            dtype than is asked for; says what to do.
    """
    base = base_of_adapters(name)
    if base is not None:
        return check_streamable(base, init, what=what)
    folder = model_folder(name)
    if folder is None:
        return None
    files = sorted(folder.glob("model*.safetensors"))
    if fault := find_fault(folder):
        raise ValueError(f"{what} {name!r} cannot be streamed: {fault}: {AGAIN}")
    if not files:
        raise ValueError(
            f"{what} {name!r} is not on disk as safetensors, which base_weights='stream' maps into memory: save it "
            "with save_pretrained(folder) and name that folder, or leave base_weights out"
        )
    stored = stored_bytes(files)
    wanted = init.get("dtype", init.get("torch_dtype", "float32"))
    wanted = str(wanted).removeprefix("torch.")
    most = str(stored.most_common(1)[0][0]).removeprefix("torch.") if stored else wanted
    if wanted not in ("auto", most):
        raise ValueError(
            f"base_weights='stream' uses weights as the files of {what} {name!r} have them, which is {most}, and in "
            f"{wanted} each would be a resident copy: set dtype={most!r} (model_init_kwargs={{'dtype': {most!r}}}), "
            f"save the model in {wanted} first, or leave base_weights out"
        )
    return None


def stored_bytes(files: list[Path]) -> Counter[torch.dtype]:
    """Bytes of floating-point numbers in safetensors files, by dtype; of other dtypes that are stored nothing."""
    found: Counter[torch.dtype] = Counter()
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                part = file.get_slice(key)
                dtype = STORED.get(part.get_dtype())
                if dtype is not None:
                    found[dtype] += math.prod(part.get_shape()) * dtype.itemsize
    return found
