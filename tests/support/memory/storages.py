"""Which storages are there, whoever holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """All storages that operations make while it lasts, and how many bytes of them are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable:  # of a storage that is known
            return out
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        return out

    @property
    def live(self) -> int:
        self.sizes = {ref: size for ref, size in self.sizes.items() if not ref.expired()}
        return sum(self.sizes.values())
