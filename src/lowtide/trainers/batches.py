"""What a step and an evaluation take of the rows that a trainer reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from lowtide.ragged import RaggedBatch
from lowtide.step.cut import idle_part
from lowtide.trainers.order import own_rows


class RowBatches:
    """The rows as they are."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def of_step(self, read: Iterator[Any], count: int) -> RaggedBatch | None:
        """The next batches, so many, which are those of one optimizer step, as one; None where there are none.

        Rows that fill up the last batch of a pass are left out, and a rank without others has one that stands in: a
        step is that of one process, which has each row once.
        """
        trainer = self.trainer
        batches, batch = [], None
        for inputs in islice(read, count):
            batch = trainer.drawn(trainer.as_ragged(inputs), trainer.row_order.place[0])
            trainer.row_order.advance()
            if own := self.own_rows(batch):
                batches.append(batch if own == batch.rows else batch.select_rows(range(own)))
        if batch is None:
            return None
        return RaggedBatch.concat(batches) if batches else replace(idle_part(batch, None).batch, stands_in=True)

    def own_rows(self, batch: RaggedBatch) -> int:
        """How many rows of the batch that was taken last are this rank's own, and do not fill it up."""
        return own_rows(self.trainer.accelerator, batch.rows)

    @contextlib.contextmanager
    def evaluating(self, loader: DataLoader) -> Iterator[None]:
        """Around an evaluation."""
        yield

    def end(self) -> None:
        """The training is over."""
