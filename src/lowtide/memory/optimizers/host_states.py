"""The states of an optimizer live in host memory and visit the device, one parameter's at a time, for its step.

AdamW's moments are twice the weights, and are needed for a moment of each step. Here the ordinary optimizer steps on
the device, as ever, one parameter after the other (`narrow_step`); the states of the next are brought, on a stream of
their own, while one is stepped, and those of the last go back. ZeRO-Offload (arXiv 2101.06840) steps on the CPU
instead, which moves less over the bus but needs an optimizer of its own there.

Exact: states are moved and nothing else. On a CPU, where they are in host memory anyway, it does nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.memory.optimizers.narrow_step import (
    check_separable,
    group_of_each,
    is_bitsandbytes,
    step_alone,
    unwrap_optimizer,
)
from lowtide.ops.target import kind_of


def on_a_device(parameter: Tensor) -> bool:
    """Whether a parameter lies elsewhere than in host memory."""
    return kind_of(parameter.device) != "cpu"


def check_host_states(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose states cannot live in host memory.

    Raises:
        ValueError: it cannot step one parameter at a time, or is one of bitsandbytes or torchao.
    """
    if type(optimizer).__module__.startswith("torchao."):
        raise ValueError(
            f"the states of torchao's {type(optimizer).__name__} are tensors of its own, which do not live in host "
            "memory: take optim='adamw_stochastic_8bit', or leave optimizer_states_on_host out"
        )
    if is_bitsandbytes(optimizer):
        raise ValueError(
            f"the states of bitsandbytes' {type(optimizer).__name__} do not live in host memory: take one of its paged "
            "optimizers (optim='paged_adamw_32bit'), which move them when the GPU is full"
        )
    check_separable(optimizer)


class HostStates:
    """Keeps the states of an optimizer's parameters in host memory, pinned where the device is CUDA.

    The optimizer's own `step` and `load_state_dict` are replaced, so whatever calls them need not know; `state_dict`
    has the states from host memory. With `OptimizerInBackward`, give it this object's `step_alone` as its `step`.

    Args:
        optimizer: an ordinary one, maybe wrapped by accelerate; before a scheduler is made for it, which wraps `step`.
        offload: which parameters' states live in host memory; by default those of all that do not themselves.
        device: where a parameter is when it is stepped; by default where it is now.

    Raises:
        ValueError: the optimizer cannot step one parameter at a time, or is one of bitsandbytes.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        offload: Callable[[Tensor], bool] = on_a_device,
        device: torch.device | None = None,
    ) -> None:
        self.optimizer = unwrap_optimizer(optimizer)
        check_host_states(self.optimizer)
        self._offload, self._device = offload, device
        self._lanes: dict[torch.device, Lane] = {}
        replaced: Any = self.optimizer
        replaced.step = types.MethodType(lambda _, closure=None: self.step(closure), replaced)
        replaced.load_state_dict = types.MethodType(lambda _, state_dict: self.load_state_dict(state_dict), replaced)
        replaced.register_state_dict_pre_hook(lambda _: self.wait())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step of every parameter that has a gradient."""
        groups = group_of_each(self.optimizer)
        if not any(map(self._offload, groups)):
            return type(self.optimizer).step(self.optimizer, closure)  # pyright: ignore[reportArgumentType]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        trained = [parameter for parameter in groups if parameter.grad is not None]
        visit = self._bring(trained[0]) if trained else None
        for parameter, following in itertools.zip_longest(trained, trained[1:]):
            arriving = None if following is None else self._bring(following)
            self._step_visiting(groups[parameter], parameter, visit)
            visit = arriving
        return loss

    def step_alone(self, optimizer: Any, group: dict[str, Any], parameter: Tensor) -> None:
        """Steps one parameter of a group; in the form that `OptimizerInBackward` wants."""
        assert optimizer is self.optimizer
        self._step_visiting(group, parameter, self._bring(parameter))

    def take_home(self, parameter: Tensor) -> None:
        """Sends states that were made outside of a step to host memory."""
        if self._offload(parameter) and parameter in self.optimizer.state:
            self._send(parameter, self._lane(parameter), {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's, but what lives in host memory goes there directly, in the dtype that it was saved in."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        at_home, elsewhere = {}, {}
        for number, parameter in zip(numbers, group_of_each(self.optimizer), strict=False):
            saved = state_dict["state"].get(number, {})
            home = {name: v for name, v in saved.items() if _moves(v)} if self._offload(parameter) else {}
            at_home[parameter] = home
            if saved:
                elsewhere[number] = {name: value for name, value in saved.items() if name not in home}
        type(self.optimizer).load_state_dict(self.optimizer, {**state_dict, "state": elsewhere})
        for parameter, home in at_home.items():
            for name, value in home.items():
                self.optimizer.state[parameter][name] = _host_like(value, self._device_of(parameter)).copy_(value)

    def wait(self) -> None:
        """Until the states in host memory are those of the last step."""
        for lane in self._lanes.values():
            lane.wait()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _bring(self, parameter: Tensor) -> _Visit | None:
        if not self._offload(parameter):
            return None
        home = {name: value for name, value in self.optimizer.state.get(parameter, {}).items() if _moves(value)}
        lane = self._lane(parameter)
        lane.wait_for_last()
        # Made on the device's own stream: its allocator has a pool for each, and a lane's would stay beside.
        brought = {name: torch.empty_like(value, device=lane.device, pin_memory=False) for name, value in home.items()}
        with lane.copying():
            for name, value in home.items():
                brought[name].copy_(value, non_blocking=lane.asynchronous)
                lane.leave(brought[name])
            return _Visit(lane, home, brought, lane.mark())

    def _device_of(self, parameter: Tensor) -> torch.device:
        """Where it is stepped."""
        return self._device or parameter.device

    def _lane(self, parameter: Tensor) -> Lane:
        device = self._device_of(parameter)
        if device not in self._lanes:
            self._lanes[device] = Lane(device)
        return self._lanes[device]

    def _step_visiting(self, group: dict[str, Any], parameter: Tensor, visit: _Visit | None) -> None:
        if visit is None:
            return step_alone(self.optimizer, group, parameter)
        visit.lane.arrive(visit.mark)
        if visit.brought:
            self.optimizer.state[parameter].update(visit.brought)
        try:
            step_alone(self.optimizer, group, parameter)
        except BaseException:
            self.optimizer.state[parameter].update(visit.home)  # as they were: the step may be repeated
            raise
        self._send(parameter, visit.lane, visit.home)

    def _send(self, parameter: Tensor, lane: Lane, homes: dict[str, Tensor]) -> None:
        state = self.optimizer.state[parameter]
        with lane.copying():
            for name, value in state.items():
                if _moves(value):
                    home = homes.get(name)
                    if home is None or home.device.type != "cpu" or home.shape != value.shape:
                        home = _host_like(value, lane.device)
                    lane.leave(value)
                    state[name] = home.copy_(value, non_blocking=lane.asynchronous)
            lane.last_sent = lane.mark()


class Lane:
    """The stream that a device's states travel on. Without CUDA, copies are done when they are asked for."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.asynchronous = self.stream is not None
        self.last_sent: Any = None
        """The point at which the states that were sent last are at home."""

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copies inside go on the lane, behind those before them and behind the device's own work: that wrote what goes
        home, and it has done with the memory that others come to."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Any:
        """The point that the lane has come to."""
        return None if self.stream is None else self.stream.record_event()

    def wait_for_last(self) -> None:
        """Before more is brought: the host runs far ahead of the copies, and what they free it could not use yet."""
        if self.last_sent is not None:
            self.last_sent.synchronize()

    def arrive(self, mark: Any) -> None:
        """The device's own work waits for what was copied before the mark."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def leave(self, value: Tensor) -> None:
        """The value's memory is not reused before the copies on this lane are done."""
        if self.stream is not None:
            value.record_stream(self.stream)

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


class _Visit(NamedTuple):
    """A parameter's states on their way to the device."""

    lane: Lane
    home: dict[str, Tensor]
    """Where they live in host memory, which they go back to."""
    brought: dict[str, Tensor]
    mark: Any


def _moves(value: Any) -> bool:
    """Tensors do; counts of steps stay where the optimizer wants them."""
    return isinstance(value, Tensor) and value.dim() > 0


def _host_like(value: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(value, device="cpu", pin_memory=device.type == "cuda")
