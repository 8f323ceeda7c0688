"""Autocast and random numbers as they are in forward, for a backward that computes some of it again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


class Surroundings:
    """Autocast and random numbers as they are in forward, for backward.

    Args:
        x: tells the device.
        random: whether random numbers are drawn.
    """

    def __init__(self, x: Tensor, random: bool) -> None:
        kind = x.device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.host_state = torch.get_rng_state() if random else None
        started = kind != "cpu" and getattr(torch.get_device_module(x.device), "is_initialized", lambda: False)()
        self.devices, self.states = get_device_states(x) if random and started else ([], [])

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        kind, dtype, enabled = self.autocast
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast(kind, dtype, enabled))
            if self.host_state is not None:
                stack.enter_context(torch.random.fork_rng(self.devices, device_type=kind))
                torch.set_rng_state(self.host_state)
                set_device_states(self.devices, self.states, device_type=kind)
            yield
