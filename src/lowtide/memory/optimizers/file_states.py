"""Each parameter is stepped a few rows at a time, and its states lie in a file.

For weights that are streamed themselves (`memory.weights.written_file`): of a weight of half a gigabyte, its gradient
and its two moments, only some rows of each are resident while they are stepped.

Exact for optimizers that act number by number, such as AdamW: rows are stepped as parameters of their own, each with
the same count of steps.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.memory.optimizers.narrow_step import group_of_each, step_alone, unwrap_optimizer
from lowtide.memory.weights.written_file import NoFile, WrittenFile, by_rows
from lowtide.ops.mapped import let_go


class FileStates:
    """Keeps the states of an optimizer's parameters in a file, and steps parameters by rows.

    The optimizer's own `step` and `load_state_dict` are replaced, so whatever calls them need not know. With
    `OptimizerInBackward`, give it this object's `step_alone` as its `step`.

    Args:
        optimizer: an ordinary one that acts number by number, maybe wrapped by accelerate.
        file: where the states lie.
    """

    def __init__(self, optimizer: Any, file: WrittenFile | NoFile) -> None:
        self.optimizer, self.file = unwrap_optimizer(optimizer), file
        replaced: Any = self.optimizer
        replaced.step = types.MethodType(lambda _, closure=None: self.step(closure), replaced)
        replaced.load_state_dict = types.MethodType(lambda _, state_dict: self.load_state_dict(state_dict), replaced)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One optimizer step of every parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for parameter, group in group_of_each(self.optimizer).items():
            if parameter.grad is not None:
                self.step_alone(self.optimizer, group, parameter)
        return loss

    def step_alone(self, optimizer: Any, group: dict[str, Any], parameter: Tensor) -> None:
        """Steps one parameter of a group; in the form that `OptimizerInBackward` wants."""
        assert optimizer is self.optimizer
        assert parameter.grad is not None
        states = optimizer.state.pop(parameter, {})
        whole = {name: value for name, value in states.items() if _has_rows(value, parameter)}
        counts = {name: value for name, value in states.items() if name not in whole}
        begun, after = bool(states), counts
        names, places = [*whole], dict[str, list[Tensor]]()
        for number, parts in enumerate(by_rows(parameter.detach(), parameter.grad, *whole.values())):
            part = nn.Parameter(parts[0])
            part.grad = parts[1]
            if begun:
                optimizer.state[part] = {**dict(zip(names, parts[2:], strict=True)), **_copied(counts)}
            step_alone(optimizer, group, part)
            made = optimizer.state.pop(part, {})
            after = {name: value for name, value in made.items() if not _has_rows(value, part)}
            for name in made.keys() - after.keys():
                if not begun and name not in places:
                    whole[name] = self.file.zeros(parameter.shape, made[name].dtype)
                    places[name] = [place for _, place in by_rows(parameter.detach(), whole[name])]
                let_go(made[name] if begun else places[name][number].copy_(made[name]))
            let_go(part)
        optimizer.state[parameter] = {**after, **whole}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's, but what has rows goes to the file directly, in the dtype that it was saved in."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        in_file, elsewhere = {}, {}
        for number, parameter in zip(numbers, group_of_each(self.optimizer), strict=False):
            saved = state_dict["state"].get(number, {})
            in_file[parameter] = {name: value for name, value in saved.items() if _has_rows(value, parameter)}
            if saved:
                elsewhere[number] = {name: v for name, v in saved.items() if name not in in_file[parameter]}
        type(self.optimizer).load_state_dict(self.optimizer, {**state_dict, "state": elsewhere})
        for parameter, found in in_file.items():
            for name, value in found.items():
                self.optimizer.state[parameter][name] = self.file.copy_of(value)


def _has_rows(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _copied(counts: dict[str, Any]) -> dict[str, Any]:
    """Counts of steps, which each part counts on from."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in counts.items()}
