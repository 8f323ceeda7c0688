"""In which order rows are trained on: by their lengths where that is wanted, and again the same in a resumed run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import Trainer
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler
from transformers.trainer_utils import has_length

from lowtide.trainers.checkpoints.whole import saved_run_state

logger = logging.getLogger(__name__)


class GroupedByLength(LengthGroupedSampler):
    """Rows of about the same length together, in an order that is the epoch's, whatever was drawn before."""

    def __init__(self, batch_size: int, lengths: Sequence[int], seed: int) -> None:
        super().__init__(batch_size, lengths=list(lengths))
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


class RepeatableOrder(Trainer):
    """`transformers.Trainer` that knows the lengths of rows of all kinds, and finds its place in a stream again."""

    args: Any
    place: tuple[int, int] = (0, 0)
    """The pass over the rows, and the batches of it that were taken."""

    def row_lengths(self, dataset: Any = None) -> np.ndarray | None:
        """[rows]: the tokens of each row of a dataset; None where they are not known."""
        raise NotImplementedError

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        """As the Trainer's, which looks for the lengths of rows in a column, and for whom each rank has its own."""
        args = self.args
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        column = args.length_column_name
        if args.train_sampling_strategy in ("group_by_length", "batch_rebalance") and has_length(rows):
            lengths = None if column in getattr(rows, "column_names", ()) else self.row_lengths(rows)
            rows = rows if lengths is None else Dataset.from_dict({column: lengths})
        sampler = super()._get_train_sampler(rows)
        if isinstance(sampler, BatchRebalanceSampler):
            rows_in_all = args.train_batch_size * args.gradient_accumulation_steps * args.data_ranks
            ours = {"dp_size": args.data_ranks, "rank": args.data_rank, "effective_batch_size": rows_in_all}
            return BatchRebalanceSampler(
                sampler.lengths, grad_accum=sampler.grad_accum, drop_last=sampler.drop_last, **ours
            )
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        seed = args.seed if args.data_seed is None else args.data_seed
        return GroupedByLength(sampler.batch_size, sampler.lengths, seed)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """As the Trainer's, which takes a stream for one that does not end."""
        start = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial)
        if checkpoint is None or has_length(self.train_dataset) or self.args.ignore_data_skip:
            return start
        place = saved_run_state(checkpoint).get("place")
        if place is None:
            logger.warning(
                f"{checkpoint} does not say how far the stream was read: it goes on behind the first {start[1]} "
                "batches of its first pass, or with its second pass where it has fewer"
            )
            return start
        return place[0], place[1]

    def _run_epoch(self, **given: Any) -> None:
        resumed = given["epoch"] == given["epochs_trained"]
        self.place = given["epoch"], given["steps_trained_in_current_epoch"] if resumed else 0
        _set_epoch(given["train_dataloader"], given["epoch"])
        super()._run_epoch(**given)


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tells each sampler below a loader; accelerate does not reach those of several ranks where batches are skipped."""
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
