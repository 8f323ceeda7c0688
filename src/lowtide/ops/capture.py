"""Whether a step may be captured as a CUDA graph, told by watching it run, on any device.

A graph replays the kernels of one step on the addresses of that step: what Python works out anew is frozen, and what
the host would have to read, to copy or to allocate is refused, or goes wrong in silence. So two steps are compared,
operation by operation. A step may be captured if the host reads nothing off the device and sends nothing to it, no
shape depends on data, both steps run the same operations with the same shapes, numbers and addresses, and no memory
that a step takes outlives it.

On the meta device, where no tensor has values, reads are answered with zeros, and comparisons with True, so that a
step of a model of any size is watched without its weights.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.torch import TorchDispatchMode, storage_id, tree_leaves

COMPARISONS = frozenset({"aten::equal", "aten::allclose"})
READS = COMPARISONS | {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero"}
"""Operations that hand the host a number."""
COPIES = frozenset(f"aten::{name}" for name in ("_to_copy", "copy_"))
SHAPED = frozenset({"aten::bincount", "aten::histc", "aten::nonzero_numpy", "aten::masked_select"})
"""Operations whose result has a size that depends on data, beside those that torch tags so."""
INDEXED = frozenset(f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_"))
"""Operations that become such ones where they are given a mask."""
MASKS = (torch.bool, torch.uint8)


@dataclass
class Step:
    """What one step did on the device."""

    operations: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    """Name and arguments of each: of tensors the shape, and the address if it was there before the step."""
    host_reads: list[str] = field(default_factory=list)
    """Operations after which the host had something of the device, and so had waited for it."""
    host_copies: list[str] = field(default_factory=list)
    """Operations that took memory of the host to the device."""
    by_data: list[str] = field(default_factory=list)
    """Operations whose results have sizes that depend on data."""
    made: list[tuple[str, weakref.ref[Tensor]]] = field(default_factory=list)

    def outliving(self) -> list[str]:
        """The operations whose results are still there."""
        gc.collect()
        return [name for name, tensor in self.made if tensor() is not None]


class Watch(TorchDispatchMode):
    """Sees the operations of steps on a device.

    Args:
        device: where the model is.
        see: called with each operation that is none of the host alone, its arguments and its result.
    """

    def __init__(self, device: torch.device, see: Callable[..., None] | None = None):
        super().__init__()
        self.device, self.see = device, see
        self.steps: list[Step] = []
        self._own: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """What is seen from now on is of a further step."""
        self.steps.append(Step())
        self._own.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, step, name = kwargs or {}, self.steps[-1], func.name().partition(".")[0]
        given = tree_leaves((args, kwargs))
        tensors = [each for each in given if isinstance(each, Tensor)]
        there = [each for each in tensors if each.device.type == self.device.type]
        arguments = tuple(self._argument(each) for each in given)
        host_copy = name in COPIES and len(there) < len(tensors) and self.device.type != "cpu"
        reads = (name in READS and bool(there)) or _leaves(name, self.device, args, kwargs, there)
        out = _answer(func, args, kwargs, there) if reads and self.device.type == "meta" else func(*args, **kwargs)
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        there += [each for each in made if each.device.type == self.device.type]
        if not there:
            return out
        if reads:
            step.host_reads.append(func.name())
        elif host_copy:
            step.host_copies.append(func.name())
        if _by_data(func, name, given):
            step.by_data.append(func.name())
        step.operations.append((func.name(), arguments))
        known = {storage_id(each.untyped_storage()) for each in tensors}
        for each in made:
            storage = storage_id(each.untyped_storage())
            if storage not in known and each.device.type == self.device.type:
                self._own.add(storage)
                step.made.append((func.name(), weakref.ref(each)))
        if self.see is not None:
            self.see(func, args, out, kwargs)
        return out

    def _argument(self, value: Any) -> Any:
        """What two steps have to have alike."""
        if not isinstance(value, Tensor):
            return value if isinstance(value, int | float | bool | str | None) else str(value)
        storage = storage_id(value.untyped_storage())
        address = None if storage in self._own else storage
        return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device.type, address


def why_not_capturable(call: Callable[[], object], device: torch.device) -> str | None:
    """What keeps a step from being captured as a CUDA graph, as a sentence; None if nothing does.

    Args:
        call: makes a step; called twice, on the device.
        device: where its tensors are; "cpu" and "meta" stand for a CUDA device.
    """
    with Watch(device) as watch:
        call()
        watch.begin()
        call()
    return difference(*watch.steps)


def difference(first: Step, second: Step) -> str | None:
    """What keeps the later of two steps in a row from being captured; None if nothing does."""
    told = {
        "the host reads the device": second.host_reads,
        "memory of the host is copied to the device": second.host_copies,
        "a size depends on data": second.by_data,
        "memory outlives the step": second.outliving(),
    }
    for what, names in told.items():
        if names:
            return f"{what}: {_few(names)}"
    if len(first.operations) != len(second.operations):
        return f"it runs {len(first.operations):,} operations, then {len(second.operations):,}"
    pairs = enumerate(zip(first.operations, second.operations, strict=True))
    found = next((f"operation {number}: {one}, then {other}" for number, (one, other) in pairs if one != other), None)
    return found and f"it does not run alike twice: {found}"


def _few(names: Iterable[str]) -> str:
    unlike = list(dict.fromkeys(names))
    return ", ".join(unlike[:5]) + (f" and {len(unlike) - 5} more" if len(unlike) > 5 else "")


def _by_data(func: Any, name: str, given: list[Any]) -> bool:
    if name in INDEXED:
        return any(isinstance(each, Tensor) and each.dtype in MASKS for each in given[1:])
    return name in SHAPED or torch.Tag.dynamic_output_shape in func.tags


def _leaves(name: str, device: torch.device, args: Any, kwargs: Any, there: list[Tensor]) -> bool:
    """Whether an operation takes a tensor from the device to the host."""
    if name not in COPIES or device.type == "cpu" or not there:
        return False
    if name == "aten::copy_":
        return args[0].device.type == "cpu"
    return torch.device(kwargs.get("device") or device).type == "cpu"


def _answer(func: Any, args: Any, kwargs: Any, there: list[Tensor]) -> Any:
    """Zeros, in place of what is not there to be read."""
    name = func.name().partition(".")[0]
    if name in COMPARISONS:
        return True
    if name == "aten::copy_":
        return args[0].zero_()
    if name == "aten::_to_copy":
        return torch.zeros(there[0].shape, dtype=kwargs.get("dtype") or there[0].dtype)
    return torch.zeros((), dtype=there[0].dtype).item()
