"""Weights on a CPU that lie in the safetensors files that they came from, mapped into memory.

transformers maps a file whose weights are wanted as they are stored, and copies nothing. So a streamed weight only has
to be let go after use: its pages are dropped, and come back from the system's file cache when they are read again.
Several processes of a machine share that cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import Tensor

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


def lying_in_files(tensors: Iterable[Tensor]) -> set[Tensor]:
    """Those of some tensors that lie in files which this process has mapped, and in no other memory."""
    ranges = sorted(_mapped_ranges())
    return {tensor for tensor in tensors if tensor.device.type == "cpu" and _lies_in(tensor, ranges)}


def _lies_in(tensor: Tensor, ranges: list[tuple[int, int]]) -> bool:
    start = tensor.untyped_storage().data_ptr()
    end = start + tensor.untyped_storage().nbytes()
    return any(first <= start and end <= stop for first, stop in ranges)


def _mapped_ranges() -> list[tuple[int, int]]:
    """(start, stop) of what is mapped from files that are still there; neighbours of one file are one."""
    found: list[tuple[int, int, str]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _mode, _offset, _device, inode, *path = line.split(maxsplit=5)
        if inode == "0" or not path or path[0].endswith(" (deleted)"):
            continue
        start, stop = (int(number, 16) for number in span.split("-"))
        if found and found[-1][1:] == (start, path[0]):
            start = found.pop()[0]
        found.append((start, stop, path[0]))
    return [(start, stop) for start, stop, path in found if os.path.isfile(path)]
