"""Arguments that trainers of older TRL took and configs take today: accepted, set on the config, and said once.

Notebooks pass `tokenizer=`, `max_seq_length=` or `beta=` to the trainer, with a plain `TrainingArguments` or with a
config. Each is one name in a table, or an option of the trainer's config under its own name.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from lowtide.run.options.training import TrainingConfig
from lowtide.spelling import nearest

Config = TypeVar("Config", bound=TrainingConfig)

RENAMED = {"max_seq_length": "max_length", "max_target_length": "max_completion_length"}
"""Arguments whose option has another name today."""
WITHOUT_EFFECT = {
    "padding_value": "batches have no padding",
    "label_pad_token_id": "batches have no padding",
    "is_encoder_decoder": "models are decoders alone",
    "dataset_batch_size": "rows are tokenized in batches of a fixed size",
    "num_of_sequences": "rows are packed over the whole dataset",
    "chars_per_token": "rows are packed by their tokens",
    "model_adapter_name": "the adapter that is active is trained",
}
"""Arguments that are taken and change nothing, and why."""
OFF = {"generate_during_eval", "force_use_ref_model", "reference_free", "infinite", "is_encoder_decoder"}
"""Arguments that are taken where they are off; what they switch on is not there."""

logger = logging.getLogger(__name__)


def take_tokenizer(older: dict[str, Any], processing_class: Any) -> Any:
    """`processing_class`, or what came under its older name `tokenizer`, which is taken out of `older`.

    Raises:
        ValueError: both came, and are two objects.
    """
    tokenizer = older.pop("tokenizer", None)
    if tokenizer is None:
        return processing_class
    if processing_class is not None and processing_class is not tokenizer:
        raise ValueError("tokenizer and processing_class are two names for one argument, and came with two objects")
    logger.warning("tokenizer= is the older name of processing_class=")
    return tokenizer


def with_older(config: Config, older: Mapping[str, Any], title: str) -> Config:
    """A config with the options that came as arguments of the trainer; itself where none came.

    Args:
        title: the trainer's name.

    Raises:
        TypeError: there is no such argument and no such option.
        ValueError: the config sets the option to something else, or the argument switches on what is not there.
    """
    kind = type(config).__name__
    options = {each.name for each in fields(config) if each.init}
    changes: dict[str, Any] = {}
    said = []
    for name, value in older.items():
        option = RENAMED.get(name, name)
        if name in OFF and value:
            raise ValueError(f"{title}: {name}={value!r} is not supported; leave it out")
        if name in OFF or value is None:
            continue
        if name in WITHOUT_EFFECT:
            said.append(f"{name}={value!r} has no effect, since {WITHOUT_EFFECT[name]}")
            continue
        if option not in options:
            raise TypeError(f"{title} has no argument {name!r}, and {kind} no such option{nearest(name, options)}")
        known = config.requested.get(option, value)
        if known != value:
            raise ValueError(f"{title}: {name}={value!r} contradicts {option}={known!r} of its {kind}: keep the latter")
        said.append(f"{name}={value!r} is taken as {option} of {kind}")
        changes[option] = value
    if said:
        logger.warning(f"arguments of an older TRL: {'; '.join(said)}")
    return _changed(config, changes) if changes else config


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy of a config with some options set, checked as at construction."""
    made = copy.copy(config)
    vars(made)["_requested"] = {**config.requested, **changes}
    for name, value in changes.items():
        setattr(made, name, value)
    check: Any = getattr(made, "check", None)
    if check is not None:
        check()
    return made
