"""What leaves the device for host memory, as a trace sees it: activations, optimizer states, a reference's weights, and
the keys of rows in pieces.

Where it goes has no memory either, so blocks of the category "host" or "pinned" stand for it. They are no part of what
the device holds, and their transfers take time.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lowtide.engine.weights.reference_storage import STORAGES, layer_lists
from lowtide.memory.activations import chain_storage, offloading
from lowtide.memory.allocators.pinned_host import pinned_bytes
from lowtide.memory.weights.streaming import Unit, Unresident, stream_of
from lowtide.planner.devices import Device
from lowtide.planner.speed import OperationCosts
from lowtide.planner.tracing.trace import HOST, IN_FILES, ON_HOST, PINNED, Block, Event, StorageTrace
from lowtide.run import streamed_weights


@contextlib.contextmanager
def followed_to_the_host(trace: StorageTrace, device: Device) -> Iterator[None]:
    """While it lasts, a trace notes what goes to the memory of a GPU's host; a CPU's own offloading is to a file."""
    patches: list[Any] = [patch.object(streamed_weights, "Unresident", partial(_Visiting, trace))]
    if device.kind == "cuda":
        patches += [
            patch.object(offloading, "Nowhere", partial(_Away, trace)),
            patch.object(chain_storage, "Nowhere", partial(_KeysAway, trace)),
            patch.dict(STORAGES, {"cpu": partial(_brought_for_each_forward, trace)}),
        ]
    with contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def weights_wait(model: nn.Module, trace: StorageTrace) -> None:
    """Tells a trace which weights of a model are streamed, if any are."""
    stream = stream_of(model)
    if stream is not None:
        trace.belongs(stream.weights, PINNED if stream.store.layers_only else IN_FILES)


def weights_go(models: Iterable[nn.Module]) -> None:
    """What is streamed waits again, as a part of a run begins, which may be run several times."""
    for stream in filter(None, map(stream_of, models)):
        stream.let_all_go()


class _Visiting(Unresident):
    """What is brought in of streamed weights."""

    def __init__(self, trace: StorageTrace, *, on_device: bool, written: bool = False) -> None:
        super().__init__(on_device=on_device, written=written)
        self.trace = trace
        self._layers: dict[Unit, int | None] = {}

    def hold(self, unit: Unit, size: int) -> Tensor:
        """A layer is stepped before anything else is of it: it is asked of its weights which one it is."""
        now, of_unit = self.trace.layer, self.trace.layer_of(unit.weights[0])
        self.trace.layer = self._layers[unit] = now if of_unit is None else of_unit
        with self.trace.owned_by("weights"):
            held = super().hold(unit, size)
        self.trace.layer = now
        return held

    def leave(self, unit: Unit) -> None:
        """What was brought in for a layer goes as a part of it, whichever runs by then: layers are unrolled."""
        now, self.trace.layer = self.trace.layer, self._layers.get(unit)
        if self.written:
            self.trace.belongs([weight.grad for weight in unit.weights if weight.grad is not None], PINNED)
        super().leave(unit)
        self.trace.layer = now


class _Away(offloading.Nowhere):
    """Where offloaded activations wait."""

    class Stored(NamedTuple):
        bytes: int
        block: Block

    def __init__(self, trace: StorageTrace) -> None:
        self.trace = trace

    def needs(self, size: int) -> int:
        return pinned_bytes(size)

    def put(self, tensor: Tensor) -> Any:
        size = tensor.untyped_storage().nbytes()
        return self.Stored(size, self.trace.leaves(size))

    def free(self, stored: Any) -> None:
        self.trace.returned(stored.block)


class _KeysAway(chain_storage.Nowhere):
    """Where keys and values of the pieces of long rows wait, and their gradients."""

    class Kept(NamedTuple):
        size: chain_storage.Nowhere.Size
        block: Block
        layer: int | None
        reads: list[int]

    def __init__(self, trace: StorageTrace) -> None:
        self.trace = trace

    def keep(self, tensor: Tensor) -> Any:
        size = tensor.nbytes
        return self.Kept(super().keep(tensor), self.trace.leaves(size), self.trace.layer, [])

    def read(self, kept: Any) -> Tensor:
        """A block goes out and comes back once (`with_transfers`); what comes back more often is half of a block."""
        kept.reads.append(kept.block.size)
        if len(kept.reads) > 1:
            self.trace.returned(self.trace.leaves(kept.block.size // 2))
        return super().read(kept.size)

    def free(self, kept: Any) -> None:
        """As a part of its layer, whichever runs by then: layers are unrolled."""
        now, self.trace.layer = self.trace.layer, kept.layer
        self.trace.returned(kept.block)
        self.trace.layer = now


def _brought_for_each_forward(trace: StorageTrace, model: nn.Module, _device: torch.device) -> None:
    """A reference whose layers' weights are in host memory, and on the device while their module runs."""

    def bring(module: nn.Module, _inputs: Any) -> None:
        with trace.owned_by("reference"):
            visiting[module] = [torch.empty_like(each) for each in module.parameters(recurse=False)]

    def drop(module: nn.Module, _inputs: Any, _output: Any) -> None:
        visiting.pop(module).clear()

    visiting: dict[nn.Module, list[Tensor]] = {}
    for layers in layer_lists(model):
        trace.belongs(layers.parameters(), HOST)
        for module in layers.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(bring)
                module.register_forward_hook(drop)


def host_bytes(events: Iterable[Event]) -> int:
    """The most that lies in host memory during a run."""
    alive: set[Block] = set()
    total = most = 0
    for block, born, *_ in events:
        if block is None or block.category not in ON_HOST or born == (block in alive):
            continue
        (alive.add if born else alive.discard)(block)
        size = pinned_bytes(block.size) if block.category == PINNED else block.size
        total += size if born else -size
        most = max(most, total)
    return most


def with_transfers(
    costs: Mapping[str, OperationCosts], events: Iterable[Event], *, written: bool = False
) -> dict[str, OperationCosts]:
    """The costs of a micro-batch and of a step, and the bytes that they move between host and device.

    What a micro-batch makes goes out and comes back; so do states, once a step. A reference's weights come, and stay as
    they are; streamed ones come in forward and in backward, and go back if they are `written`.
    """
    left = Counter[str]()
    part = "loading"
    for block, born, phase, _ in events:
        if block is None and born:
            part = phase
        elif block is not None and born and block.category in ON_HOST:
            streamed = part == "loading" and block.category == PINNED
            left[part] += (3 if written else 2) * block.size if streamed else block.size
    moved = {"layers": 2 * left["step"] + left["loading"], "optimizer": 2 * left["states"]}
    return {name: replace(each, host_bytes=moved.get(name, 0)) for name, each in costs.items()}
