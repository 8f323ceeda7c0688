"""The shapes of well-known models, so that a question about one is answered offline and without its weights.

They are in `known_models.json`: what the config.json of each says, as far as memory and time depend on it. `parameters`
is what its page counts, which a test compares with the model that the shape makes.
"""

from __future__ import annotations

import functools
import json
import os
import re
from importlib.resources import files
from typing import Any

from transformers import AutoConfig, PretrainedConfig

FILE = "known_models.json"
TUNED = re.compile(r"-(?:instruct-[0-9]{4}|instruct|chat|it|pt|hf|base)(?=-|$)")
"""Words in names of models that have the shape of what they were made from, wherever they stand. Any other word
(`awq`, `bnb`, `coder`) stays, so that a name with one is not found."""
DATED = re.compile(r"-v?(?:2407|2501)$")
"""Ends of names of models of which one date is built in."""


@functools.cache
def known_models() -> dict[str, dict[str, Any]]:
    """By name: `config` and `parameters`."""
    return json.loads(files("lowtide.planner.answers").joinpath(FILE).read_text(encoding="utf-8"))["models"]


def known_name(model: str) -> str | None:
    """The entry of a name, with or without its owner, in any case, tuned for instructions or not; None where there is
    none, or a folder has the name."""
    if os.path.exists(model):
        return None
    wanted = _plain(model)
    for name in known_models():
        if wanted in (_plain(name), _plain(name).split("/")[-1]):
            return name
    return None


def known_config(model: str) -> PretrainedConfig | None:
    """The config of a well-known model; None where it is not known here."""
    name = known_name(model)
    if name is None:
        return None
    config = dict(known_models()[name]["config"])
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    config.dtype = "bfloat16"
    return config


def _plain(name: str) -> str:
    owner, slash, own = name.lower().rpartition("/")
    own = DATED.sub("", TUNED.sub("", own))
    if own.startswith("meta-llama-"):  # as Llama 3 and 3.1 were called
        own = own.removeprefix("meta-")
    return f"{owner}{slash}{own}"
