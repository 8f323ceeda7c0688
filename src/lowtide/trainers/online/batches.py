"""What a step and an evaluation take where the policy writes: a share of a window of completions."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from lowtide.ragged import RaggedBatch
from lowtide.ranks.world import objects_of_all_ranks
from lowtide.rollout.rollout import Rollout
from lowtide.run.ahead import Ahead, BesideTraining, Place
from lowtide.run.rollouts import Figures, Made
from lowtide.step.metrics import Totals
from lowtide.trainers.batches import RowBatches
from lowtide.trainers.online.entropy import kept_tokens
from lowtide.trainers.online.order import PromptSampler, RowsAhead
from lowtide.trainers.order import own_rows
from lowtide.trainers.references.ahead import with_teacher

logger = logging.getLogger(__name__)

ROLLOUT = "rollout_{rank}.safetensors"
"""The file of a checkpoint for the window that a rank is in the middle of; for each that was asked for, with the pass
over the rows and the window behind the rank."""
REPLAY = "replay_{rank}.safetensors"
"""The file of a checkpoint for the groups that are kept to be replayed, the same ones on every rank."""


class WrittenBatches(RowBatches):
    """Completions of rows; of a checkpoint, the window that a rank is in the middle of."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._window: Made | None = None
        self._rows = RowsAhead()
        self._ahead = Ahead(getattr(trainer.args, "heartbeat_stale_after_s", math.inf))
        self._beside: BesideTraining | None = None
        self._published: int | None = None
        """The optimizer steps that the weights had taken which windows are written by, ahead of training."""
        self._publishing = 0.0
        """Seconds that the last copy of the weights took."""
        self._degenerate: dict[str, int] = {}
        """Of each reason why nothing is to be learned, for how many windows in a row it has held."""
        self._evaluating: Totals | None = None
        self._evaluated: list[Figures] = []
        self._eval_rows, self._eval_completions = 0, 0

    def of_step(self, read: Iterator[Any], count: int) -> RaggedBatch | None:
        trainer, args, parts, taught = self.trainer, self.trainer.options, [], []
        windows, order = trainer.windows, trainer.row_order
        before = order.place, self._window
        self._rows.begin(read)
        try:
            for number in range(count):
                if (rows := self._rows.take()) is None:
                    break
                within = order.place[1] % windows.repeats
                if within == 0 or self._window is None:
                    if within:
                        logger.warning("the completions of this window were not saved: they are written anew")
                    self._window = self._next_window(rows, count - number)
                share, each = within % args.steps_of_generation, trainer.rows_a_batch
                rollout, taken = self._window.rollout, each * args.steps_of_generation
                window, repeat = order.place[1] // windows.repeats, within // args.steps_of_generation
                learned = trainer.learning.order(taken, args.seed, order.place[0], window, repeat)
                chosen = learned[share * each : (share + 1) * each]
                parts.append(trainer.learning.batch(rollout, chosen, sharing=self._sharing))
                taught.append(trainer.learning.taught(rollout, chosen, sharing=self._sharing))
                order.advance()
            if not parts:
                return None
            batch = with_teacher(trainer.runner, RaggedBatch.concat(parts), taught, trainer.asked)
        except Exception:
            order.place, self._window = before  # as a checkpoint of the last step has them
            raise
        return kept_tokens(trainer.runner, batch, args)

    # -- windows -------------------------------------------------------------------------------------------------

    def _next_window(self, rows: Sequence[Mapping[str, Any]], left: int) -> Made:
        """The window that begins here; those that follow are asked for, as many as are wanted ahead.

        Args:
            left: micro-batches of this step, from here on.
        """
        trainer, args, state = self.trainer, self.trainer.options, self.trainer.state
        windows, (epoch, taken) = trainer.windows, trainer.row_order.place
        first, within = divmod(taken, windows.repeats)
        left += (state.max_steps - state.global_step - 1) * trainer.args.gradient_accumulation_steps
        for number in range(windows.ahead + 1):
            away = max(number * windows.repeats - within, 0)
            later = self._rows.later(away) if away else rows
            if later is None or away >= left:
                break  # the end of the pass over the rows, or of the run
            if (place := (epoch, first + number)) not in self._ahead:
                self._ask(place, later)
        waited = self._ahead.waited
        own = trainer.maker.met(
            lambda: self._ahead.take((epoch, first)), waited_for=not windows.ahead and trainer.maker.writer.has_a_part
        )
        if windows.ahead:
            lag = float(state.global_step - own.rollout.version)
            own.metrics |= {"sample/staleness_mean": lag, "sample/staleness_max": lag}
            own.metrics |= {"perf/rollout_wait_s": self._ahead.waited - waited, "perf/weight_sync_s": self._publishing}
        if trainer.resampling is not None:
            place = epoch, first
            own, rows = trainer.resampling.filled(own, rows, place, version=state.global_step, state=state)
        if trainer.replay is not None:
            own = trainer.replay.filled(own, (epoch, first))
        made = trainer.maker.finish(own, rows, group=args.num_generations, state=state)
        if trainer.replay is not None:
            trainer.replay.take_in(made)
        self._warn_of_degenerate(made.metrics)
        return self._logged(made)

    def _warn_of_degenerate(self, metrics: Mapping[str, float]) -> None:
        """Says of windows in a row from which nothing is to be learned, at the first and then now and again."""
        found = self.trainer.learning.degenerate(metrics, self.trainer.options)
        self._degenerate = {name: self._degenerate.get(name, 0) + 1 for name in found}
        for name, why in found.items():
            count = self._degenerate[name]
            if count == 1 or count % self.trainer.options.diagnostics_warning_interval == 0:
                logger.warning(f"{why} ({count} windows in a row)")

    def _ask(self, place: Place, rows: Sequence[Mapping[str, Any]]) -> None:
        """Has a window written by the weights as they are now: in the thread, or where it is taken."""
        trainer, maker, version = self.trainer, self.trainer.maker, self.trainer.state.global_step
        at = (0, *place, trainer.args.data_rank * len(rows))
        if not trainer.windows.ahead:
            self._ahead.later(place, lambda: maker.rewarded(rows, at, version, trainer.state))
            return
        if version != self._published:
            maker.met(self._ahead.settle)
            began = time.monotonic()
            maker.met(lambda: maker.publish(version))
            self._published, self._publishing = version, time.monotonic() - began
        self._beside = beside = self._beside or BesideTraining(maker)
        state = copy.copy(trainer.state)
        self._ahead.ask(place, lambda: beside.write(rows, at, version), lambda made: beside.reward(made, state))

    def own_rows(self, batch: RaggedBatch) -> int:
        each = self.trainer.learning.completions
        return own_rows(self.trainer.accelerator, batch.rows * each) // each

    @property
    def _sharing(self) -> bool:
        return getattr(self.trainer.training_run.own_collator, "sharing", True)

    def _logged(self, made: Made) -> Made:
        self._log(made)
        self.trainer.completions_log.take_in(made, self.trainer.rewards.names)
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
        if self.trainer.windows.ahead:
            self.trainer.maker.met(self._ahead.settle)  # whoever writes is about to get other weights
            self._published = None
        self._evaluating, self._eval_rows, self._evaluated = Totals(), 0, []
        self._eval_completions = _completions_of(loader)
        self.trainer.maker.evaluates = True
        try:
            yield
        finally:
            self._evaluating, self.trainer.maker.evaluates, self.trainer.maker.reported = None, False, None

    def end(self) -> None:
        self._ahead.end()
        self._published = None

    def written(self, rows: Sequence[Mapping[str, Any]]) -> RaggedBatch:
        """The completions of rows to evaluate on, rewarded."""
        trainer, args, step = self.trainer, self.trainer.options, self.trainer.state.global_step
        at = (1, step, self._eval_rows + trainer.args.data_rank * len(rows))
        left = self._eval_completions - self._eval_rows
        trainer.maker.reported = left if self._evaluating is not None and left > 0 else None
        group = args.generations_eval
        made = self._logged(trainer.maker.make(rows, at, group=group, version=step, state=trainer.state))
        self._eval_rows += len(rows) * args.data_ranks
        chosen = range(len(made.rollout) // trainer.learning.completions)
        batch = trainer.learning.batch(made.rollout, chosen, sharing=self._sharing)
        taught = trainer.learning.taught(made.rollout, chosen, sharing=self._sharing)
        batch = with_teacher(trainer.runner, batch, [taught], trainer.asked)
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
        """Writes the window that this rank is in the middle of, and waits for those that were asked for."""
        place = self.trainer.row_order.place
        if self._window is not None and place[1] % self.trainer.windows.repeats:
            folder.mkdir(parents=True, exist_ok=True)  # the first rank's may be on another disk
            self._window.rollout.save(self._file(folder), place=list(place))
        if self.trainer.replay is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.trainer.replay.save(self._file(folder, name=REPLAY))
        for at, made in self._ahead.kept().items():
            if isinstance(made, Made):
                folder.mkdir(parents=True, exist_ok=True)
                made.save(self._file(folder, at), place=at, texts=self.trainer.options.log_completions)
            else:
                logger.warning(
                    f"a window that was asked for is not in the checkpoint, and is to be written anew: {made}"
                )

    def load(self, folder: Path) -> None:
        """Reads the windows, which the first batch needs before random states are put back."""
        reader = self.trainer.training_run.reader
        if self._file(folder).exists():
            rollout, _ = Rollout.load(self._file(folder), reader)
            self._window = Made(rollout)
        if self.trainer.replay is not None:
            self.trainer.replay.load(self._file(folder, name=REPLAY))
        if not self.trainer.windows.ahead:
            return
        found = [Made.load(each, reader) for each in folder.glob(self._file(folder, ("*", "*")).name)]
        everywhere = set.intersection(*map(set, objects_of_all_ranks([at for _, at in found])))
        for made, at in found:
            if at in everywhere:
                self._ahead.put(at, made)

    def _file(self, folder: Path, asked: Sequence[Any] = (), *, name: str = ROLLOUT) -> Path:
        """Of the window that this rank is in the middle of, or of one that was asked for; or of another name."""
        rank = "_".join(map(str, (self.trainer.args.process_index, *asked)))
        return folder / name.format(rank=rank)


def _completions_of(loader: DataLoader) -> int:
    """Completions that an evaluation has, without those that fill up its last batch; 0 of a stream, where that is not
    known before."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, PromptSampler):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return 0 if sampler is None else len(sampler)
