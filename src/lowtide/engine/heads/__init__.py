"""The kinds of heads, one file each, and the table of them: a new one is one file and one entry here."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from lowtide.engine.heads.classes import SequenceClasses, TokenClasses
from lowtide.engine.heads.head import Head
from lowtide.engine.heads.language_model import LanguageModel
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


def head_of_task(task_type: str | None, config: PretrainedConfig | None = None) -> type[Head]:
    """The kind of head of a task by PEFT's name for it; a language model's where it is not known.

    Args:
        config: of the saved model, which tells heads apart that PEFT has one name for.
    """
    found = [head for head in HEADS if head.task_type == task_type] or [LanguageModel]
    return next((head for head in found[1:] if config is not None and head.is_saved(config)), found[0])
