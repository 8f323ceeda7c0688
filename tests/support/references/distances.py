"""How far tensors are from what they should be."""

from torch import Tensor


def far(found: Tensor, expected: Tensor) -> float:
    """The distance to an expected tensor in float64, relative to its norm."""
    return float((found.detach().double() - expected).norm() / expected.norm())
