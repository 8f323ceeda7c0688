"""A rich progress bar for training and evaluation, in place of the Trainer's own; in a file a line for each log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from transformers import ProgressCallback, TrainerCallback

from lowtide.memory.allocators.measure import bytes_text
from lowtide.terminal import Console
from lowtide.trainers.reports.memory_log import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import Trainer


class Bars(Progress):
    """Progress bars, with a line of the last metrics beneath."""

    told = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.told:
            yield Text(f"  {self.told}")


class RichProgress(TrainerCallback):
    """Steps done, time left, and the last metrics: a bar on a terminal, a line for each log elsewhere."""

    SHOWN: ClassVar = {
        "loss": "loss",
        "eval_loss": "eval loss",
        "reward": "reward",
        "rewards/accuracies": "preferred",
        "accuracy": "accuracy",
        "mean_token_accuracy": "accuracy",
        "learning_rate": "lr",
    }

    def __init__(self) -> None:
        self.bar: Bars | None = None
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
            console = Console(stderr=True)
            if not (console.is_terminal or console.is_jupyter):
                return
            self.bar = Bars(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
                transient=False,
            )
            self.bar.start()
        if name not in self.tasks:
            self.tasks[name] = self.bar.add_task(name, total=total)
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
        told = ", ".join(self._told(logs or {}))
        if not told or not state.is_world_process_zero:
            return
        if self.bar is not None:
            self.bar.told = told
        else:
            print(f"step {state.global_step}/{state.max_steps}: {told}{self._left(state)}", file=sys.stderr, flush=True)

    def _told(self, logs: Mapping[str, Any]) -> Iterable[str]:
        """The metrics of a log that a user watches, in words."""
        for name, word in self.SHOWN.items():
            if isinstance(logs.get(name), float):
                yield f"{word} {logs[name]:.4g}"
        if "tokens_per_second" in logs:
            yield f"{logs['tokens_per_second']:,.0f} tokens/s"
        if "memory/peak" in logs:
            yield f"peak {bytes_text(logs['memory/peak'] * GIB)}"

    def _left(self, state: Any) -> str:
        """How long the rest of the steps takes, at the pace so far."""
        steps, seconds = state.global_step - self.begun[0], time.perf_counter() - self.begun[1]
        rest = state.max_steps - state.global_step
        return f", {timedelta(seconds=round(seconds / steps * rest))} left" if steps > 0 and rest > 0 else ""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        self.bar, self.tasks = None, {}
