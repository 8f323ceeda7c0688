"""The largest living tensors, for the report of a run that ran out of memory.

Found by the garbage collector, which knows every tensor that Python holds; what autograd alone has saved is not among
them. It takes a fraction of a second, so it is for failures.
"""

from __future__ import annotations

import gc
from collections import Counter

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.memory.measure import bytes_text


def largest_tensors(device: torch.device, count: int = 5) -> tuple[str, ...]:
    """The largest kinds of living tensors on a device, as text: how many, of what size, kind, dtype and shape.

    Storages count once, under the tensor that was found first; weights come before gradients, and these before others.
    """
    # By its type alone: some objects warn when they are asked for their class.
    # Fake ones hold nothing, and sizes that a compiler has left open are no numbers.
    found = (
        each for each in gc.get_objects() if issubclass(type(each), Tensor) and not issubclass(type(each), FakeTensor)
    )
    tensors = [each for each in found if each.device.type == device.type]
    weights = [each for each in tensors if isinstance(each, nn.Parameter)]
    gradients = [each.grad for each in weights if each.grad is not None]
    kinds: Counter[tuple[int, str]] = Counter()
    seen: set[int] = set()
    for name, group in (("weight", weights), ("gradient", gradients), ("tensor", tensors)):
        for tensor in group:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                dtype = str(tensor.dtype).removeprefix("torch.")
                kinds[storage.nbytes(), f"{name} {dtype} {list(tensor.shape)}"] += 1
    largest = sorted(kinds.items(), key=lambda item: -item[0][0])[:count]
    return tuple(f"{f'{n} x ' if n > 1 else ''}{bytes_text(size)} {kind}" for (size, kind), n in largest if size)
