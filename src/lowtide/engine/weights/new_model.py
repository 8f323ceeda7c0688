"""Models that begin with random weights: a folder with a config and a tokenizer, and no weights, is one.

The folder is what commands that look at a run read, as they read that of any model; whoever loads it as a model draws
its weights by the model's own initialization, from the run's seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from lowtide.engine.heads.head import Head
from lowtide.engine.weights.load_errors import check_layers, one_line
from lowtide.spelling import nearest

BEGINNING = "beginning.json"
"""The file that says that a folder's model begins with random weights, and what it was asked to be."""
OF_LOADING = ("trust_remote_code", "dtype", "attn_implementation")
"""Arguments of `from_pretrained` that `from_config` takes too."""


def begins_at_random(name: str) -> bool:
    """Whether a folder holds no weights, and is meant to."""
    return Path(name, BEGINNING).is_file()


def new_model(name: str, head: type[Head], init: Mapping[str, Any]) -> PreTrainedModel:
    """The model that a folder describes, with random weights.

    Raises:
        ValueError: arguments are about weights in files.
    """
    others = sorted({*init} - {*OF_LOADING} - {*head.config_values})
    if others:
        raise ValueError(
            f"{', '.join(others)} is of weights that are loaded, and the model in {name!r} begins with random ones: "
            "leave it out"
        )
    config = AutoConfig.from_pretrained(name, trust_remote_code=bool(init.get("trust_remote_code")))
    for key, value in head.config_values.items():
        setattr(config, key, value)
    return head.auto_class.from_config(config, **{key: each for key, each in init.items() if key in OF_LOADING})


def described_config(
    config_name: str | None, model_type: str | None, overrides: Mapping[str, Any], *, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The config of a new model.

    Args:
        config_name: a config's file, the folder of a model, or a name on the hub.
        model_type: in its place, the type of a model with transformers' default sizes.
        overrides: values that take the place of the config's own.

    Raises:
        ValueError: there is no such config or type, it has no value of a name, or the values do not go together.
    """
    if model_type is not None:
        if model_type not in CONFIG_MAPPING:
            known_types = nearest(model_type, list(CONFIG_MAPPING.keys()))
            raise ValueError(f"model_type={model_type!r} is none that transformers knows{known_types}")
        config = AutoConfig.for_model(model_type)
    else:
        assert config_name is not None
        config = _read(config_name, trust_remote_code)
    known = config.to_dict()
    for name in overrides:
        if name not in known:
            raise ValueError(
                f"config_overrides names {name!r}, which a config of model type {config.model_type} does not have"
                f"{nearest(name, known)}"
            )
    try:
        if model_type is not None:
            made = AutoConfig.for_model(model_type, **overrides)  # what follows from sizes follows from these
        else:
            made = type(config).from_dict({**known, **overrides})
    except (StrictDataclassError, TypeError, ValueError) as error:
        what = f"config_overrides={dict(overrides)} makes no config of model type {config.model_type}"
        raise ValueError(f"{what}: {one_line(error)}") from error
    check_layers(made, str(model_type or config_name))
    return made


def _read(config_name: str, trust_remote_code: bool) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(config_name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"config_name={config_name!r} has no config that can be read: {reason}") from error
