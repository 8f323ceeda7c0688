"""Whether a kernel is right on a device: tried there once, on a few numbers, before anything relies on it.

A compiler, a driver and a card have errors that no other one has, and a kernel that is wrong says nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lowtide.ops.target import target_of

logger = logging.getLogger(__name__)


def computes(x: Tensor, right_on: Callable[[torch.device], bool]) -> bool:
    """Whether a kernel of CUDA computes on a tensor, or would on the device that a plan is for.

    Args:
        right_on: whether it is right on a GPU; asked of one that is there, which is tried once and waited for then.
    """
    target = target_of(x)
    if target.kind != "cuda" or x.dtype == torch.float64:
        return False
    return target.planned or right_on(x.device)


def is_right(trial: Callable[[], Iterable[tuple[Tensor, Tensor]]], tolerance: float, otherwise: str) -> bool:
    """Whether a kernel gives what is expected of it; says so if not.

    Args:
        trial: gives what was found and what is expected, pair by pair. What it raises, the kernel fails with.
        tolerance: the most by which a number may be off.
        otherwise: what is done without the kernel, as the beginning of a sentence.

    Raises:
        torch.OutOfMemoryError: there is no memory for the trial, which says nothing of the kernel.
    """
    try:
        error = max(_largest(one, two) for one, two in trial())
        why = f"is wrong by {error:.2g}"
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # of any class: Triton's compiler has its own
        error, why = math.inf, f"fails with {type(failure).__name__}: {failure}"
    if error <= tolerance:
        return True
    logger.warning(f"{otherwise}, since the kernel for it {why}")
    return False


def _largest(found: Tensor, expected: Tensor) -> float:
    """Difference of two numbers; infinity where one is not a number."""
    return (found.double() - expected.double()).abs().nan_to_num_(math.inf).max().item()
