"""Weights on a CPU that lie in the safetensors files that they came from, mapped into memory.

transformers maps a file whose weights are wanted as they are stored, and copies nothing. So a streamed weight only has
to be let go after use: its pages are dropped, and come back from the system's file cache when they are read again.
Several processes of a machine share that cache.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from lowtide.memory.weights.streaming import Staying, Unit
from lowtide.ops.mapped import bring_in, let_go, read_ahead


class MappedFiles(Staying):
    """Where the weights of a model on a CPU wait (a `Store` of `memory.weights.streaming`)."""

    layers_only = False

    def bring(self, unit: Unit, following: Unit | None) -> None:
        """What is no layer is used by rows, and comes as they are read."""
        if unit.is_layer:
            for weight in unit.weights:
                bring_in(weight)
        for weight in () if following is None else following.weights:
            read_ahead(weight)

    def leave(self, unit: Unit) -> None:
        for weight in unit.weights:
            let_go(weight)

    def around(self) -> AbstractContextManager[None]:
        """Autograd saves the mapping itself."""
        return nullcontext()
