"""A checkpoint appears whole or not at all, on all ranks: it is written in a folder beside, sealed by a manifest,
flushed to the disk and renamed. A full disk, a kill or a loss of power leaves the checkpoints before it whole."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lowtide.compat.transformers import no_checkpoints_deleted
from lowtide.engine.forward import causal_model
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.engine.weights.sharded.shard_files import OF_A_MODEL, missing_shards, shards_in, write_shard
from lowtide.memory.optimizers.narrow_step import unwrap_optimizer
from lowtide.own_files import check_no_links, make_marked, remove_marked, separate_hard_links, share_weights
from lowtide.parsing import parse_json
from lowtide.ranks.failures import is_left_by_another
from lowtide.ranks.shards import is_sharded
from lowtide.ranks.world import worst_of_ranks
from lowtide.trainers.checkpoints.beside import save_beside
from lowtide.trainers.checkpoints.durable import flush
from lowtide.trainers.checkpoints.manifest import MANIFEST, read_manifest, seal
from lowtide.trainers.checkpoints.output_folder import STAGING
from lowtide.trainers.checkpoints.rotating import is_written, keep_best, rotate
from lowtide.trainers.checkpoints.run_record import run_record
from lowtide.trainers.checkpoints.shards import own_shard, save_optimizer_shard, states_are_cut, whole_state
from lowtide.trainers.checkpoints.soundness import RUN_STATE, SCHEDULER
from lowtide.trainers.checkpoints.write_errors import WRITE_ERRORS, bytes_of, space, write_reason

Write = Callable[[str, dict[str, Tensor]], None]
"""Writes weights into a folder."""

logger = logging.getLogger(__name__)


def saved_run_state(checkpoint: str | None) -> dict[str, Any]:
    """What `run_state` gave when a checkpoint was written; empty where there is none, or it was written without."""
    path = None if checkpoint is None else Path(checkpoint, RUN_STATE)
    return parse_json(path.read_text()) if path is not None and path.exists() else {}


class WholeCheckpoints:
    """Writes the checkpoints of a trainer beside, then renames them. What the Trainer writes comes as functions.

    Attributes:
        last: the checkpoint that this run wrote last, or resumed from.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.last: str | None = None
        self._unwritten: list[Exception] | None = None
        """Why the model of a checkpoint could not be written, while one is."""

    def save(self, run: Path, write: Callable[[str], None], push: Callable[[str], None]) -> None:
        """Writes a checkpoint.

        Args:
            run: the folder of checkpoints.
            write: the Trainer's, into such a folder.
            push: the Trainer's, of a checkpoint that is written.

        Raises:
            ValueError: this rank or another could not write; says why, and how much room there is.
        """
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.trainer.state.global_step}"
        staging = run / STAGING
        main = self.args.should_save
        try:
            self._together(staging, lambda: make_marked(staging) if main else None)
            self._together(staging, lambda: self._write_to(staging, run, write))
            self._together(staging, lambda: _publish(staging, run, name) if main else None)
        except BaseException:
            if main:
                _remove_unfinished(staging)
            raise
        self.last = str(run / name)
        if self.args.push_to_hub:
            push(self.last)
        if main:
            rotate(run, self.args.save_total_limit, self.trainer.state.best_model_checkpoint)
        self.trainer.accelerator.wait_for_everyone()

    def _together(self, staging: Path, part: Callable[[], object]) -> None:
        """One part of writing a checkpoint, after which ranks meet.

        Raises:
            ValueError: this rank or another could not write; says why, and how much room there is.
        """
        reason, failure = "another rank says why", None
        try:
            part()
        except WRITE_ERRORS as error:
            if is_left_by_another(error):
                raise
            reason, failure = write_reason(error, staging), error
        if not worst_of_ranks(failure is not None, self.args.device):
            return
        run = staging.parent
        if self.args.should_save:
            _remove_unfinished(staging)
        last, step = f" ({self.last})" if self.last else "", self.trainer.state.global_step
        raise ValueError(
            f"step {step}: the checkpoint could not be written to {run}: {reason}. Checkpoints "
            f"before it are whole{last}. {space(run, self._checkpoint_bytes())}: make room, or set `save_total_limit`, "
            "and resume from the last one"
        ) from failure

    def _checkpoint_bytes(self) -> int:
        """About the size of a checkpoint: the weights that it holds, and the optimizer's states."""
        adapters = hasattr(self.trainer.model, "peft_config")
        saved = [p for p in self.trainer.model.parameters() if p.requires_grad or not adapters]
        states = () if self.args.save_only_model else unwrap_optimizer(self.trainer.optimizer).state.values()
        return bytes_of([*saved, *states])

    def _write_to(self, staging: Path, run: Path, write: Callable[[str], None]) -> None:
        """The Trainer's checkpoint in a folder beside, and what transformers knows nothing of."""
        errors = self._unwritten = []
        state = self.trainer.run_state()
        try:
            with self.trainer.phases.during("saving"):
                write(str(staging))
            self._name_best(staging, run)
            if self.args.should_save:
                folder = staging / f"{PREFIX_CHECKPOINT_DIR}-{self.trainer.state.global_step}"
                (folder / RUN_STATE).write_text(json.dumps({**state, "run": run_record(self.trainer)}))
        except WRITE_ERRORS as error:
            # else it follows from the model that could not be written, and that says why
            if not errors or is_left_by_another(error):
                raise
        finally:
            self._unwritten = None
        if errors:
            raise errors[0]

    def end(self, run: Path, theirs: Callable[[], Any]) -> Any:
        """The Trainer's end of training, which with `save_total_limit=1` leaves the best checkpoint alone."""
        with no_checkpoints_deleted():
            ended = theirs()
        best = self.trainer.state.best_model_checkpoint
        if self.args.should_save and best is not None and self.args.save_total_limit == 1:
            keep_best(run, Path(best))
        return ended

    def _name_best(self, staging: Path, run: Path) -> None:
        """The best checkpoint, if it is the one that is written, is known by the name that it is about to get."""
        best = Path(self.trainer.state.best_model_checkpoint or "")
        if best.parent == staging:
            self.trainer.state.best_model_checkpoint = str(run / best.name)
            if self.args.should_save:
                separate_hard_links(best)
                self.trainer.state.save_to_json(str(best / TRAINER_STATE_NAME))

    def save_model(self, output_dir: str | None, internal: bool, theirs: Callable[[], None], write: Write) -> None:
        """Writes the model; what could not be written is said of the folder that it was meant for.

        Args:
            internal: whether it is a part of a checkpoint.
            theirs: the Trainer's of a model that is whole on each rank.
            write: the Trainer's of weights that are handed to it.

        Raises:
            ValueError: it could not be written; while a checkpoint is, ranks meet first.
        """
        folder = Path(output_dir or str(self.args.output_dir))
        try:
            check_no_links(folder)
            if self.args.should_save:
                separate_hard_links(folder)
            self._save_whole(folder, internal, theirs, write)
            if self.args.should_save:
                self.trainer.card.write_beside(folder)
            share_weights(folder)
        except WRITE_ERRORS as error:
            if is_left_by_another(error):
                raise
            if self._unwritten is not None:
                self._unwritten.append(error)
                return
            reason = write_reason(error, folder)
            raise ValueError(
                f"the model could not be written to {folder}: {reason}. Checkpoints are whole. Make room, and resume "
                "from the last one: it trains nothing that is trained already, and writes the model"
            ) from error

    def _save_whole(self, folder: Path, internal: bool, theirs: Callable[[], None], write: Write) -> None:
        trainer = self.trainer
        model: nn.Module = trainer.model
        stage = stage_of(causal_model(model))
        save_beside(model, folder, keep=self.args.should_save)
        if not is_sharded(model) and stage is None:
            theirs()
            return
        if not self.args.sharding.gather_on_save and not hasattr(model, "peft_config"):
            self._save_shards(folder, internal, write)
            return
        weights = whole_state(model, keep=self.args.should_save)
        try:
            trainer.model = model if stage is None else stage.whole
            if self.args.should_save:
                write(str(folder), weights)
        finally:
            trainer.model = model
        if self.args.push_to_hub and not internal:
            trainer.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_shards(self, folder: Path, internal: bool, write: Write) -> None:
        """Each rank's part of the weights, and from the first what else belongs to a model."""
        failure = None
        name, rows = own_shard(self.trainer.model)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.args.should_save:
                write(str(folder), {})
                ranks = name.rpartition("-of-")[2]
                others = (path for path in shards_in(folder) if not path.name.endswith(f"-of-{ranks}"))
                whole = (path for path in folder.iterdir() if OF_A_MODEL.fullmatch(path.name))
                for path in (*whole, *others):
                    path.unlink()  # the file of no weights, and what an earlier run left
            if rows:
                write_shard(folder / name, rows)
        except WRITE_ERRORS as error:
            failure = error
        if worst_of_ranks(failure is not None, self.args.device):
            raise failure or OSError("another rank could not write its part, and says why")
        if self.args.should_save and not internal:
            logger.warning(
                f"{folder} holds the model in a file for each rank: `lowtide merge --checkpoint {folder} --output_dir "
                "NEW` makes one model of them"
            )

    def save_states(self, folder: Path, theirs: Callable[[], None]) -> None:
        """Writes the states of optimizer and schedule."""
        model, optimizer = self.trainer.model, self.trainer.optimizer
        if not states_are_cut(model, optimizer):
            theirs()
            return
        stage = stage_of(causal_model(model))
        if stage is None or self.args.data_rank == 0:
            save_optimizer_shard(optimizer, folder)
        if self.args.should_save:
            torch.save(self.trainer.lr_scheduler.state_dict(), folder / SCHEDULER)


def _remove_unfinished(staging: Path) -> None:
    """Removes what was written of a checkpoint; what no run wrote stays."""
    with contextlib.suppress(FileExistsError):
        remove_marked(staging)


def _publish(staging: Path, run: Path, name: str) -> None:
    """Gives a checkpoint that is written its name; one of the same step is put aside first, and then removed.

    What no run wrote, and lies under that name, keeps a name beside it.
    """
    if missing := missing_shards(staging / name):
        raise OSError(f"{missing[0]}, which another rank wrote, is not there: all ranks need one output_dir")
    seal(staging / name)
    if os.path.lexists(run / name):
        kept = _free_name(run / f"earlier-{name}") if _has_strangers(run / name) else staging / f"earlier-{name}"
        os.replace(run / name, kept)
        if kept.parent == run:
            logger.warning(f"{run / name} held files that no run wrote: it is {kept} now")
    os.replace(staging / name, run / name)
    flush(run)
    remove_marked(staging)


def _has_strangers(folder: Path) -> bool:
    """Whether there are files in a checkpoint's place that no run wrote; a link is replaced, and its target stays."""
    if folder.is_symlink():
        return False
    if not folder.is_dir() or not is_written(folder):
        return not folder.is_dir() or any(folder.iterdir())
    try:
        known = {*(read_manifest(folder) or {}), MANIFEST}
    except ValueError:
        return True
    return any(path.relative_to(folder).as_posix() not in known for path in folder.rglob("*") if not path.is_dir())


def _free_name(path: Path) -> Path:
    """This path, or the first that is free with a number behind it."""
    names = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(each for each in names if not os.path.lexists(each))
