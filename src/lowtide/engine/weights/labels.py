"""The labels of a model whose head gives logits of labels: their number decides its size, and its config names them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from lowtide.process.ways_out import in_python

logger = logging.getLogger(__name__)
UNNAMED = "LABEL_"
"""How transformers calls labels whose names it is not told."""


def names_of(config: PretrainedConfig) -> tuple[str, ...]:
    """The labels of a model, in the order of their numbers."""
    names: Any = config.id2label
    return tuple(names[number] for number in sorted(names))


def _has(config: PretrainedConfig, labels: Sequence[str]) -> bool:
    """Whether a config has all of some labels; of those without names, as many."""
    own = names_of(config)
    if all(name.startswith(UNNAMED) for name in labels):
        return len(labels) == len(own) or 1 < len(labels) < len(own)  # one alone is a value, and no class
    return {*labels} <= {*own}


def label_values(config: PretrainedConfig | None, labels: Sequence[str]) -> dict[str, Any]:
    """What a model's config has to say so that it has these labels; nothing where it has them all, in whatever order,
    as a model has that was trained on such data before."""
    if config is not None and _has(config, labels):
        return {}
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {name: number for number, name in enumerate(labels)},
    }


def set_labels(config: PretrainedConfig, labels: Sequence[str]) -> None:
    """Gives a config these labels, unless it has them."""
    for name, value in label_values(config, labels).items():
        setattr(config, name, value)


def name_labels(model: Any, labels: Sequence[str]) -> None:
    """Gives a model that is there these labels, unless it has them.

    Raises:
        ValueError: it has more or fewer.
    """
    own = names_of(model.config)
    if _has(model.config, labels):
        return
    if len(own) != len(labels):
        raise ValueError(
            f"the model has {len(own)} labels and the rows have {len(labels)} ({', '.join(labels[:12])}"
            f"{', ...' if len(labels) > 12 else ''}): "
            f"{in_python(f'load it with num_labels={len(labels)}, or pass its name; or ')}correct the row, if a label "
            "is wrong"
        )
    if not all(name.startswith(UNNAMED) for name in own):
        logger.warning(f"the model's labels ({', '.join(own)}) become those of the rows ({', '.join(labels)})")
    set_labels(model.config, labels)


def set_problem(config: Any, problem: str, *, asked: bool) -> None:
    """Gives a config its `problem_type`, by which transformers chooses a classifier's loss and reads its logits.

    Args:
        asked: whether a user asked for it, so that it takes the place of another one.

    Raises:
        ValueError: the config has another one.
    """
    own = config.problem_type
    if own not in (None, problem) and not asked:
        raise ValueError(
            f"the model's config says problem_type={own!r}, and the labels of the rows are of {problem}: convert the "
            f"labels, or set problem_type={problem!r}"
        )
    config.problem_type = problem
