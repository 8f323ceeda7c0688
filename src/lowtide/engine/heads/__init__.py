"""The kinds of heads, one file each, and the table of them: a new one is one file and one entry here."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from lowtide.compat.transformers import loads
from lowtide.engine.heads.classes import SequenceClasses, TokenClasses
from lowtide.engine.heads.head import Head
from lowtide.engine.heads.language_model import LanguageModel, is_encoder
from lowtide.engine.heads.masked_language_model import MaskedLanguageModel
from lowtide.engine.heads.replaced_tokens import ReplacedTokens
from lowtide.engine.heads.sequence_to_sequence import SequenceToSequence
from lowtide.engine.heads.value import Value

HEADS: tuple[type[Head], ...] = (
    *(LanguageModel, MaskedLanguageModel, SequenceToSequence),
    *(Value, TokenClasses, SequenceClasses, ReplacedTokens),
)
"""In the order in which a model is asked for them."""


def head_of(model: PreTrainedModel) -> type[Head]:
    """The kind of head that a model has.

    Raises:
        ValueError: it has none that is known; names the model type, and how to load it.
    """
    for head in HEADS:
        if head.why_not(model) is None:
            return head
    ways = " or ".join(head.auto_class.__name__ for head in HEADS)
    raise ValueError(
        f"{type(model).__name__} (model type {model.config.model_type}) has no head that lowtide reads, such as a "
        f"language-modelling head: load it with {ways}"
    )


def check_type(head: type[Head], config: PretrainedConfig | None, name: str) -> None:
    """Refuses a type of models that none can be loaded of with a head.

    Args:
        config: of the saved model; None where it has none.
        name: the model's folder or hub name.

    Raises:
        ValueError: says what models of the type can be trained as.
    """
    if config is None:
        return
    if loads(loader := head.loader(config), config):
        if head is LanguageModel and is_encoder(config):
            raise ValueError(
                f"model {name!r} is an encoder (is_decoder is False in its config), whose tokens see those after them: "
                "train it with `lowtide masked-lm`, or take a model that predicts the token that follows"
            )
        return
    others = [each.models for each in HEADS if loads(each.loader(config), config)]
    instead = f"they are trained as {', '.join(others)}" if others else "lowtide does not train them"
    raise ValueError(
        f"model {name!r} is of type {config.model_type}, of which there are no {head.models} ({loader.__name__}): "
        f"{instead}"
    )


def head_of_task(task_type: str | None, config: PretrainedConfig | None = None) -> type[Head]:
    """The kind of head of a task by PEFT's name for it; a language model's where it is not known.

    Args:
        config: of the saved model, which tells heads apart that PEFT has one name for.
    """
    found = [head for head in HEADS if head.task_type == task_type] or [LanguageModel]
    return next((head for head in found[1:] if config is not None and head.is_saved(config)), found[0])
