"""Weights that are resident only while they are used: a layer's at a time, in forward, recomputation and backward.

Frozen weights are read three times in a step and never written, so they need not be in memory in between. Where they
wait is a `Store`: on a CPU the files that they came from (`memory.weights.mapped_files`), on CUDA pinned host memory
(`memory.weights.pinned_layers`). Trained ones wait in a file too (`memory.weights.written_file`), or are written back
(`memory.weights.trained_layers`). From ZeRO-Infinity (arXiv 2104.07857); here hooks of modules alone bring weights in
and let them go, so that no forward is rewritten.

A unit is what is brought in together: each layer and, on a CPU, each other module with weights of its own. It comes as
its forward begins, and goes as that ends. In backward it comes as the gradient of its output is there, and the one
before goes. What is computed again in backward belongs to the unit whose backward follows, and so it stays.

Exact: bytes move and no value changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.compat.torch import is_in_backward, modules_of
from lowtide.ops.mapped import BAND_BYTES

STREAM = "_lowtide_weight_stream"
"""The attribute of a model whose weights are streamed."""


@dataclass(eq=False)
class Unit:
    """Weights that are brought in together, for a module."""

    module: nn.Module
    weights: Sequence[Tensor]
    is_layer: bool
    """Else its weights are used by rows: an embedding, a head; or they are few."""

    @property
    def bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)


class Store:
    """Where weights wait while they are not used; by default gradients stay where they are made, and nothing is copied
    back."""

    layers_only: bool
    """Whether what is no layer stays on the device."""

    def bring(self, unit: Unit, following: Unit | None) -> None:
        """Before a unit is used: its weights are there when this returns; those of the one that follows set out."""
        raise NotImplementedError

    def leave(self, unit: Unit) -> None:
        """After it was used."""
        raise NotImplementedError

    def bring_gradients(self, unit: Unit) -> None:
        """Of a unit that is there: its gradients are too, when this returns."""

    def stepped(self, unit: Unit) -> None:
        """Some weights of a unit that is there were changed."""

    def wait(self) -> None:
        """Until everything is where it waits."""

    def around(self) -> AbstractContextManager[None]:
        """What is entered for each forward that backward follows."""
        return nullcontext()


class WeightStream:
    """Brings the weights of a model in and lets them go, unit by unit.

    Args:
        model: whose modules are hooked.
        weights: those that are streamed; the others stay where they are.
        store: where they wait.
        lying: by the `id` of a weight, the tensors that it lies in, where it is stored in several (a quantized one).
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Collection[nn.Parameter],
        store: Store,
        lying: Mapping[int, Sequence[Tensor]] | None = None,
    ) -> None:
        self.store = store
        self.units = [*units_of(model, weights, layers_only=store.layers_only, lying=lying or {})]
        self._present: list[Unit] = []
        for number, unit in enumerate(self.units):
            unit.module.register_forward_pre_hook(self._begins(number))
            unit.module.register_forward_hook(self._ends(number))

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightStream:
        """Hooks are the same in a copy of a model, and so is what they bring in; the copy's weights are in memory."""
        return self

    @property
    def bytes(self) -> int:
        """Of all weights that are streamed; tied ones count once."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def weights(self) -> list[Tensor]:
        """Each once."""
        return [*{id(weight): weight for unit in self.units for weight in unit.weights}.values()]

    @property
    def largest(self) -> int:
        """Bytes of the largest layer."""
        return max((unit.bytes for unit in self.units if unit.is_layer), default=0)

    def let_all_go(self) -> None:
        """After weights were read in another way than by a forward: by making adapters, say."""
        for unit in self.units:
            self.store.leave(unit)
        self._present.clear()

    def settle(self) -> None:
        """Has all weights, and gradients, lie where they wait: before they are read in another way than by a step."""
        self.let_all_go()
        self.store.wait()

    @contextmanager
    def visiting(self, unit: Unit) -> Iterator[None]:
        """A unit is there with its gradients, to be stepped."""
        for other in self._present:
            if other is not unit:
                self._leave(other)
        self._present = [unit]
        self.store.bring(unit, None)
        self.store.bring_gradients(unit)
        yield
        self._leave(unit)
        self._present.clear()

    def _leave(self, unit: Unit) -> None:
        """A unit goes, with what autocast keeps of it until a forward is over."""
        self.store.leave(unit)
        torch.clear_autocast_cache()

    def _enter(self, number: int, following: int) -> None:
        unit = self.units[number]
        for other in self._present:
            if other is not unit:
                self._leave(other)
        self._present = [unit]
        self.store.bring(unit, self.units[following] if 0 <= following < len(self.units) else None)

    def _begins(self, number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            self._enter(number, -1 if is_in_backward() else number + 1)

        return hook

    def _ends(self, number: int) -> Callable[..., None]:
        def backward_begins(_gradient: Tensor) -> None:
            self._enter(number, number - 1)

        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            first = next(_tensors(output), None)
            if first is not None and first.requires_grad:
                first.register_hook(backward_begins)
            if not is_in_backward():
                self._leave(self.units[number])

        return hook


class Unresident(Store):
    """Where the weights of a plan wait: what is brought in takes its bytes, on tensors without memory.

    Args:
        on_device: whether they are copied to a device, where the next layer's arrive while one runs.
        written: whether they are trained: copied back as well, beside gradients that wait.
    """

    def __init__(self, *, on_device: bool, written: bool = False) -> None:
        self.layers_only, self.written = on_device, on_device and written
        self._held: dict[Unit, list[Tensor]] = {}

    def bring(self, unit: Unit, following: Unit | None) -> None:
        if unit not in self._held:
            size = unit.bytes if unit.is_layer else min(unit.bytes, BAND_BYTES)
            ahead = following.bytes if self.layers_only and following is not None else 0
            behind = unit.bytes if self.written and is_in_backward() else 0
            self._held[unit] = [self.hold(unit, size + ahead + behind)]
            if behind:
                self.bring_gradients(unit)

    def bring_gradients(self, unit: Unit) -> None:
        """Those that wait on the host come to the device, beside their places there."""
        if self.written and unit in self._held:
            size = sum(weight.nbytes for weight in unit.weights if weight.grad is not None)
            self._held[unit] += [self.hold(unit, size)] if size else []

    def leave(self, unit: Unit) -> None:
        self._held.pop(unit, None)

    def hold(self, unit: Unit, size: int) -> Tensor:
        """So many bytes, for a unit and those beside it."""
        return torch.empty(size, dtype=torch.uint8)


def units_of(
    model: nn.Module, weights: Iterable[nn.Parameter], *, layers_only: bool, lying: Mapping[int, Sequence[Tensor]]
) -> Iterator[Unit]:
    """The units of a model that have some of the weights, in the order of its modules."""
    wanted = {id(weight) for weight in weights}
    layers = {id(layer) for layers in outermost_layers(model) for layer in layers}
    inside = {id(part) for module in model.modules() if id(module) in layers for part in module.modules()}
    for module in model.modules():
        is_layer = id(module) in layers
        if not is_layer and (layers_only or id(module) in inside):
            continue
        found = {id(p): p for p in module.parameters(recurse=is_layer) if id(p) in wanted}
        if found:
            yield Unit(module, [part for p in found.values() for part in lying.get(id(p), (p,))], is_layer)


def outermost_layers(model: nn.Module) -> list[nn.ModuleList]:
    """The lists of layers of a model; not those inside of layers."""
    found: list[nn.ModuleList] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            found.append(module)
            inside |= {id(part) for part in module.modules()}
    return found


def stream_of(model: nn.Module) -> WeightStream | None:
    """The stream of a model's weights; None where they are resident."""
    return next((vars(part)[STREAM] for part in modules_of(model) if STREAM in vars(part)), None)


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of a module's output, those of its dataclasses too."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from (each for value in output.values() for each in _tensors(value))
    elif isinstance(output, tuple | list):
        yield from (each for value in output for each in _tensors(value))
