"""Reward models of vision-language models, which transformers has no classes for.

They are made the way transformers makes those of language models (`GenericForSequenceClassification`): the model's
body, and a `score` of its last hidden states. Saved ones name their class in `config.json`; it is made again from there
by whatever loads models here.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from lowtide.engine.heads.language_model import WITH_IMAGES

NO_CLASS = WITH_IMAGES - {*MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES}
"""Model types that transformers has no such class for."""
_made: dict[type[PretrainedConfig], Any] = {}


def register_reward_model(config: PretrainedConfig | None) -> None:
    """Lets `AutoModelForSequenceClassification` make reward models of a vision-language model's type."""
    if config is None or (kind := type(config)) in _made or config.model_type not in NO_CLASS:
        return
    body: Any = MODEL_MAPPING[kind]
    parent = next(each for each in body.__mro__[1:] if issubclass(each, PreTrainedModel))
    name = body.__name__.removesuffix("Model") + "ForSequenceClassification"
    _made[kind] = type(name, (GenericForSequenceClassification, parent), {"__module__": __name__, "config_class": kind})
    written: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]  # whose files name weights as this model's do
    if (names := get_checkpoint_conversion_mapping(written.__name__)) is not None:
        register_checkpoint_conversion_mapping(name, names, overwrite=True)
    globals()[name] = _made[kind]  # where pickle looks for it
    AutoModelForSequenceClassification.register(kind, _made[kind], exist_ok=True)  # the config is of transformers
