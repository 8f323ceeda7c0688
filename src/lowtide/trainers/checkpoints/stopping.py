"""What a run does when it is told to stop: on Ctrl-C it ends at once, on SIGTERM after a checkpoint. Both name the
checkpoint and what resumes from it. So does an error; what fails between two steps, as a user's `compute_metrics` may,
loses none of them: a checkpoint is written first.

SIGTERM is what SLURM, Kubernetes and `kill` send before they kill. The step that runs is finished, on all ranks the
same one, a checkpoint is written, and the process ends with status 143. If that takes longer than `stop_grace` seconds,
the process ends at once, and the last checkpoint is the one before.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from lowtide.ranks.world import worst_of_ranks
from lowtide.trainers.checkpoints.output_folder import checkpoints_of
from lowtide.trainers.checkpoints.signals import TOGETHER, Stopped, StopRequest

TERMINATES = 2
"""What a rank that has SIGTERM says to the others; one with Ctrl-C says 1."""

logger = logging.getLogger(__name__)


class Interrupted(KeyboardInterrupt):
    """Training was interrupted; says where, and what resumes it."""


class EvaluationLeft(Exception):
    """Leaves an evaluation that nobody waits for any more."""


class Stopping:
    """Has a trainer write a checkpoint when it is told to stop, and end.

    Attributes:
        saved_step: of the checkpoint that this training wrote last.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.saved_step: int | None = None
        self._began_to_save: int | None = None
        self._request: StopRequest | None = None
        self._terminated = False
        """Whether it was SIGTERM that told a rank to stop."""
        self._evaluates = False
        """Whether an evaluation has begun since the last step."""

    @contextlib.contextmanager
    def during_training(self) -> Iterator[None]:
        """Around the training.

        Raises:
            Interrupted: Ctrl-C; a `KeyboardInterrupt`.
            Stopped: SIGTERM; a `SystemExit`.
        """
        theirs = getattr(self.args, "enable_jit_checkpoint", False)  # transformers' own handler
        grace = 0.0 if theirs else self.args.stop_grace
        together = TOGETHER if self.args.world_size > 1 else 0.0
        self._request = StopRequest(
            grace, self._say_request, self._say_deadline, interrupts=self._saves, together=together
        )
        self.saved_step = self._began_to_save = None
        try:
            with self._request.received():
                yield
                if self._any_rank_stops():  # in the last moments
                    raise self._stopped()
        except Interrupted:
            raise
        except KeyboardInterrupt as error:
            raise Interrupted(f"interrupted in step {self._step + 1}. {self._way_back()}") from error
        except Exception as error:
            if self.trainer.last_checkpoint:
                error.add_note(self._way_back())
            raise
        finally:
            self._request = None

    def after_step(self, theirs: Callable[[], None], save: Callable[[], None]) -> None:
        """What the Trainer does after each step and epoch; then ends, if a rank was told to stop.

        Args:
            theirs: logs, evaluates and saves.
            save: writes a checkpoint.
        """
        control, stops = self.trainer.control, self._any_rank_stops()
        if stops:
            control.should_evaluate = False
            control.should_save = self._saves and self.saved_step != self._step
        slow = control.should_evaluate or control.should_save
        self._evaluates = False
        try:
            theirs()
            late = not stops and slow and self._any_rank_stops()  # while it evaluated, or wrote a checkpoint
        except EvaluationLeft:
            late = self._any_rank_stops()
        except Exception:
            if self._evaluates:
                self._save_before_end(save)
            raise
        if late and self._saves and self.saved_step != self._step:
            save()
        if stops or late:
            raise self._stopped()

    @contextlib.contextmanager
    def between_steps(self, save: Callable[[], None]) -> Iterator[None]:
        """Around what is read, or written, for the next step; where it fails, no step is lost."""
        try:
            yield
        except Exception:
            last = Path(str(self.trainer.last_checkpoint or ""))
            if self._step and last.name != f"checkpoint-{self._step}":
                self._save_before_end(save)
            raise

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around the writing of a checkpoint."""
        self._began_to_save = self._step
        yield
        self.saved_step = self._step

    def _save_before_end(self, save: Callable[[], None]) -> None:
        """Writes the checkpoint of a step after which something failed, and leaves all others; not where there are
        ranks, of which others may be elsewhere."""
        saved = self._began_to_save == self._step
        if not self._saves or saved or self.args.world_size > 1:
            return
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            save()
        except Exception as error:
            logger.warning(f"no checkpoint of step {self._step} could be written: {error}")
        finally:
            self.args.save_total_limit = limit

    def leave_evaluation(self) -> None:
        """Between two batches of an evaluation; where there are ranks, it is finished first, since these meet after it.

        Raises:
            EvaluationLeft: the run was told to stop.
        """
        self._evaluates = True
        if self._request is not None and self._request.requested and self.args.world_size == 1:
            raise EvaluationLeft

    @property
    def _step(self) -> int:
        return self.trainer.state.global_step

    @property
    def _saves(self) -> bool:
        return self.args.save_strategy != "no"

    def _any_rank_stops(self) -> bool:
        """Whether a rank was told to stop; all ranks ask at the same place."""
        request = self._request
        told = 0 if request is None else TERMINATES if request.terminated else request.requested
        worst = worst_of_ranks(told, self.args.device)
        self._terminated = worst == TERMINATES
        return worst > 0

    def resumes_with(self, checkpoint: str) -> str:
        """What a user types to resume from a checkpoint, for messages."""
        return f"trainer.train(resume_from_checkpoint={checkpoint!r})"

    # -- what is said ------------------------------------------------------------------------------------------------

    def _stopped(self) -> Stopped | Interrupted:
        if not self._terminated:
            return Interrupted(f"interrupted after step {self._step}. {self._way_back()}")
        message = f"stopped by SIGTERM after step {self._step}. {self._way_back()}"
        self._say(message)
        return Stopped(message)

    def _way_back(self) -> str:
        """The last checkpoint and what resumes from it."""
        last = self.trainer.last_checkpoint or next(iter(checkpoints_of(Path(str(self.args.output_dir)))), None)
        if last is None:
            return "There is no checkpoint to resume from" + ("" if self._saves else ": save_strategy is 'no'")
        without = " (with resume_without_states=True, since save_only_model=True)" if self.args.save_only_model else ""
        return f"The last checkpoint is {last}; this resumes{without}: {self.resumes_with(str(last))}"

    def _say_request(self) -> None:
        request = cast(StopRequest, self._request)
        if not request.terminated:
            self._say(
                "Ctrl-C: this step is finished, and then a checkpoint is written; Ctrl-C again quits at once. "
                f"{self._way_back()}"
            )
            return
        grace = request.grace
        then = (
            "and then a checkpoint is written" if self._saves else "and no checkpoint is written (save_strategy='no')"
        )
        self._say(f"SIGTERM: this step is finished, {then}, within {grace:g} s (stop_grace). {self._way_back()}")

    def _say_deadline(self) -> None:
        grace = cast(StopRequest, self._request).grace
        self._say(f"stopped: no checkpoint could be written in {grace:g} s (stop_grace). {self._way_back()}")

    def _say(self, message: str) -> None:
        if self.args.process_index == 0:
            print(f"lowtide: {message}", file=sys.stderr, flush=True)
