"""What a memory technique is: what it saves, whether it changes a number, how it is switched on and applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Site:
    """Where techniques are to work: a model that is placed and prepared, on one of so many ranks."""

    options: Any
    """The trainer's config."""
    model: nn.Module
    device: torch.device
    ranks: int = 1
    compared: Callable[[], Sequence[nn.Module]] = tuple
    """What it is compared with, once that is there: a reference, or teachers; the model itself may be among them."""


Reason = Callable[[Site], str | None]
"""Why something is so at a site; None where it is not."""


def never(site: Site) -> str | None:
    return None


@dataclass(frozen=True)
class Choosing:
    """How a plan chooses a technique."""

    axis: str
    """The axis of the search; a plan takes one technique of an axis."""
    slower: float = 1.0
    """Seconds of a step with it as a multiple, where nothing tells them better. A forward is 1/3, a backward 2/3."""
    whole: bool = False
    """Whether it does something only where a batch is one micro-batch."""
    last_resort: bool = False
    """Whether it is only for when nothing else fits."""


@dataclass(frozen=True)
class Technique:
    """One row of the table: the technique in words, and where it takes hold of a run."""

    name: str
    saves: str
    """One line."""
    options: Mapping[str, Any]
    """What switches it on, as a user would write it."""
    lowers: tuple[str, ...] = ()
    """The categories of bytes that it makes fewer: "weights", "gradients", "optimizer", "activations"."""
    is_on: Callable[[Any], bool] | None = None
    """Whether a config has it on; by default where the first of its options has the value here, or any number."""
    also: tuple[str, ...] = ()
    """Further values of that option with which it is on."""
    changes: str | None = None
    """What it changes in the numbers, beyond rounding; None where it is exact."""
    refused: Reason = never
    """Why it cannot work at a site."""
    idle: Reason = never
    """Why it does nothing at a site; empty where nobody expects it to, so that no report says so."""
    prepare: Callable[[Site], object] | None = None
    """Changes the model, once, before it is trained."""
    begin: Callable[[Site], Callable[[], None] | None] | None = None
    """The same as training begins, when the Trainer has set up its own checkpointing; may return what undoes it."""
    around: Callable[[Site], Callable[[], AbstractContextManager]] | None = None
    """Gives what is entered for each forward of the policy."""
    remark: str | None = None
    """What else the start-up report says of it."""
    needs: tuple[str, ...] = ()
    """Packages beside lowtide's own requirements."""
    chosen: Choosing | None = None
    """How a plan may choose it; None where it is the user's to ask for."""
    named: bool = True
    """Whether the start-up report has a line of its own for it; what is on by default is part of other lines."""

    def on(self, options: Any) -> bool:
        """Whether a config has it on."""
        if self.is_on is not None:
            return self.is_on(options)
        name, wanted = next(iter(self.options.items()))
        value = getattr(options, name, None)
        value = getattr(value, "value", value)  # a member of an enumeration
        return value in (wanted, *self.also) if isinstance(wanted, bool | str) else bool(value)
