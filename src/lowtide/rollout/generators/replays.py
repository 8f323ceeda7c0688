"""Steps of a generation as CUDA graphs: recorded once, then replayed by one launch each.

A decode step of a small model takes a GPU less than its host takes to launch its kernels one by one; a graph launches
all of them at once (as in vLLM and SGLang). A graph repeats the kernels and addresses that it saw, right or wrong. So
two real steps are watched first (`ops.capture`), and only a step that runs alike twice, and asks nothing of the host,
is recorded. Any other is made as before, and so is one whose graph finds no memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from lowtide.ops.capture import Watch, difference

logger = logging.getLogger(__name__)
BEFORE = 3
"""Steps before one is recorded: the first works out what stays until rows come or go, two are compared."""
Call = Callable[[], None]


def recorded(call: Call, device: torch.device) -> Call:
    """What repeats a call on a CUDA device, which is recorded and not made.

    Raises:
        RuntimeError: it cannot be recorded, or there is no memory for it.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the device meanwhile, which pin memory for batches, say.
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


class Replays:
    """Makes steps, by graphs where they may be recorded.

    Args:
        device: where the model is.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._made_at = -1
        self._known: dict[bool, Call] = {}
        self._told = False

    def make(self, step: Call, count: int, *, changes: int, whole: bool) -> None:
        """Makes a step several times.

        Args:
            changes: of the store of keys: with another number addresses or shapes are others.
            whole: tells two kinds of steps apart that may take turns between two changes.
        """
        if changes != self._made_at:
            self._made_at = changes
            self._known.clear()
        if whole not in self._known and count > BEFORE:
            self._known[whole] = self._watched(step)
            count -= BEFORE
        call = self._known.get(whole, step)
        for _ in range(count):
            call()

    def _watched(self, step: Call) -> Call:
        """Makes `BEFORE` steps; what makes the next ones."""
        step()
        with Watch(self.device) as watch:
            step()
            watch.begin()
            step()
        reason = difference(*watch.steps)
        if reason is None:
            try:
                return recorded(step, self.device)
            except RuntimeError as failure:  # torch.OutOfMemoryError is one
                reason = str(failure)
        if not self._told:
            self._told = True
            logger.warning(f"generation runs without CUDA graphs, since a step cannot be recorded: {reason}")
        return step
