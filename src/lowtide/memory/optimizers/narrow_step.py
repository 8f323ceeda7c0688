"""One ordinary optimizer, made to step one parameter at a time.

While it steps, its `param_groups` hold that parameter alone, so that schedulers, checkpoints and `state_dict` see the
optimizer they know, where torch's tutorial on stepping in backward has one optimizer a parameter.

It is right where a parameter's step depends on nothing but its own gradient, state and options. Whether it does is
not read off a list of names: a trial steps two tiny parameters together and one at a time, and compares.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from lowtide.compat.torch import FakeTensor, drop_step_hooks, has_step_hooks

ROUNDS = 2
"""Steps of a trial: the second finds what the first has left behind."""


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer inside wrappers such as accelerate's."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def group_of_each(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Each parameter, in order, with the group that it belongs to."""
    return {parameter: group for group in optimizer.param_groups for parameter in group["params"]}


def step_alone(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    """Steps one parameter of a group, whatever other gradients there are.

    Outside of autocast, as the optimizer's own step is; and by the class's `step`, so that what others have put
    before it (a scheduler's count, for one) is left to the step that the training loop takes.
    """
    narrowed = _at_its_place if is_bitsandbytes(optimizer) else _by_itself
    with narrowed(optimizer, group, parameter), torch.autocast(parameter.device.type, enabled=False):
        type(optimizer).step(optimizer)


def is_bitsandbytes(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of bitsandbytes, or built on one."""
    return any(kind.__module__.partition(".")[0] == "bitsandbytes" for kind in type(optimizer).__mro__)


@contextlib.contextmanager
def _by_itself(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> Iterator[None]:
    """The optimizer has one group with one parameter."""
    groups, together = optimizer.param_groups, group["params"]
    optimizer.param_groups, group["params"] = [group], [parameter]
    try:
        yield
    finally:
        optimizer.param_groups, group["params"] = groups, together


class _Absent:
    """Stands for a parameter that is not stepped."""

    grad, device = None, torch.device("cpu")


@contextlib.contextmanager
def _at_its_place(optimizer: Any, group: dict[str, Any], parameter: Tensor) -> Iterator[None]:
    """All groups are there, and one parameter, where it was: bitsandbytes looks up its options by place."""
    if not optimizer.initialized:  # it fills in the places in its first step
        optimizer.check_overrides()
        optimizer.to_gpu()
        optimizer.initialized = True
    everything = [each["params"] for each in optimizer.param_groups]
    for each in optimizer.param_groups:
        each["params"] = [p if p is parameter else _Absent for p in each["params"]] if each is group else []
    try:
        yield
    finally:
        for each, parameters in zip(optimizer.param_groups, everything, strict=True):
            each["params"] = parameters


def check_separable(optimizer: Optimizer) -> None:
    """Proves that stepping parameters one at a time equals stepping them together.

    Raises:
        ValueError: it does not, as for optimizers that count their steps in a group (schedule-free ones) or compute
            something over all parameters; or it cannot be told. Says which and why.
    """
    why = _obstacle(optimizer)
    if why is not None:
        raise ValueError(
            f"{type(optimizer).__name__} cannot step one parameter at a time: {why}. Use an optimizer whose "
            "parameters are independent, such as AdamW, SGD or Adafactor, or step them together after backward"
        )


def _obstacle(optimizer: Optimizer) -> str | None:
    if has_step_hooks(optimizer):
        return "it has step hooks, which would be called for each parameter"
    for group in optimizer.param_groups:
        if group["params"] and not isinstance(group["params"][0], FakeTensor):  # which has no values to compare
            try:
                together, apart = _trial(optimizer, group, alone=False), _trial(optimizer, group, alone=True)
            except Exception as error:  # whatever somebody's optimizer needs beyond a gradient
                return f"a trial failed with {type(error).__name__}: {error}"
            if not together[0].any():
                return "its step moves no parameter, so it must do its work elsewhere"
            if not torch.equal(together[0], apart[0]):
                return "a trial gave other weights than a step of all of them"
            if together[1] != apart[1]:
                return f"its step changes the options of the group, from {together[1]} to {apart[1]}"
    return None


def _trial(optimizer: Optimizer, group: dict[str, Any], *, alone: bool) -> tuple[Tensor, str]:
    """(how far two tiny parameters moved, the group's options then), on a copy without state."""
    like: Tensor = group["params"][0]
    options = {name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}
    if options.get("lr") is not None:  # zero while it warms up
        options["lr"] = torch.full_like(options["lr"], 0.1) if isinstance(options["lr"], Tensor) else 0.1
    with torch.random.fork_rng(devices=[like.device] if like.device.type == "cuda" else []):
        torch.manual_seed(0)
        start = torch.randn(2, 4, 4).to(like)
        parameters = [nn.Parameter(part.clone()) for part in start]
        trial = _stateless_copy(optimizer)
        trial.add_param_group({**options, "params": parameters})
        for parameter in parameters:
            trial.state[parameter].update(_made_at_construction(optimizer.state.get(like, {})))
        for number in range(ROUNDS):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, number + 1.0)
                if alone:
                    step_alone(trial, trial.param_groups[0], parameter)
                    parameter.grad = None
            type(trial).step(trial)  # if alone, the one that finds no gradients
    moved = torch.stack([parameter.detach() for parameter in parameters]) - start
    return moved, str({name: value for name, value in trial.param_groups[0].items() if name != "params"})


def _made_at_construction(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter's state may have before its first step, such as a seed; the count of steps is none of it."""
    return {name: value for name, value in state.items() if isinstance(value, int | float | str) and name != "step"}


def _stateless_copy(optimizer: Optimizer) -> Optimizer:
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state, twin.param_groups = defaultdict(dict), []
    drop_step_hooks(twin)
    return twin
