"""A checkpoint appears whole or not at all, on all ranks; and what is in it that transformers knows nothing of."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from lowtide.memory.low_rank import loading_projectors
from lowtide.memory.narrow_step import unwrap_optimizer
from lowtide.planner.phases import Phases
from lowtide.watch import worst_of_ranks

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""How a full disk shows: in Python, in torch.save, in safetensors."""

RUN_STATE = "run_state.json"
"""The file of a checkpoint for what a run carries from step to step, and transformers knows nothing of."""


def saved_run_state(checkpoint: str | None) -> dict[str, Any]:
    """What `run_state` gave when a checkpoint was written; empty where there is none, or it was written without."""
    path = None if checkpoint is None else Path(checkpoint, RUN_STATE)
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


class WholeCheckpoints(Trainer):
    """`transformers.Trainer` that writes a checkpoint beside, then renames it: a full disk or a kill leaves the
    checkpoints before it whole."""

    phases: Phases
    optimizer: Any
    _unwritten: list[Exception] | None = None
    """Why the model of a checkpoint could not be written, while one is."""

    def run_state(self) -> dict[str, Any]:
        """What steps leave behind beside weights, optimizer and random state; asked of all ranks together."""
        raise NotImplementedError

    def set_run_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `run_state` gave."""
        raise NotImplementedError

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        run = Path(self._get_output_dir(trial=trial))
        staging = run / ".saving"
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        error = self._written_to(staging, run, model, trial)
        if worst_of_ranks(error is not None, self.args.device):
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)
            raise ValueError(
                f"step {self.state.global_step}: the checkpoint could not be written to {run}: "
                f"{error or 'another rank says why'}. Checkpoints before it are whole; make room, or set "
                "`save_total_limit`, and resume from the last one"
            ) from error
        if self.args.should_save:
            shutil.rmtree(run / folder, ignore_errors=True)
            os.replace(staging / folder, run / folder)
            shutil.rmtree(staging, ignore_errors=True)
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(run / folder))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()

    def _written_to(self, staging: Path, run: Path, model: nn.Module, trial: Any) -> Exception | None:
        """The Trainer's checkpoint, in a folder beside; returns why this rank could not write it."""
        errors = self._unwritten = []
        try:
            with self.phases.during("saving"), self._output_dir_is(str(staging)):
                super()._save_checkpoint(model, trial)
                self._name_best(staging, run)
        except WRITE_ERRORS as error:
            errors.append(error)
        finally:
            self._unwritten = None
        return errors[0] if errors else None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Not yet: what is pushed is read in the background, and the folder is about to get another name."""

    def _name_best(self, staging: Path, run: Path) -> None:
        """The best checkpoint, if it is the one that is written, is known by the name that it is about to get."""
        best = Path(self.state.best_model_checkpoint or "")
        if best.parent == staging:
            self.state.best_model_checkpoint = str(run / best.name)
            if self.args.should_save:
                self.state.save_to_json(str(best / TRAINER_STATE_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self.run_state()
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            Path(output_dir, RUN_STATE).write_text(json.dumps(state))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with loading_projectors(unwrap_optimizer(self.optimizer)):
            super()._load_optimizer_and_scheduler(checkpoint)
        if state := saved_run_state(checkpoint):
            self.set_run_state(state)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; what could not be written is said of the folder that it was meant for.

        Raises:
            ValueError: it could not be written; while a checkpoint is, ranks meet first.
        """
        try:
            super().save_model(output_dir, _internal_call)
        except WRITE_ERRORS as error:
            if self._unwritten is not None:
                self._unwritten.append(error)
                return
            folder = output_dir or self.args.output_dir
            raise ValueError(f"the model could not be written to {folder}: {error}. Checkpoints are whole") from error

    @contextlib.contextmanager
    def _output_dir_is(self, folder: str) -> Iterator[None]:
        self._get_output_dir = lambda trial: folder  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._get_output_dir
