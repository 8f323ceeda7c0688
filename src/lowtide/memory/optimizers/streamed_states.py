"""The states of weights that are streamed to a device: in host memory, as the weights are.

`HostStates` brings and sends them, a parameter's at a time. Here those of the layer whose backward follows set out when
the first weight of a layer is stepped, so that they arrive beside the computation. A step that comes after backward, as
with several micro-batches, visits layer by layer: weights, gradients and states come together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.torch import is_in_backward
from lowtide.memory.optimizers.host_states import HostStates
from lowtide.memory.optimizers.narrow_step import group_of_each
from lowtide.memory.weights.streaming import WeightStream


class StreamedStates(HostStates):
    """Keeps the states of an optimizer's parameters in host memory, while the parameters are streamed.

    Args:
        optimizer: an ordinary one, maybe wrapped by accelerate.
        stream: of the weights of layers.
        device: where weights are stepped.

    Raises:
        ValueError: the optimizer cannot step one parameter at a time, or is one of bitsandbytes.
    """

    def __init__(self, optimizer: Any, stream: WeightStream, device: torch.device) -> None:
        super().__init__(optimizer, offload=lambda _: True, device=device)
        self.stream = stream
        self._number: dict[Tensor, int] = {
            weight: number for number, unit in enumerate(stream.units) for weight in unit.weights
        }
        self._arriving: dict[Tensor, Any] = {}
        """By parameter: its states, which have set out."""
        self._stepped_last: int | None = None
        """The layer of the weight that was stepped last."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step of every parameter that has a gradient; those of layers are freed as they are stepped."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        groups = group_of_each(self.optimizer)
        for unit in self.stream.units:
            trained = [weight for weight in unit.weights if weight.grad is not None and weight in groups]
            if trained:
                with self.stream.visiting(unit):
                    self._step_all(groups, trained)
                    for weight in trained:
                        weight.grad = None
        streamed = set(self.stream.weights)
        self._step_all(groups, [each for each in groups if each.grad is not None and each not in streamed])
        self.stream.settle()  # whoever reads a weight between steps reads host memory
        return loss

    def step_alone(self, optimizer: Any, group: dict[str, Any], parameter: Tensor) -> None:
        """Steps one parameter of a group; in the form that `OptimizerInBackward` wants."""
        assert optimizer is self.optimizer
        number = self._number.get(parameter)
        if number is not None and number != self._stepped_last:
            self._set_out(number)
            if number > 0 and is_in_backward():
                self._set_out(number - 1)
        self._stepped_last = number
        visit = self._arriving.pop(parameter, None) or self._bring(parameter)
        self._step_visiting(group, parameter, visit)
        if number is not None:
            self.stream.store.stepped(self.stream.units[number])

    def _set_out(self, number: int) -> None:
        """The states of a layer."""
        for weight in self.stream.units[number].weights:
            if weight not in self._arriving and self.optimizer.state.get(weight):
                self._arriving[weight] = self._bring(weight)

    def _step_all(self, groups: dict[Tensor, dict[str, Any]], parameters: list[Any]) -> None:
        for parameter in parameters:
            self.step_alone(self.optimizer, groups[parameter], parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `HostStates` does; counts of steps that the optimizer wants on the device go there, where a weight of a
        layer is not."""
        self._arriving.clear()
        super().load_state_dict(state_dict)
        for parameter, group in group_of_each(self.optimizer).items():
            if group.get("fused") or group.get("capturable"):
                state = self.optimizer.state.get(parameter, {})
                counts = {name: v for name, v in state.items() if isinstance(v, Tensor) and v.dim() == 0}
                state.update({name: value.to(self._device_of(parameter)) for name, value in counts.items()})
