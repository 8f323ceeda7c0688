"""Sums in float64, on every device: metrics add up thousands of numbers, and float32 would lose the small ones.

Apple's GPUs have no float64. What is added up there goes to the host first, one number at a time, which waits for the
device.
"""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}
"""The types of devices that cannot hold float64."""


def float64_device(device: torch.device) -> torch.device:
    """Where numbers of a device are held in float64: there, or in host memory where the device cannot."""
    return torch.device("cpu") if device.type in WITHOUT_FLOAT64 else device


def exchange_device(values: Tensor, device: torch.device) -> torch.device:
    """Where ranks of a device exchange values: there, or in host memory where the device cannot hold them."""
    return float64_device(device) if values.dtype == torch.float64 else device


def to_float64(values: Tensor) -> Tensor:
    """The values in float64, on `float64_device` of theirs."""
    return values.to(float64_device(values.device), torch.float64)
