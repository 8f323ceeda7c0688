"""Weights that are stored in bfloat16 and wanted in float32 stay as their file has them until each is cut into shards.

transformers maps a file's weights into memory, shared by all processes of a machine, where they are wanted as they are
stored; each process then copies its own shards alone. In another dtype each would hold a whole copy first. So a model
is loaded as it is stored, and widened unit by unit as it is cut, which rounds nothing. Buffers are those of a model in
float32, since some are computed in the dtype that a model is made in (Gemma's scale of embeddings).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lowtide.engine.heads.head import Head
from lowtide.engine.weights.loading import load_model

WANTED = "_lowtide_wanted_dtype"
"""The attribute of a model whose weights are to be widened."""
KNOWN = {"dtype", "trust_remote_code"}
"""Arguments of loading with which weights may wait."""


def waits(name: str, init: dict[str, Any]) -> bool:
    """Whether the weights of a model by its path are all in bfloat16, and wanted in float32.

    Args:
        init: the arguments that it is loaded with.
    """
    files = sorted(Path(name).glob("model*.safetensors"))
    if not files or not init.keys() <= KNOWN or init.get("dtype", "float32") not in ("float32", torch.float32):
        return False
    for path in files:
        with safe_open(path, framework="pt") as file:
            if any(file.get_slice(each).get_dtype() != "BF16" for each in file.keys()):  # noqa: SIM118
                return False
    return True


def load_waiting(name: str, *, head: type[Head], **init: Any) -> PreTrainedModel:
    """A model as `load_model` loads it in float32, but for its parameters, which are bfloat16 until `widen`."""
    model: Any = load_model(name, head=head, **{**init, "dtype": torch.bfloat16})
    for config in (model.config, model.config.get_text_config()):
        config.dtype = torch.float32
    with init_empty_weights(include_buffers=False):
        twin = type(model)(copy.deepcopy(model.config))
    saved = model.state_dict().keys()
    made = dict(twin.named_buffers())
    for each, buffer in model.named_buffers():
        buffer.data = buffer.data.to(made[each].dtype) if each in saved else made[each].data
    vars(model)[WANTED] = torch.float32
    return model


def taken_dtype(model: nn.Module) -> torch.dtype | None:
    """What a model's weights are to be widened to, which is for the caller to do; None where they are as wanted."""
    return vars(model).pop(WANTED, None)


def widen(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> None:
    """Gives parameters that are not cut yet the dtype that is wanted."""
    for parameter in parameters:
        if dtype is not None and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(dtype)
