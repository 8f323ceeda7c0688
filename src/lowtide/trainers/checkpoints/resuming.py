"""A run that resumes goes on from all of a checkpoint, or says what it goes on without.

Before anything is loaded, the files of the checkpoint are checked (`soundness`), its weights are compared with the
model's (`weights`), and the run that wrote it with this one (`run_record`). The first rank does so for all.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from accelerate.utils import broadcast_object_list
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.experimental import implicit_replication

from lowtide.compat.deepspeed import is_partitioned, replaced_by_first_rank
from lowtide.compat.peft import same_weights_trained
from lowtide.engine.forward import causal_model
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.engine.weights.sharded.shard_files import shards_in
from lowtide.engine.weights.sharded.stages import with_weights_on
from lowtide.memory.optimizers.low_rank import loading_projectors
from lowtide.memory.optimizers.narrow_step import unwrap_optimizer
from lowtide.own_files import remove_marked
from lowtide.ranks.shards import is_sharded
from lowtide.trainers.checkpoints.beside import beside_adapters, load_beside
from lowtide.trainers.checkpoints.choosing import last_whole, named, said
from lowtide.trainers.checkpoints.lock import only_run_in
from lowtide.trainers.checkpoints.output_folder import STAGING
from lowtide.trainers.checkpoints.run_record import OF_METRICS, differences, run_record, scheduler_name, unfit_states
from lowtide.trainers.checkpoints.shards import (
    OfAnotherRun,
    load_optimizer_states,
    load_weights,
    optimizer_files,
    saved_weights,
    states_are_cut,
)
from lowtide.trainers.checkpoints.soundness import OPTIMIZER, OPTIMIZERS, RANDOM, SCHEDULER, Damage, damage, load_states
from lowtide.trainers.checkpoints.states import check_states
from lowtide.trainers.checkpoints.weights import check_weights, is_converted
from lowtide.trainers.checkpoints.whole import saved_run_state

T = TypeVar("T")
Load = Callable[[str, nn.Module | None], None]
"""Loads the weights of a checkpoint into a model, or into the trainer's."""
LOSSES = {
    OPTIMIZERS: "the optimizer starts without moments",
    SCHEDULER: "the learning rate takes its step of this run's schedule",
    RANDOM: "random numbers (dropout) are others than the run's that was stopped",
}
"""By state, what going on without it means."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumption:
    """What a run resumes from."""

    folder: str
    left_out: tuple[str, ...] = ()
    """Of `LOSSES`, the states that are not loaded."""
    notes: tuple[str, ...] = ()
    """What differs from the run that wrote the checkpoint, and which later checkpoints are not whole."""

    def __str__(self) -> str:
        without = f", without {', '.join(self.left_out)}" if self.left_out else ""
        return f"from {self.folder}{without}"


class Resuming:
    """Has the resumed run of a trainer be the run that was stopped, or say in what it is not. What the Trainer loads
    comes as functions `theirs`.

    Attributes:
        resumption: what this training resumes from.
        trained_nothing: whether the checkpoint is at the end of the run already.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.resumption: Resumption | None = None
        self.trained_nothing = False

    @contextlib.contextmanager
    def during_training(self, wanted: str | bool | None) -> Iterator[str | None]:
        """Around the training: one run at a time in an output folder. Gives the checkpoint, which is whole.

        Raises:
            ValueError: another process trains into the folder, or the checkpoint cannot be resumed from.
        """
        self.trained_nothing = False
        with contextlib.ExitStack() as stack:
            self.resumption = self._on_first_rank(lambda: self._begin(stack, wanted or None))
            yield None if self.resumption is None else self.resumption.folder

    def _begin(self, stack: contextlib.ExitStack, wanted: str | bool | None) -> Resumption | None:
        output = Path(str(self.args.output_dir))
        if self.args.save_strategy != "no":
            stack.enter_context(only_run_in(output))
            remove_marked(output / STAGING)  # what a killed run left
        if wanted is None:
            return None
        found = self._resumption(wanted, output)
        for note in found.notes:
            logger.warning(note)
        logger.info(f"resuming {found}")
        return found

    def _resumption(self, wanted: str | bool, output: Path) -> Resumption:
        """What to resume from, after everything about it is checked.

        Raises:
            ValueError: it cannot be resumed from, or not without losing states; says what to do.
        """
        without = bool(self.args.resume_without_states)
        if wanted is True:
            last = last_whole(output, without_states=without)
            if last is None:
                raise ValueError(f"resume_from_checkpoint=True: there is no checkpoint in {output}")
            chosen = last
        else:
            chosen = named(Path(str(wanted)), output, without_states=without)
        stage = stage_of(causal_model(self.trainer.model))
        check_weights(self.trainer.model if stage is None else stage.whole, chosen.folder)
        record = saved_run_state(str(chosen.folder)).get("run")
        lost, notes = dict(chosen.damaged) | _lacking(chosen.folder), []
        if record is not None:
            now = run_record(self.trainer)
            lost |= unfit_states(record, now)
            notes += [f"resuming from {chosen.folder}: {note}" for note in differences(record, now)]
        else:
            lost |= check_states(self.trainer, chosen.folder / OPTIMIZER) if not {*lost} & {OPTIMIZER} else {}
        left_out = tuple(name for name in LOSSES if any(Path(each).match(name) for each in lost))
        if lost and not without:
            raise ValueError(
                f"{chosen.folder} cannot be resumed from as it is: {said(lost)}. Resume from another checkpoint, or go "
                f"on without with resume_without_states=True: {_meaning(left_out)}"
            )
        if lost:
            notes.insert(0, f"resuming from {chosen.folder} without all states ({said(lost)}): {_meaning(left_out)}")
        passed_over = [f"passed over: {each}" for each in chosen.passed_over]
        return Resumption(str(chosen.folder), left_out, (*passed_over, *notes))

    def _on_first_rank(self, find: Callable[[], T]) -> T:
        """What the first rank finds, on all ranks; its error likewise."""
        found, error = None, None
        if self.args.process_index == 0:
            try:
                found = find()
            except (ValueError, OSError) as failure:
                error = failure
        told = [(found, None if error is None else str(error))]
        if self.args.world_size > 1:
            broadcast_object_list(told)
        found, text = told[0]
        if text is not None:
            raise error or ValueError(text)
        return cast(T, found)

    # -- what is loaded ----------------------------------------------------------------------------------------------

    def started_at(
        self, checkpoint: str | None, start: tuple[int, int], max_steps: int, num_train_epochs: int
    ) -> tuple[int, int]:
        """Where a resumed run starts; the Trainer trains on beyond the last step."""
        step = self.trainer.state.global_step
        if checkpoint is None or step < max_steps:
            return start
        self.trained_nothing = True
        if self.args.process_index == 0:
            logger.warning(
                f"{checkpoint} is of step {step}, and the run ends at step {max_steps}: nothing is left to train"
            )
        return num_train_epochs, 0

    def load_weights(self, checkpoint: str, model: nn.Module | None, theirs: Load) -> None:
        """The weights of a checkpoint; the Trainer loads nothing that has another name in checkpoints than in the
        model.

        Args:
            model: None for the trainer's.
        """
        own: Any = self.trainer.model if model is None else model
        if (stage := stage_of(causal_model(own))) is not None:
            whole = with_weights_on(stage.whole, "cpu")
            self.load_weights(checkpoint, whole, theirs)
            own.load_state_dict(
                {name: v for name, v in saved_weights(whole).items() if name in own.state_dict()}, False
            )
            return
        if shards := shards_in(Path(checkpoint)):
            load_weights(own, shards)
            return
        if any(is_partitioned(p) for p in own.parameters()):
            _load_partitioned(own, checkpoint, theirs)
            return
        sharded = is_sharded(own)
        with (
            implicit_replication() if sharded else contextlib.nullcontext()
        ):  # each rank copies its part of what the file holds
            if hasattr(own, "peft_config") or not is_converted(own):
                with contextlib.nullcontext() if sharded else same_weights_trained(own):
                    theirs(checkpoint, model)
                load_beside(own, Path(checkpoint))
                return
            kind: Any = next(each for each in type(own).__mro__ if not issubclass(each, FSDPModule))
            # Its attention never runs; that of a vision tower has a name that only a model that is there may have.
            how: dict[str, Any] = {"config": own.config, "dtype": own.dtype, "attn_implementation": "eager"}
            own.load_state_dict(kind.from_pretrained(checkpoint, **how).state_dict())

    def load_best(self, theirs: Callable[[], None], load: Callable[[str], None]) -> None:
        """The best model, from a checkpoint that is checked first, and with all adapters.

        Args:
            load: loads the weights of a checkpoint.
        """
        model, best = self.trainer.model, self.trainer.state.best_model_checkpoint
        assert best is not None
        found = {name: reason for name, reason in damage(Path(best)).items() if name.endswith((".safetensors", ".bin"))}
        if found:
            raise ValueError(
                f"the best model cannot be loaded, since {best} is not whole: {said(found)}. The weights of the last "
                f"step are in {self.trainer.last_checkpoint}"
            )
        in_parts = stage_of(causal_model(model)) is not None or beside_adapters(model) is not None
        if len(getattr(model, "peft_config", ())) == 1 and not in_parts:
            theirs()
        else:
            load(best)

    def load_states(self, checkpoint: str | None, theirs: Callable[[], None]) -> None:
        """The states of optimizer and schedule, and what else steps leave behind."""
        left_out = () if self.resumption is None else self.resumption.left_out
        with loading_projectors(unwrap_optimizer(self.trainer.optimizer)):
            folder = None if checkpoint is None else Path(checkpoint)
            cut = states_are_cut(self.trainer.model, self.trainer.optimizer)
            in_parts = folder is not None and (cut or len(optimizer_files(folder)) > 1)
            if folder is not None and (in_parts or {OPTIMIZERS, SCHEDULER} & {*left_out}):
                self._load_some(folder, left_out)
            else:
                theirs()
        if state := saved_run_state(checkpoint):
            self.trainer.set_run_state(state)

    def _load_some(self, checkpoint: Path, left_out: tuple[str, ...]) -> None:
        """The states of optimizer and scheduler but for those that are left out."""
        schedule = self.trainer.lr_scheduler
        if SCHEDULER not in left_out:
            schedule.load_state_dict(load_states(checkpoint / SCHEDULER))
        elif scheduler_name(self.trainer) not in OF_METRICS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that no step of the optimizer came before
                for _ in range(self.trainer.state.global_step):
                    schedule.step()
        if OPTIMIZERS not in left_out:
            self._load_optimizer_states(checkpoint)
        if scheduler_name(self.trainer) not in OF_METRICS:
            for group, rate in zip(self.trainer.optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = rate

    def _load_optimizer_states(self, checkpoint: Path) -> None:
        try:
            states = load_optimizer_states(self.trainer.optimizer, checkpoint)
        except (Damage, OfAnotherRun) as unfit:  # of a form that only the states themselves show
            if not self.args.resume_without_states:
                raise
            logger.warning(f"resuming without the optimizer's states: {unfit}")
            return
        self.trainer.optimizer.load_state_dict(states)

    @property
    def loads_random_state(self) -> bool:
        """Whether the random state is put back."""
        return self.resumption is None or RANDOM not in self.resumption.left_out


def _load_partitioned(model: Any, checkpoint: str, theirs: Load) -> None:
    """Into parameters of ZeRO-3: those that are trained are gathered for it, all of adapters and one at a time."""
    if hasattr(model, "peft_config"):
        with replaced_by_first_rank([p for p in model.parameters() if p.requires_grad]):
            theirs(checkpoint, model)
        load_beside(model, Path(checkpoint))
        return
    if is_converted(model):
        raise ValueError(
            f"checkpoints of model type {model.config.model_type} name weights otherwise than the model, which "
            "ZeRO-3 cannot load yet: resume with stage 2, or FSDP2"
        )
    load_weights(model, sorted(Path(checkpoint).glob("model*.safetensors")))


def _lacking(folder: Path) -> dict[str, str]:
    """The states that a checkpoint does not have."""
    found = {} if optimizer_files(folder) else {OPTIMIZER: "it is missing"}
    found |= {} if (folder / SCHEDULER).exists() else {SCHEDULER: "it is missing"}
    if not any(folder.glob(RANDOM)):
        found["rng_state.pth"] = "it is missing"
    if len(found) == len(LOSSES):
        return dict.fromkeys(found, "it is missing (saved with save_only_model=True?)")
    return found


def _meaning(left_out: tuple[str, ...]) -> str:
    """What going on without some states means, in words."""
    return ", ".join(LOSSES[name] for name in left_out)
