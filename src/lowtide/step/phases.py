"""Where in a step a run is, told to whoever listens: the high-water mark of the logs, the recorder of a profile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lowtide.memory.allocators.measure import peak_bytes

BETWEEN = "data and logging"
"""The phase between those of a step: the next rows are fetched and collated, metrics are added up and logged."""
BESIDE_STEPS = ("evaluation", "saving")
"""The phases that are no part of a step."""
Listener = Callable[[str, str], object]
"""Told (the phase that ends, the phase that begins)."""


class Phases:
    """The phase of a run: `BETWEEN`, "forward", "head", "backward", "optimizer", "evaluation", "saving"; "rehearsal"
    has others inside."""

    def __init__(self) -> None:
        self.now = BETWEEN
        self.listeners: list[Listener] = []

    def enter(self, phase: str) -> None:
        """The run is in a phase from here on."""
        if phase != self.now:
            before, self.now = self.now, phase
            for tell in self.listeners:
                tell(before, phase)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase, after which the one before goes on."""
        before = self.now
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def split_forward(self, body: nn.Module) -> Callable[[], None]:
        """What of forward comes after a model's body is the head; returns what undoes it."""

        def at_the_head(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            if self.now == "forward":
                self.enter("head")

        return body.register_forward_hook(at_the_head).remove


class HighWater:
    """The peak of a run so far, and the phase that raised it there; a listener of `Phases`.

    It reads what the system or the allocator keeps anyway as a phase ends: some 30 microseconds on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        self.phase = "loading"
        self.raised: dict[str, int] = {}
        """The peak in bytes as each phase that raised it ended, the last time that it did."""

    def __call__(self, ended: str, begins: str) -> None:
        self.note(ended)

    def note(self, phase: str) -> None:
        """A phase has got this far."""
        peak = peak_bytes(self.device)
        if peak > self.bytes:
            self.bytes, self.phase = peak, phase
            self.raised[phase] = peak


class TrainingTime:
    """The seconds of a run that its steps took, with their data and logging: all but evaluations and saving; a listener
    of `Phases`. What waits on a device counts where the host waits for it."""

    def __init__(self) -> None:
        self._before, self._since = 0.0, time.perf_counter()

    def __call__(self, ended: str, begins: str) -> None:
        now = time.perf_counter()
        if ended not in BESIDE_STEPS:
            self._before += now - self._since
        self._since = now

    def restart(self) -> None:
        """Counts from here on."""
        self._before, self._since = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """So far, in a phase of a step."""
        return self._before + time.perf_counter() - self._since
