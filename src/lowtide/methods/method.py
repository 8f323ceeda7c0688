"""What a post-training method is: options, an objective over scored tokens, and nothing of a Trainer.

Trainer, planner, command line and docs read the table in `lowtide.methods`; a new method is one file beside this one
and one line there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lowtide.ops.linear_logprobs import NOTHING_MORE, ScoreLoss, Want


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A field of an options class: its default, and the one sentence that documents it."""
    if isinstance(default, dict | list):
        return field(default_factory=lambda: default, metadata={"help": help, **metadata})
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class Objective:
    """A loss that is a sum over scores, divided by their number in the whole batch of an optimizer step."""

    loss: ScoreLoss
    want: Want = NOTHING_MORE
    """The statistics that the loss or the metrics need."""
    aux_coefficient: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts; 0 leaves it out."""


@dataclass(frozen=True)
class Method:
    """One way to post-train a model."""

    name: str
    """As on the command line."""
    title: str
    options: type
    """A dataclass of its options; config classes inherit from it."""
    objective: Callable[..., Objective]
    """From options to the objective."""
