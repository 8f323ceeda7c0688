"""What a run logs of its steps: their metrics, under TRL's names, and its memory."""

from __future__ import annotations

import logging
import re
from typing import Any

from lowtide.step.metrics import Totals
from lowtide.step.phases import HighWater, TrainingTime
from lowtide.trainers.reports.memory_log import MemoryLog, Prediction

logger = logging.getLogger(__name__)

FLAT = "frac_reward_zero_std"
"""The metric of the share of groups whose completions are rewarded alike."""
MOST_NAMED = 4
"""Kinds of weights that a warning names."""


class RunLog:
    """Adds to the logs of a trainer what its steps left since the last log.

    Attributes:
        mark: the peak so far, and the phase it fell in.
        time: what the steps of this training took so far.
        tokens_trained: of the steps of this training that are logged, those of all ranks.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.mark = HighWater(trainer.args.device)
        self._memory = MemoryLog(self.mark)
        self.time = TrainingTime()
        self.tokens_trained = 0.0
        self._tokens_seen, self._has_logged, self._seconds_logged = 0.0, False, 0.0
        trainer.phases.listeners += [self.mark, self.time]

    def begin(self) -> None:
        """The first step begins now, so that tokens are counted against the time from here on."""
        self.time.restart()
        self.tokens_trained = self._seconds_logged = 0.0

    def completed(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Logs with the metrics since the last; a run's summary has those of steps not logged yet."""
        if "train_runtime" in logs:
            logs = {**logs, **self._unlogged()}  # what `train` returns stays as it is
        elif "loss" in logs:
            before = self.tokens_trained
            logs.update(self._unlogged())
            logs.update(self._speed(self.tokens_trained - before))
            logs.update(self._memory.metrics(self.prediction))
        else:
            return logs
        if not self._has_logged and self.trainer.args.process_index == 0:
            self._warn_of_no_gradient(logs)
        self._has_logged = True
        return logs

    def _warn_of_no_gradient(self, logs: dict[str, Any]) -> None:
        """Says, with the first logs, that weights have no gradient, as of layers that the forward leaves out, or that
        all of it is 0, as of dead layers or inputs that reach no weight, or, where a policy writes, of rewards that are
        all equal."""
        trainer = self.trainer
        if names := trainer.runner.not_reached:
            kinds = list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names))
            logger.warning(
                f"{len(names):,} trained weights had no gradient in the first step and stay as they are: "
                f"{', '.join(kinds[:MOST_NAMED])}{', ...' if len(kinds) > MOST_NAMED else ''}. A later step may reach "
                "experts that no token went to, and a vision tower that saw no image; freeze the others, or look at "
                "why the loss does not depend on them"
            )
        writes = getattr(trainer, "rewards", None) is not None
        if logs.get(FLAT) == 1:
            logger.warning(
                f"until step {trainer.state.global_step} all completions of each prompt were rewarded alike "
                f"({FLAT}=1), and nothing is learned of such rewards: look at the reward functions, raise "
                "num_generations or the temperature, or take other prompts"
            )
        if logs.get("grad_norm") == 0 and not writes:
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
        self.tokens_trained += sums.get("tokens", 0)
        return {**self.trainer.metrics_of(sums), "num_tokens": self._tokens_seen} if sums else {}

    def _speed(self, tokens: float) -> dict[str, float]:
        """`tokens_per_second` of all ranks since the last log, evaluations and saving left out."""
        seconds = self.time.seconds
        passed, self._seconds_logged = seconds - self._seconds_logged, seconds
        return {"tokens_per_second": tokens / passed} if tokens and passed > 0 else {}

    @property
    def prediction(self) -> Prediction | None:
        """Of the peak: the estimate where one was made, else what was rehearsed."""
        trainer = self.trainer
        if trainer.predicted_bytes is not None:
            return Prediction.estimated(trainer.predicted_bytes, trainer.args.device.type)
        return None if trainer.rehearsed_bytes is None else Prediction.rehearsed(trainer.rehearsed_bytes)
