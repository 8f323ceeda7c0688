"""A rich progress bar for training and evaluation, in place of the Trainer's own; in a file a line for each log."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import ProgressCallback, TrainerCallback

from lowtide.terminal import Console

if TYPE_CHECKING:
    from transformers import Trainer


class RichProgress(TrainerCallback):
    """Steps done, time left, and the last metrics beside the bar."""

    SHOWN: ClassVar = {
        "loss": "loss",
        "eval_loss": "eval loss",
        "rewards/accuracies": "preferred",
        "accuracy": "accuracy",
        "mean_token_accuracy": "accuracy",
    }

    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.tasks: dict[str, TaskID] = {}
        self.begun = (0, time.perf_counter())
        """The step at which training began, and when."""

    @classmethod
    def replace_in(cls, trainer: Trainer) -> None:
        """Takes the place of the Trainer's default progress bar, if that is there, unless one of ours is."""
        replaced = trainer.pop_callback(ProgressCallback) is not None
        if replaced and not any(isinstance(each, cls) for each in trainer.callback_handler.callbacks):
            trainer.add_callback(cls())

    def _advance(self, name: str, total: int | None, completed: int | None = None) -> None:
        if self.bar is None:
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[metrics]}"),
                console=Console(stderr=True),
                transient=False,
            )
            self.bar.start()
        if name not in self.tasks:
            self.tasks[name] = self.bar.add_task(name, total=total, metrics="")
        if completed is None:
            self.bar.advance(self.tasks[name])
        else:
            self.bar.update(self.tasks[name], completed=completed)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = state.global_step, time.perf_counter()
        if state.is_world_process_zero:
            self._advance("training", state.max_steps, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._advance("training", state.max_steps, state.global_step)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            total = len(eval_dataloader) if hasattr(eval_dataloader, "__len__") else None
            self._advance("evaluating", total)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None and "evaluating" in self.tasks:
            self.bar.remove_task(self.tasks.pop("evaluating"))
            if "training" not in self.tasks:
                self._close()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.on_evaluate(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and state.is_world_process_zero and not Console(stderr=True).is_terminal:
            self._say(state, logs)
        if self.bar is not None and "training" in self.tasks and logs:
            found = {word: logs[name] for name, word in self.SHOWN.items() if isinstance(logs.get(name), float)}
            shown = " ".join(f"{word} {value:.3g}" for word, value in found.items())
            if shown:
                self.bar.update(self.tasks["training"], metrics=shown)

    def _say(self, state: Any, logs: dict[str, Any]) -> None:
        """A line for each log where no bar can be drawn, as in a file."""
        names = {**self.SHOWN, "reward": "reward", "learning_rate": "learning rate"}
        found = {word: logs[name] for name, word in names.items() if isinstance(logs.get(name), float)}
        if not found:
            return
        now = time.perf_counter()
        steps, seconds = state.global_step - self.begun[0], now - self.begun[1]
        rest = round(seconds / steps * (state.max_steps - state.global_step)) if steps > 0 else None
        left = "" if rest is None else f", {timedelta(seconds=rest)} left"
        values = ", ".join(f"{word} {value:.4g}" for word, value in found.items())
        print(f"step {state.global_step}/{state.max_steps}: {values}{left}", file=sys.stderr, flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        self.bar, self.tasks = None, {}
