"""What the project replaces inside of bitsandbytes, while a run is traced on tensors without values."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from unittest.mock import patch

from torch import Tensor

PYTHON_KERNELS = ("bitsandbytes::optimizer_update_32bit", "bitsandbytes::optimizer_update_8bit_blockwise")
"""The operations of its optimizers. On a CPU their kernels are Python, with float32 copies that a trace should see."""


@contextlib.contextmanager
def paged_states_by(make: Callable[..., Tensor]) -> Iterator[None]:
    """While it lasts, a function makes the states of paged optimizers, which would ask CUDA's driver for memory.

    Args:
        make: takes the shape, `dtype` and `device`.
    """
    functional = importlib.import_module("bitsandbytes.functional")
    with patch.multiple(functional, get_paged=make, fill=Tensor.fill_):
        yield
