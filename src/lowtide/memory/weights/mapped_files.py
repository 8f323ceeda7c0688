"""Weights on a CPU that lie in the safetensors files that they came from, mapped into memory.

transformers maps a file whose weights are wanted as they are stored, and copies nothing. So a streamed weight only has
to be let go after use: its pages are dropped, and come back from the system's file cache when they are read again.
Several processes of a machine share that cache.
"""

from __future__ import annotations

from lowtide.memory.weights.streaming import Store, Unit
from lowtide.ops.mapped import bring_in, let_go, read_ahead


class MappedFiles(Store):
    """Where the weights of a model on a CPU wait. Autograd saves the mapping itself."""

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
