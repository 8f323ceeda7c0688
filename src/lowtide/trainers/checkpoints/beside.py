"""What lies beside adapters in their folder, since it is no part of them.

The other model that is trained whole, such as a generator: a folder of its own within theirs.

Adapters are saved alone, without their base, and so would be without it. In a folder it is a model that loads by
itself, and the adapters stay ones that fit the base as it is. A model that is saved whole holds the other as one of its
modules.

How a reward model was given answers: a model that is saved whole says it in its config.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from lowtide.engine.forward import causal_model, model_beside
from lowtide.engine.heads import head_of
from lowtide.engine.heads.value import TURNS_FILE, TURNS_READ
from lowtide.ranks.shards import is_sharded
from lowtide.trainers.checkpoints.shards import load_weights, whole_state


def beside_adapters(model: nn.Module) -> PreTrainedModel | None:
    """The other model that is trained with a model that has adapters; None where there is none."""
    return model_beside(model) if hasattr(model, "peft_config") else None


def folder_of_other(model: nn.Module, folder: Path) -> Path:
    """Where the other model lies in a folder of adapters: under the name of its module."""
    name = head_of(causal_model(model)).added_module
    assert name is not None
    return folder / name


def save_beside(model: nn.Module, folder: Path, *, keep: bool) -> None:
    """Writes what there is beside adapters; all ranks call it together.

    Args:
        folder: of the adapters.
        keep: whether this rank writes.
    """
    noted = getattr(causal_model(model).config, TURNS_READ, None) if hasattr(model, "peft_config") else None
    if noted is not None and keep:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TURNS_FILE).write_text(json.dumps(noted))
    other = beside_adapters(model)
    if other is None:
        return
    weights = whole_state(other, keep) if is_sharded(model) else None
    if keep:
        other.save_pretrained(folder_of_other(model, folder), state_dict=weights)


def load_beside(model: nn.Module, folder: Path) -> None:
    """Reads the other model, if there is one beside adapters; all ranks call it together."""
    other = beside_adapters(model)
    if other is not None:
        load_weights(other, sorted(folder_of_other(model, folder).glob("model*.safetensors")))
