"""What a step and an evaluation take where the policy writes: a share of a window of completions."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from lowtide.ragged import RaggedBatch
from lowtide.rollout.rollout import Rollout
from lowtide.run.rollouts import Figures, Made
from lowtide.step.metrics import Totals
from lowtide.trainers.batches import RowBatches
from lowtide.trainers.online.entropy import kept_tokens
from lowtide.trainers.online.order import PromptSampler
from lowtide.trainers.order import own_rows

logger = logging.getLogger(__name__)

ROLLOUT = "rollout_{rank}.safetensors"
"""The file of a checkpoint for the window that a rank is in the middle of."""


class WrittenBatches(RowBatches):
    """Completions of rows; of a checkpoint, the window that a rank is in the middle of."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._window: Made | None = None
        self._evaluating: Totals | None = None
        self._evaluated: list[Figures] = []
        self._eval_rows, self._eval_completions = 0, 0

    def of_step(self, read: Iterable[Any]) -> RaggedBatch | None:
        trainer, args, parts = self.trainer, self.trainer.options, []
        windows, order = trainer.windows, trainer.row_order
        for rows in read:
            within = order.place[1] % windows.repeats
            if within == 0 or self._window is None:
                if within:
                    logger.warning("the completions of this window were not saved: they are written anew")
                self._window = self._made(rows, args.num_generations)
            share, each = within % args.steps_of_generation, trainer.rows_a_batch
            rollout, count = self._window.rollout, each * args.steps_of_generation
            window, repeat = order.place[1] // windows.repeats, within // args.steps_of_generation
            learned = trainer.learning.order(count, args.seed, order.place[0], window, repeat)
            chosen = learned[share * each : (share + 1) * each]
            parts.append(trainer.learning.batch(rollout, chosen, sharing=self._sharing))
            order.advance()
        return kept_tokens(trainer.runner, RaggedBatch.concat(parts), args) if parts else None

    def own_rows(self, batch: RaggedBatch) -> int:
        each = self.trainer.learning.completions
        return own_rows(self.trainer.accelerator, batch.rows * each) // each

    @property
    def _sharing(self) -> bool:
        return getattr(self.trainer.training_run.own_collator, "sharing", True)

    def _made(self, rows: Sequence[Mapping[str, Any]], group: int) -> Made:
        """Completions of rows, written by the policy as it is, and logged."""
        trainer = self.trainer
        place, step = trainer.row_order.place, trainer.state.global_step
        first = trainer.args.data_rank * len(rows)
        if self._evaluating is None:
            at = (0, place[0], place[1] // trainer.windows.repeats, first)
        else:
            at = (1, step, self._eval_rows + first)
        left = self._eval_completions - self._eval_rows
        trainer.maker.reported = left if self._evaluating is not None and left > 0 else None
        made = trainer.maker.make(rows, at, group=group, version=step, state=trainer.state)
        self._log(made)
        trainer.completions_log.take_in(made, trainer.rewards.names)
        return made

    def _log(self, made: Made) -> None:
        """Metrics of a rollout: one in training, where each counts alike; in evaluation those of all completions, at
        its end, so that they do not depend on how many are written at a time."""
        assert made.figures is not None
        if self._evaluating is not None:
            reported = self.trainer.maker.reported
            figures = made.figures if reported is None else made.figures.first(reported)
            self._evaluated.append(figures)
            for name, value in made.metrics.items():
                if value == value:
                    self._evaluating.add_mean(name, value * len(figures.lengths), len(figures.lengths))
            return
        for name, value in (made.metrics | self._metrics_of(made.figures)).items():
            if value == value:  # a function that applied to nothing has no mean
                self.trainer.runner.totals.add_mean(name, value, 1)

    def _metrics_of(self, figures: Figures) -> dict[str, float]:
        return figures.metrics(self.trainer.rewards.names, self.trainer.rewards.weights)

    # -- evaluation ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluating(self, loader: DataLoader) -> Iterator[None]:
        """On completions that are written for it."""
        self._evaluating, self._eval_rows, self._evaluated = Totals(), 0, []
        self._eval_completions = _completions_of(loader)
        self.trainer.maker.evaluates = True
        try:
            yield
        finally:
            self._evaluating, self.trainer.maker.evaluates = None, False

    def written(self, rows: Sequence[Mapping[str, Any]]) -> RaggedBatch:
        """The completions of rows to evaluate on, rewarded."""
        trainer, args = self.trainer, self.trainer.options
        made = self._made(rows, args.generations_eval)
        self._eval_rows += len(rows) * args.data_ranks
        chosen = range(len(made.rollout) // trainer.learning.completions)
        batch = trainer.learning.batch(made.rollout, chosen, sharing=self._sharing)
        return kept_tokens(trainer.runner, batch, args)

    def metrics_of_evaluation(self) -> tuple[dict[str, float], dict[str, float]] | None:
        """(what was added up, the metrics of all completions) of the evaluation that goes on; None outside of one."""
        if self._evaluating is None:
            return None
        sums = self._evaluating.read(self.trainer.args.device)
        found = self._metrics_of(Figures.concat(self._evaluated)) if self._evaluated else {}
        return sums, {name: value for name, value in found.items() if value == value}

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Writes the window that this rank is in the middle of."""
        place = self.trainer.row_order.place
        if self._window is not None and place[1] % self.trainer.windows.repeats:
            folder.mkdir(parents=True, exist_ok=True)  # the first rank's may be on another disk
            self._window.rollout.save(self._file(folder), place=list(place))

    def load(self, folder: Path) -> None:
        """Reads the window, which the first batch needs before random states are put back."""
        if self._file(folder).exists():
            rollout, _ = Rollout.load(self._file(folder), self.trainer.training_run.reader)
            self._window = Made(rollout)

    def _file(self, folder: Path) -> Path:
        return folder / ROLLOUT.format(rank=self.trainer.args.process_index)


def _completions_of(loader: DataLoader) -> int:
    """Completions that an evaluation has, without those that fill up its last batch; 0 of a stream, where that is not
    known before."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, PromptSampler):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return 0 if sampler is None else len(sampler)
