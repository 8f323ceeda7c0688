"""The storages that live while code runs, each with what is known of it: on fake tensors and on real ones alike."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

from lowtide.compat.torch import storage_id

B = TypeVar("B")


class StorageWatch(Generic[B]):
    """Blocks of living storages, for a mode that sees each operation.

    A storage is told by torch's own object for it, which lives as long as it does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owner: str | None = None
        """The category of what is made, whatever the phase; None for the phase's."""
        self._living: dict[int, tuple[B, weakref.ref]] = {}

    @contextlib.contextmanager
    def owned_by(self, category: str) -> Iterator[None]:
        """While it lasts, what is made is of a category, whatever the phase."""
        before, self.owner = self.owner, category
        try:
            yield
        finally:
            self.owner = before

    def block_of(self, storage: torch.UntypedStorage) -> B | None:
        """What is known of a storage; None for one that was never followed."""
        found = self._living.get(storage_id(storage))
        return None if found is None else found[0]

    def follows(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is followed."""
        return storage_id(storage) in self._living

    def blocks(self) -> list[B]:
        """Of all that live."""
        return [block for block, _ in self._living.values()]

    def storages(self) -> list[torch.UntypedStorage]:
        """All that live."""
        return [storage for _, known in [*self._living.values()] if (storage := known()) is not None]

    def follow(self, storage: torch.UntypedStorage, block: B) -> None:
        """Has `freed` called with the block when the storage is."""
        key = storage_id(storage)
        self._living[key] = block, weakref.ref(storage, lambda _: self.freed(self._living.pop(key)[0]))

    def freed(self, block: B) -> None:
        """A storage is gone."""
        raise NotImplementedError

    def forget(self) -> None:
        """Follows none of them any more."""
        self._living.clear()  # and with it the references that tell of an end
