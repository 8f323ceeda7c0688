"""Weights of labels in the loss: an option that classifiers of tokens and of texts share."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.methods.method import Labels
from lowtide.option import option

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class WeightedClasses:
    """The option."""

    class_weights: list[float] | dict | Literal["balanced"] | None = option(
        None,
        "Weight of each label in the loss: a list in the order of the labels, a mapping by name (1 for the others), or "
        "'balanced': scores / (labels x scores of the label).",
    )

    def check_weights(self) -> None:
        """Refuses weights that are none.

        Raises:
            ValueError: names the weight.
        """
        weights: Any = self.class_weights if isinstance(self.class_weights, list | Mapping) else ()
        numbers = [*weights.values()] if isinstance(weights, Mapping) else [*weights]
        for each in numbers:
            if isinstance(each, bool) or not isinstance(each, int | float) or not 0 <= each < float("inf"):
                raise ValueError(f"class_weights has the weight {each!r}: weights are numbers, 0 or above")
        if numbers and not any(numbers):
            raise ValueError("class_weights are all 0, so that nothing would be learned: give a label a weight above 0")


def class_weights(
    given: Sequence[float] | Mapping[str, float] | str, labels: Labels
) -> Float[Tensor, " labels"] | None:
    """The weight of each label; None where "balanced" ones cannot be counted, of rows that are prepared already.

    Raises:
        ValueError: the weights are not those of the labels.
    """
    names = labels.names
    if isinstance(given, str):
        if labels.scored is None:
            logger.warning(
                "class_weights='balanced' counts the labels of the rows, which cannot be counted before they are read "
                "(a stream, or rows that are prepared already): all labels weigh 1. Give their weights"
            )
            return None
        found = np.array([labels.scored.get(name, 0) for name in names], dtype=np.float64)
        return torch.tensor(found.sum() / (len(names) * np.maximum(found, 1)), dtype=torch.float32)
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(f"class_weights names {unknown[0]!r}, and the labels are {', '.join(names)}")
        given = [given.get(name, 1.0) for name in names]
    if len(given) != len(names):
        raise ValueError(
            f"class_weights has {len(given)} weights, and there are {len(names)} labels ({', '.join(names)}): give one "
            "for each, or a mapping by label"
        )
    return torch.tensor(given, dtype=torch.float32)
