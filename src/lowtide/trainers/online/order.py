"""In which order prompts are taken: as many times as there are completions of each, a window at a time.

The order is that of TRL's `RepeatSampler`, seed by seed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lowtide.trainers.order import RowOrder

READ_HERE = "each worker of a stream would read other rows, and tear the completions of a prompt apart"


@dataclass(frozen=True)
class Windows:
    """What is written at a time, and how often it is learned from."""

    prompts: int
    """On all ranks."""
    completions: int
    """Of each prompt."""
    repeats: int = 1
    """Micro-batches that come of a window: each takes the window's rows once more."""
    ahead: int = 0
    """Windows that are asked for before they are learned from."""


@dataclass(eq=False)
class PromptSampler(Sampler):
    """Numbers of rows: each `completions` times, each window `repeats` times; what fills no window is left out."""

    rows: Sized
    windows: Windows
    shuffle: bool = True
    seed: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The order is that of this pass over the rows, whatever was drawn before."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        count, each = len(self.rows), self.windows.prompts
        order = list(range(count))
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch + 1):
                order = torch.randperm(count, generator=self.generator).tolist()
        for start in range(0, count - count % each, each):
            for _ in range(self.windows.repeats):
                for row in order[start : start + each]:
                    yield from [row] * self.windows.completions

    def __len__(self) -> int:
        windows = len(self.rows) // self.windows.prompts
        return windows * self.windows.prompts * self.windows.completions * self.windows.repeats


class PromptStream(IterableDataset):
    """The rows of a stream in the same order; it is shuffled before."""

    def __init__(self, rows: Any, windows: Windows) -> None:
        self.rows, self.windows = rows, windows

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self.rows)
        while len(window := list(islice(rows, self.windows.prompts))) == self.windows.prompts:
            for _ in range(self.windows.repeats):
                for row in window:
                    yield from [row] * self.windows.completions


class RowsAhead:
    """The batches of rows of a pass, of which some are looked at before they are taken."""

    def __init__(self) -> None:
        self._read: Iterator[Any] | None = None
        self._later: deque[Any] = deque()

    def begin(self, read: Iterator[Any]) -> None:
        """From here on batches are of this pass; what was read of it before is still to be taken."""
        if read is not self._read:
            self._read, self._later = read, deque()

    def take(self) -> Any:
        """The next batch; None after the last."""
        found = self.later(1)
        if self._later:
            self._later.popleft()
        return found

    def later(self, number: int) -> Any:
        """The batch so many places later than the last that was taken; None where there is none."""
        assert self._read is not None
        self._later.extend(islice(self._read, max(number - len(self._later), 0)))
        return self._later[number - 1] if number <= len(self._later) else None


class PromptOrder(RowOrder):
    """The order in which a trainer whose policy writes takes prompts: a row for each completion of this rank, as it
    is, in batches of a whole window."""

    def train_sampler(self, rows: Any, theirs: Any) -> PromptSampler:
        rows = self.trainer.train_dataset if rows is None else rows
        return PromptSampler(rows, self.trainer.windows, self.args.shuffle_dataset, self.args.seed)

    def eval_sampler(self, rows: Any, theirs: Any) -> PromptSampler:
        return PromptSampler(rows, self._evaluated, shuffle=False)

    def train_loader(self, theirs: Callable[[], DataLoader]) -> DataLoader:
        return theirs()

    def loader(self, theirs: Callable[..., DataLoader], dataset: Any, size: int, *, training: bool) -> DataLoader:
        if not hasattr(dataset, "__len__"):
            if training and self.args.shuffle_dataset:
                dataset = dataset.shuffle(seed=self.args.seed)
            dataset = PromptStream(dataset, self.trainer.windows if training else self._evaluated)
        size *= self.trainer.learning.completions * (self.args.steps_of_generation if training else 1)
        with self._rows_as_they_are(), self._read_here(dataset):
            return theirs(dataset, size)

    @property
    def fewest(self) -> int:
        return self.trainer.windows.prompts

    @property
    def _evaluated(self) -> Windows:
        """What is written at a time in evaluation."""
        return Windows(1, self.args.generations_eval)

    @contextlib.contextmanager
    def _rows_as_they_are(self) -> Iterator[None]:
        before, self.trainer.data_collator = self.trainer.data_collator, list
        try:
            yield
        finally:
            self.trainer.data_collator = before

    @contextlib.contextmanager
    def _read_here(self, dataset: Any) -> Iterator[None]:
        """Without workers where a stream is read (`READ_HERE`)."""
        before = self.args.dataloader_num_workers
        self.args.dataloader_num_workers = 0 if isinstance(dataset, PromptStream) else before
        try:
            yield
        finally:
            self.args.dataloader_num_workers = before
