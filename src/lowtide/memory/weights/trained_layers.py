"""Weights of layers that are trained, which wait in pinned host memory and are copied to a CUDA device for their use.

As frozen ones are (`memory.weights.pinned_layers`); and what was stepped while it was on the device is copied back when
its layer goes. Gradients that have to wait for other micro-batches go to host memory with their layer, and come with it
in the backward in which more is added to them. So of weights and gradients the device holds the layer that runs, the
one that arrives and the one that leaves. From MegaTrain (arXiv 2604.05091); here the step itself is the optimizer's
own, on the device (`memory.optimizers.streamed_states`).

Each weight has host memory of its own, since checkpoints copy weights that share theirs.

Exact: bytes move and no value changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.torch import is_in_backward
from lowtide.memory.weights.pinned_layers import Home, PinnedLayers, Visit, part_of
from lowtide.memory.weights.streaming import Unit

IN_FLIGHT = 1
"""Layers that may be on their way back while the computation goes on."""


class TrainedHome(Home):
    """Where the weights of a layer wait, and their gradients."""

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        self.gradients: dict[Tensor, Tensor] = {}
        """Host memory, in bytes, of those that have waited once."""
        self.written: Any = None
        """The event after the last copy back."""
        self.is_stepped = False
        """Whether what is on the device is newer. An optimizer's fused step changes no version that would tell."""


class TrainedLayers(PinnedLayers):
    """Where the weights of trained layers wait.

    Args:
        device: the CUDA device.
        cuda: what offers streams; a test on a CPU gives its own.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__(device, cuda)
        self.out = cuda.Stream(device)
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()

    def bring(self, unit: Unit, following: Unit | None) -> None:
        super().bring(unit, following)
        if is_in_backward():
            self.bring_gradients(unit)

    def bring_gradients(self, unit: Unit) -> None:
        """Those that wait in host memory, for a layer that is on the device."""
        home = self._trained_home(unit)
        waiting = [weight for weight in unit.weights if weight.grad is not None and _is_at_home(weight, home)]
        if not waiting:
            return
        own = self.cuda.current_stream(self.device)
        back = [torch.empty(weight.nbytes, dtype=torch.uint8, device=self.device) for weight in waiting]
        self.into.wait_stream(own)
        self._wait_for(home)
        with self.cuda.stream(self.into):
            for weight, buffer in zip(waiting, back, strict=True):
                buffer.copy_(home.gradients[weight], non_blocking=True)
            arrived = self.into.record_event()
        own.wait_event(arrived)
        for weight, buffer in zip(waiting, back, strict=True):
            weight.grad = part_of(buffer, 0, weight)

    def stepped(self, unit: Unit) -> None:
        self._trained_home(unit).is_stepped = True

    def leave(self, unit: Unit) -> None:
        """What was stepped goes back to host memory, and so do gradients that were not."""
        visit, home = self._visits.get(unit), self._trained_home(unit)
        if visit is not None and visit.is_used:
            self._send(unit, home, visit)
        home.is_stepped = False
        waiting = {weight: weight.grad for weight in unit.weights if weight.grad is not None}
        for weight in waiting:
            weight.grad = None
        super().leave(unit)
        for weight in waiting:
            weight.grad = part_of(home.gradients[weight], 0, weight)

    def wait(self) -> None:
        """Until host memory has all that was sent to it."""
        while self._leaving:
            self._let_go()
        self.out.synchronize()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _trained_home(self, unit: Unit) -> TrainedHome:
        home = self._home(unit)
        assert isinstance(home, TrainedHome)
        return home

    def _made_home(self, unit: Unit, starts: Sequence[int], size: int) -> Home:
        buffers = []
        for weight in unit.weights:
            buffers.append(self.buffer(weight.nbytes))
            weight.data = part_of(buffers[-1], 0, weight).copy_(weight.detach())
        waiting = [weight.data for weight in unit.weights]
        return TrainedHome(unit, starts, size, waiting, [*zip(starts, buffers, strict=True)])

    def _wait_for(self, home: Home) -> None:
        """What was sent home may still be on its way."""
        assert isinstance(home, TrainedHome)
        if home.written is not None:
            self.into.wait_event(home.written)

    def _send(self, unit: Unit, home: TrainedHome, visit: Visit) -> None:
        """Sets out what changed while a layer was on the device."""
        gradients = [w for w in unit.weights if w.grad is not None and not _is_at_home(w, home)]
        for weight in gradients:
            if weight not in home.gradients:
                home.gradients[weight] = self.buffer(weight.nbytes)
        held = [weight.grad.contiguous() for weight in gradients if weight.grad is not None]
        copies = [
            (home.gradients[weight], grad.detach().view(-1).view(torch.uint8))
            for weight, grad in zip(gradients, held, strict=True)
        ]
        if home.is_stepped:
            copies += [(waiting, part) for part, waiting in home.beside(visit.buffer)]
        if not copies:
            return
        self.out.wait_stream(self.cuda.current_stream(self.device))
        with self.cuda.stream(self.out):
            for waiting, part in copies:
                waiting.copy_(part, non_blocking=True)
            home.written = self.out.record_event()
        self._leaving.append((home.written, [visit.buffer, *held]))
        while len(self._leaving) > IN_FLIGHT:
            self._let_go()

    def _let_go(self) -> None:
        """The memory of the layer that has left longest is the computation's again, once its copies are done."""
        event, held = self._leaving.popleft()
        self.cuda.current_stream(self.device).wait_event(event)
        held.clear()


def _is_at_home(weight: Tensor, home: TrainedHome) -> bool:
    """Whether a weight's gradient lies in host memory."""
    buffer = home.gradients.get(weight)
    return buffer is not None and weight.grad is not None and weight.grad.data_ptr() == buffer.data_ptr()
