"""The projectors of GaLore and APOLLO: objects among the states of their optimizers, which torch does not load unasked.

`torch.load` makes no objects but of classes that it is told of, for a file could make it run anything. These classes
are known to hold numbers and tensors alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from accelerate.utils import send_to_device

PROJECTORS = (
    ("galore_torch.galore_projector", "GaLoreProjector"),
    ("apollo_torch.svd_projector", "GaLoreProjector"),
    ("apollo_torch.random_projector", "GradientProjector"),
)
"""Their modules and names."""


def projectors() -> tuple[type, ...]:
    """The classes of the packages that an optimizer has been made from."""
    return tuple(getattr(sys.modules[module], name) for module, name in PROJECTORS if module in sys.modules)


@contextlib.contextmanager
def loading_projectors(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around the loading of an optimizer's states: their projectors are loaded too, onto their parameters' devices."""
    known = projectors()
    with torch.serialization.safe_globals(list(known)):
        yield
    for parameter, state in optimizer.state.items():
        for each in state.values():
            if isinstance(each, known):
                vars(each).update(send_to_device(vars(each), parameter.device))
