"""What a run logs of its steps: their metrics, under TRL's names, and its memory."""

from __future__ import annotations

import logging
from typing import Any

from lowtide.step.metrics import Totals
from lowtide.step.phases import HighWater
from lowtide.trainers.reports.memory_log import MemoryLog, Prediction

logger = logging.getLogger(__name__)


class RunLog:
    """Adds to the logs of a trainer what its steps left since the last log.

    Attributes:
        mark: the peak so far, and the phase it fell in.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.mark = HighWater(trainer.args.device)
        self._memory = MemoryLog(self.mark)
        self._tokens_seen, self._has_logged = 0.0, False
        trainer.phases.listeners.append(self.mark)

    def completed(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Logs with the metrics since the last; a run's summary has those of steps not logged yet."""
        if "train_runtime" in logs:
            return {**logs, **self._unlogged()}  # what `train` returns stays as it is
        if "loss" in logs:
            logs.update(self._unlogged())
            logs.update(self._memory.metrics(self._prediction))
            self._warn_of_no_gradient(logs.get("grad_norm"))
        return logs

    def _warn_of_no_gradient(self, norm: float | None) -> None:
        """Says at the first log that the gradient is 0, as of dead layers or inputs that reach no weight. Where a
        policy writes, rewards that are all equal have none, which its metrics say."""
        trainer, first, self._has_logged = self.trainer, not self._has_logged, True
        writes = getattr(trainer, "rewards", None) is not None
        if first and norm == 0 and not writes and trainer.args.process_index == 0:
            logger.warning(
                f"the gradient of step {trainer.state.global_step} is exactly 0, so that it moves no weight: look at "
                "the weights that were loaded, the labels, and the options of the loss and the adapters"
            )

    @property
    def tokens(self) -> float:
        """Tokens that the run has seen, those of steps not logged yet included; asked of all ranks together."""
        return self._tokens_seen + self.trainer.runner.totals.read(self.trainer.args.device).get("tokens", 0)

    def go_on(self, tokens: float) -> None:
        """Goes on from a run that had seen so many tokens."""
        self.trainer.runner.totals, self._tokens_seen = Totals(), tokens

    def _unlogged(self) -> dict[str, float]:
        """The metrics of the steps since the last log, of all ranks together; none if there was no step."""
        runner = self.trainer.runner
        sums = runner.totals.read(self.trainer.args.device)
        runner.totals = Totals()
        self._tokens_seen += sums.get("tokens", 0)
        return {**self.trainer.metrics_of(sums), "num_tokens": self._tokens_seen} if sums else {}

    @property
    def _prediction(self) -> Prediction | None:
        """Of the peak: the estimate where one was made, else what was rehearsed."""
        trainer = self.trainer
        if trainer.predicted_bytes is not None:
            return Prediction.estimated(trainer.predicted_bytes, trainer.args.device.type)
        return None if trainer.rehearsed_bytes is None else Prediction.rehearsed(trainer.rehearsed_bytes)
