"""Tensors without memory, on which the code of a real run runs."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lowtide.compat.accelerate import shared_state_kept
from lowtide.compat.torch import (
    NUMBER_READ,
    UNTRACEABLE,
    FakeTensorMode,
    copied_without_memory,
    models_stay,
)
from lowtide.planner.tracing.trace import Mode

NOT_OF_THE_RUN = (
    "Accessing the data pointer of FakeTensor",  # to log the size of the embeddings that bitsandbytes leaves in 32 bits
    "Paged optimizers are not supported on CPU",  # where fake tensors lie, whatever the device
    "`is_gradient_checkpointing` is deprecated",  # which PEFT asks for
)
"""How warnings begin that come of tensors without values, and are not true of the run."""


@contextlib.contextmanager
def _process_left_alone() -> Iterator[None]:
    """What a trainer sets for the whole process is put back: random numbers, which it seeds, and the one device that
    accelerate remembers, which is that of the last trainer."""
    python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), shared_state_kept():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)


@contextlib.contextmanager
def faked(fake: FakeTensorMode | None = None) -> Iterator[FakeTensorMode]:
    """Tensors have no values: models stay where they are, and copies touch no memory.

    Args:
        fake: the mode that they are of; by default one of its own.

    Raises:
        ValueError: an operation has no form without values; with its name.
    """
    try:
        with (
            _process_left_alone(),
            fake or FakeTensorMode(allow_non_fake_inputs=True) as fake,
            _NumbersRead(),
            models_stay(),
            copied_without_memory(),
            warnings.catch_warnings(),
        ):
            for message in NOT_OF_THE_RUN:
                warnings.filterwarnings("ignore", message)
            yield fake
    except UNTRACEABLE as error:
        operation = getattr(error, "func", None) or (error.args[0] if error.args else type(error).__name__)
        raise ValueError(
            f"the run cannot be traced without values: {str(operation).splitlines()[0]}. Memory of such a model is "
            "not predicted; measure it with a short run (--max_steps 2 --memory_report report.json)"
        ) from error


class _NumbersRead(Mode):
    """A number that is read off a tensor without values is 1: bitsandbytes reads its tables as it makes an optimizer,
    others read a norm or a count in their step. What is asked of it is true: transformers asks whether images have as
    many features as places."""

    def seen(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is NUMBER_READ:
            return True if args[0].dtype == torch.bool else 1.0
        return func(*args, **kwargs)
