"""Watches storages being born and freed while code runs on fake tensors, which have shapes and no memory.

The step that is traced is the one that trains; nothing here knows what it does. So a technique or a method is covered
the day it is written, and there is no formula of a step to keep up with the code. torch's own
`torch.distributed._tools.MemTracker` tracks storages by category too, of modules that it hooks, forward and backward;
it knows neither layers to unroll, nor phases of a step, nor an allocator's holes, nor what lies in host memory.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from lowtide.compat.torch import (
    FakeTensor,
    PlainMode,
    asks_for_place,
    is_traceable_wrapper_subclass_type,
    parts_of,
    place_of,
)
from lowtide.planner.tracing.storage_watch import StorageWatch

PHASES = ("loading", "generate", "reward", "score", "forward", "head", "backward", "optimizer", "evaluation", "saving")
BORN_IN = {
    "loading": "weights",
    "generate": "activations",
    "reward": "activations",
    "score": "activations",
    "forward": "activations",
    "head": "head",
    "backward": "activations",
    "optimizer": "optimizer",
    "evaluation": "activations",
    "saving": "activations",
}
"""The category of what is made in a phase; gradients and references are told by what they become."""
REWARD = "reward"
"""The category of the weights of reward models; they run in the phase of the same name."""
KEYS = "keys"
"""The category of the keys and values of long rows that wait between their pieces, and of their gradients."""
ROWS = "rows"
"""The category of the rows of a step."""
HOST, PINNED = ON_HOST = ("host", "pinned")
"""The categories of what lies in host memory and not on the device: in pinned memory, or not."""
IN_FILES = "files"
"""The category of weights that a CPU reads from their files as they are used."""
ELSEWHERE = (*ON_HOST, IN_FILES)
"""The categories of what the device does not hold."""
FOR_ALL = ("aten::_foreach", "aten::_fused_ad", "aten::_fused_sgd")
"""How the names of an optimizer's operations begin that are given lists of all parameters."""


class Mode(PlainMode):
    """A mode of a trace: it says at once where a tensor lies, and pays nothing to hide from the compiler."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if asks_for_place(func, args):
            return args[0].fake_device
        return self.seen(func, types, args, kwargs or {})

    def seen(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What an operation gives, with whatever the mode does about it."""
        raise NotImplementedError


class Block:
    """A storage: its bytes, and what it turned out to be."""

    __slots__ = ("category", "layer", "size")

    def __init__(self, size: int, category: str, layer: int | None) -> None:
        self.size, self.category, self.layer = size, category, layer


class Event(NamedTuple):
    """A block is born or dies while a layer runs. Without a block: the heap is trimmed or, if `born`, a part of the
    run begins, whose name is in place of the phase."""

    block: Block | None
    born: bool
    phase: str
    layer: int | None
    """Of the model; None outside of layers. A block's birth is of the block's own layer."""


class StorageTrace(StorageWatch[Block], Mode):
    """Notes every birth and death of a storage, in order.

    Args:
        together: layers that count as one, where they do different things in turn.
        run: gives what an operation gives, from it, its arguments and its keywords; by default it is called.

    Attributes:
        phase: set by whoever runs the code.
        now: the part of the run.
        layer: the same.
        pages_states: whether large states of the optimizer lie in memory that CUDA's driver moves.
        events: what happened.
        watchers: called with each operation, its arguments and its result.
    """

    def __init__(self, together: int = 1, run: Callable[[Any, Any, Any], Any] | None = None) -> None:
        super().__init__()
        self._run = run or _called
        self.phase = self.now = "loading"
        self.layer: int | None = None
        self.together = together
        self.pages_states = False
        self.events: list[Event] = []
        self.watchers: list[Callable[[Any, Any, Any], None]] = []
        self._stepping = self._settling = False
        self._around: Mapping[str, Callable[..., Any]] = {}

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase, after which the one before goes on."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase, self.layer = before, None

    @contextlib.contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Follows an optimizer through the layers: it looks up a parameter's states, and then steps it."""
        optimizer.state, self._stepping = _FollowedStates(self, optimizer.state), True
        try:
            yield
        finally:
            optimizer.state, self._stepping, self.layer = defaultdict(dict, optimizer.state), False, None

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """Follows weights that are made anew one by one: an operation is of the layer of the tensor that it is given,
        and what is given none is of the layer before."""
        self._settling = True
        try:
            yield
        finally:
            self._settling, self.layer = False, None

    @contextlib.contextmanager
    def taking_around(self, workspaces: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """Around some operations, by their names, takes the buffers that a function makes of their arguments."""
        before, self._around = self._around, workspaces
        try:
            yield
        finally:
            self._around = before

    def belongs(self, tensors: Iterable[Tensor], category: str | None = None, layer: int | None = None) -> None:
        """Says what some tensors are, or of which layer."""
        for tensor in (part for each in tensors for part in parts_of(each)):
            block = self.block_of(tensor.untyped_storage())
            if block is not None:
                if block.category not in ELSEWHERE:
                    block.category = category or block.category
                block.layer = block.layer if layer is None else layer

    def leaves(self, size: int) -> Block:
        """Some bytes go to pinned host memory."""
        block = Block(size, PINNED, self.layer)
        self.events.append(Event(block, True, self.phase, self.layer))
        return block

    def returned(self, block: Block) -> None:
        """They are not wanted there any more."""
        self.events.append(Event(block, False, self.phase, self.layer))

    def trimmed(self) -> None:
        """The heap was asked to give its holes back."""
        self.events.append(Event(None, False, self.phase, self.layer))

    def part(self, name: str) -> None:
        """A part of the run begins."""
        self.now = name
        self.events.append(Event(None, True, name, None))

    def place(self, number: int) -> int:
        """Of a layer of the model, by its number: the layer that it is here."""
        return number // self.together

    def layer_of(self, tensor: Tensor) -> int | None:
        """The layer that a tensor is of."""
        block = self.block_of(tensor.untyped_storage())
        return None if block is None else block.layer

    def seen(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(kind is not FakeTensor and is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # what such a tensor is made of comes here after it
        taken = None
        if self._around and (allocate := self._around.get(func.name())) is not None:
            with self:
                taken = allocate(*args, **kwargs)
        for_all = self._stepping and func.name().startswith(FOR_ALL) and len(args[0]) > 1
        if for_all:
            self.layer = None
        if self._settling and args and isinstance(args[0], Tensor):
            self.layer = self.layer_of(args[0])
        out = self._run(func, args, kwargs)
        if isinstance(out, Tensor):
            self._see(out, self.layer)
        elif isinstance(out, tuple | list):
            layers = map(self.layer_of, args[0]) if for_all else [self.layer] * len(out)
            for each, layer in zip(out, layers, strict=True):
                if isinstance(each, Tensor):
                    self._see(each, layer)
        del taken
        for watcher in self.watchers:
            watcher(func, args, out)
        return out

    def _see(self, tensor: Tensor, layer: int | None) -> None:
        storage = tensor.untyped_storage()
        if self.block_of(storage) is not None or place_of(tensor).type == "meta":
            return
        block = Block(storage.nbytes(), self.owner or BORN_IN[self.phase], layer)
        self.events.append(Event(block, True, self.phase, layer))
        self.follow(storage, block)

    def freed(self, block: Block) -> None:
        self.events.append(Event(block, False, self.phase, self.layer))


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


class _FollowedStates(defaultdict):
    """An optimizer's states, which tell a trace whose are asked for."""

    def __init__(self, trace: StorageTrace, states: Mapping[Tensor, Any]) -> None:
        super().__init__(dict, states)
        self.trace = trace

    def __getitem__(self, parameter: Tensor) -> Any:
        self.trace.layer = self.trace.layer_of(parameter)
        return super().__getitem__(parameter)
