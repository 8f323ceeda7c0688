"""The one trainer: `transformers.Trainer` with lowtide's step in it, which those of the methods subclass.

From the Trainer come callbacks, logging, schedulers, checkpoints and the hub. Replaced are the step (the whole batch
of an optimizer step at once, accumulation folded in), evaluation (no logits, flat memory), and saving (a checkpoint
appears whole or not at all).

All that is overridden of the Trainer is here. A method of this class hands what the Trainer does, as a function, to a
part that it holds. Methods of other names are what trainers of methods override.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from lowtide.compat.accelerate import leave_models_unwrapped, share_batches
from lowtide.compat.torch import dropping_gradients_fast
from lowtide.data.batches.collate import ragged_from_collated
from lowtide.data.batches.heaviest import row_lengths
from lowtide.engine.forward import same_rows_of
from lowtide.engine.heads.head import Head
from lowtide.memory.optimizers.narrow_step import unwrap_optimizer
from lowtide.methods.method import Findings
from lowtide.ragged import RaggedBatch
from lowtide.ranks.same_rows import check_same_batch
from lowtide.ranks.shards import is_sharded
from lowtide.run.edge import edge
from lowtide.run.optimizers import NAMES, own_optimizer
from lowtide.run.options.sharding import engines_hidden
from lowtide.run.options.training import TrainingConfig
from lowtide.score_rules import NEXT_TOKEN, ScoreRule
from lowtide.step.phases import Phases
from lowtide.step.rank_sync import OutOfMemory
from lowtide.step.runner import StepRunner
from lowtide.step_plan import Limits
from lowtide.trainers.batches import RowBatches
from lowtide.trainers.checkpoints.resuming import Resuming, Resumption
from lowtide.trainers.checkpoints.signals import stopping_at_once
from lowtide.trainers.checkpoints.stopping import Stopping
from lowtide.trainers.checkpoints.whole import WholeCheckpoints
from lowtide.trainers.evaluation import Predictions, evaluated
from lowtide.trainers.losses.own_loss import OwnLosses
from lowtide.trainers.optimizers import OptimizerMaker
from lowtide.trainers.order import RowOrder, counted
from lowtide.trainers.reports.metrics_file import MetricsFile
from lowtide.trainers.reports.model_card import Card
from lowtide.trainers.reports.notebook_plot import NotebookPlot
from lowtide.trainers.reports.oom_report import explained
from lowtide.trainers.reports.progress import RichProgress
from lowtide.trainers.reports.run_log import RunLog
from lowtide.trainers.steps import Steps


@contextlib.contextmanager
def public_call(doing: str) -> Iterator[None]:
    """Around a call of a trainer by its user, what `run.edge` does and, but for training, the end at SIGTERM."""
    with stopping_at_once(doing), edge(doing):
        yield


class KeptBeside(Protocol):
    """What a checkpoint has beside the states of a Trainer; all ranks save and load it."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class LowtideTrainer(Trainer):
    """`transformers.Trainer` over ragged batches.

    Subclasses load models and data; this class runs them.
    """

    args: TrainingConfig
    model: Any
    optimizer: Any
    head: type[Head]
    """What is read off the model's hidden states."""
    kind_of_order: ClassVar[type[RowOrder]] = RowOrder
    kind_of_batches: ClassVar[type[RowBatches]] = RowBatches

    def __init__(
        self,
        *,
        runner: StepRunner,
        callbacks: list | None = None,
        **kwargs: Any,
    ):
        self.runner = runner
        runner.objective = self.own_loss.in_place_of(cast(Any, runner.objective))
        self.predicted_bytes: int | None = None
        self.args = kwargs["args"]
        self.row_order, self.batch_maker = self.kind_of_order(self), self.kind_of_batches(self)
        self.kept_beside: list[KeptBeside] = []
        self.optimizer_maker, self.step_taker = OptimizerMaker(self), Steps(self)
        self.checkpoint_writer, self.resuming, self.stopping = WholeCheckpoints(self), Resuming(self), Stopping(self)
        self.card = Card(self)
        with engines_hidden(self.args):
            super().__init__(callbacks=callbacks, **kwargs)
        self.neftune_noise_alpha = (
            None  # the Trainer's hook would scale by the whole batch; `engine.layers.noise` does not
        )
        self.optimizer_maker.check(super().create_optimizer)
        runner.updater.accelerator, runner.optimizer_name = self.accelerator, self.optimizer_maker.name
        self.run_log = RunLog(self)
        self.add_callback(MetricsFile)
        if not self.args.disable_tqdm:
            RichProgress.replace_in(self)
            NotebookPlot.add_to(self)

    # -- what runs ---------------------------------------------------------------------------------------------------

    @property
    def phases(self) -> Phases:
        """Where in a step the run is."""
        return self.runner.phases

    @property
    def objective(self) -> Any:
        """The loss."""
        return self.runner.objective

    @objective.setter
    def objective(self, objective: Any) -> None:
        self.runner.objective = objective

    @property
    def inner_objective(self) -> Any:
        """The method's own objective, where a loss of a subclass stands in its place too."""
        return self.runner.method_objective

    @functools.cached_property
    def own_loss(self) -> OwnLosses:
        """The loss that a subclass or a function computes; asked before the trainer is made."""
        return OwnLosses(self, LowtideTrainer)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The method's loss of a padded micro-batch, for subclasses that add to it.

        Args:
            inputs: as they came to the subclass's `compute_loss`; for supervised fine-tuning also others, with
                `input_ids`, `attention_mask` and `labels`.
            return_outputs: also the model's outputs, whose logits carry gradients.
            num_items_in_batch: scored tokens of the whole step, by which the sum of the losses is divided; by those of
                the inputs if None.

        Raises:
            ValueError: pairs whose inputs were changed.
        """
        return self.own_loss.of_method(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """(loss, logits, labels) of a padded micro-batch; the latter two are None with `prediction_loss_only`."""
        return self.own_loss.predicted(model, inputs, loss_only=prediction_loss_only)

    @property
    def reference(self) -> Any:
        """The reference's log-probabilities of a micro-batch; None for a method without one."""
        return self.runner.reference

    @reference.setter
    def reference(self, reference: Any) -> None:
        self.runner.reference = reference

    @property
    def padding_free(self) -> bool:
        """Whether batches run without padding."""
        return self.runner.padding_free

    @property
    def limits(self) -> Limits:
        """The caps on a micro-batch; the token budget is smaller than the option's after an out-of-memory."""
        return self.runner.limits

    @property
    def rehearsed_bytes(self) -> int | None:
        """The peak after the rehearsal; None where there was none."""
        return self.runner.rehearsed_bytes

    # -- data --------------------------------------------------------------------------------------------------------

    @property
    def score_rule(self) -> ScoreRule:
        """Where the labels of a collator of another library are predicted."""
        return NEXT_TOKEN

    def kept_columns(self) -> list[str]:
        """The columns of a dataset that its rows keep."""
        segments = ["seq_lengths", "prefix", "prefix_length"]
        return ["input_ids", "labels", "loss_weights", *segments, "attention_mask", "position_ids", "images"]

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = self.kept_columns()

    def as_ragged(self, inputs: Any) -> RaggedBatch:
        batch = inputs if isinstance(inputs, RaggedBatch) else ragged_from_collated(inputs, self.score_rule)
        check_same_batch((batch.token_ids, batch.score_index), same_rows_of(self.model), self.args.device)
        return batch

    def drawn(self, batch: RaggedBatch, epoch: int) -> RaggedBatch:
        """A batch with what is drawn of it anew in each epoch; by default nothing is."""
        return batch

    @property
    def deals_rows(self) -> bool:
        """Whether it may be any rank that computes a row."""
        return True

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        return self.row_order.train_sampler(train_dataset, super()._get_train_sampler)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler | None:
        return self.row_order.eval_sampler(eval_dataset, super()._get_eval_sampler)

    def get_train_dataloader(self) -> DataLoader:
        """As the Trainer's; the rows of a step are dealt evenly to ranks, where their lengths are known."""
        return self.row_order.train_loader(super().get_train_dataloader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """As the Trainer's; a stream's rows are counted."""
        return counted(super().get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As the Trainer's; a stream's rows are counted."""
        return counted(super().get_test_dataloader(test_dataset))

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **more: Any) -> DataLoader:
        theirs = super()._get_dataloader
        return self.row_order.loader(
            lambda rows, size: theirs(rows, description, size, *args, **more),
            dataset,
            batch_size,
            training=more.get("is_training", False),
        )

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        start = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial)
        return self.resuming.started_at(
            checkpoint, self.row_order.resumed_at(checkpoint, start), max_steps, num_train_epochs
        )

    def _run_epoch(self, **given: Any) -> None:
        resumed = given["epoch"] == given["epochs_trained"]
        taken = given["steps_trained_in_current_epoch"] if resumed else 0
        self.row_order.begin_epoch(given["train_dataloader"], given["epoch"], taken)
        super()._run_epoch(**given)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, None]:
        """The batches of one optimizer step as one, at the last of the Trainer's places, where it steps; the earlier
        ones stay empty, and all do at the end of a stream, which may have fewer batches left than a step takes."""
        self.step_taker.begin()
        with self.stopping.between_steps(lambda: self._save_checkpoint(self.model, None)):
            step = self.batch_maker.of_step(epoch_iterator, num_batches)
        if step is not None:
            return [None] * (num_batches - 1) + [step], None
        self.row_order.check_read()
        self.control.should_epoch_stop = True
        return [], None

    # -- the step ----------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """As the Trainer's; a run that stops for want of memory says what would have helped.

        Raises:
            Interrupted: Ctrl-C; a `KeyboardInterrupt`.
            Stopped: SIGTERM; a `SystemExit`.
            ValueError: another process trains into the folder, or the checkpoint cannot be resumed from.
        """
        resuming = self.resuming.during_training(resume_from_checkpoint)
        with self._training(), self.stopping.during_training(), resuming as checkpoint:
            self.checkpoint_writer.last = checkpoint
            return super().train(checkpoint, trial, ignore_keys_for_eval)

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        """Around the training: a run that stops for want of memory says what would have helped, and what is changed
        meanwhile is undone."""
        liger, self.args.use_liger_kernel = self.args.use_liger_kernel, False  # the table has it, without its losses
        try:
            with edge("training"), dropping_gradients_fast(self.model):
                try:
                    yield
                finally:
                    self.batch_maker.end()
                    self.runner.end()
        except OutOfMemory as error:
            self.ended_early()
            raise explained(cast(Any, self), error) from None
        except BaseException:
            self.ended_early()
            raise
        finally:
            self.args.use_liger_kernel = liger

    def ended_early(self) -> None:
        """What a training leaves that was stopped, or failed; by default nothing."""

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: nn.Module, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        """As the Trainer's, after each step and epoch; then ends, if a rank was told to stop."""
        theirs = super()._maybe_log_save_evaluate
        self.stopping.after_step(
            lambda: theirs(tr_loss, grad_norm, model, trial, *args, **kwargs),
            lambda: self._save_checkpoint(model, trial),
        )

    def row_lengths(self, dataset: Any = None, *, trained: bool = False) -> np.ndarray | None:
        """[rows]: the tokens of each row of a dataset, by default the training set, as its batches have them, or those
        alone that go backward; None for a stream."""
        return row_lengths(self.train_dataset if dataset is None else dataset, self.data_collator, trained=trained)

    @property
    def rows_together(self) -> int:
        """Rows of a batch that one prepared row becomes."""
        return 1

    def training_step(self, model: nn.Module, inputs: RaggedBatch | None, num_items_in_batch: Any = None) -> Tensor:
        """The gradients of one optimizer step; nothing at the places that accumulation leaves empty."""
        if inputs is None:
            return torch.zeros((), device=self.args.device)
        loss = self.step_taker.gradients(inputs)
        self.stepped()
        return loss

    def stepped(self) -> None:
        """What follows the gradients of a step; by default nothing."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As the Trainer's, with its states where they belong; the step knows of it."""
        theirs = super().create_optimizer
        self.runner.updater.optimizer = optimizer = self.optimizer_maker.make(lambda: theirs(model))
        self.runner.updater.adopt(self.runner.model, unwrap_optimizer(optimizer))
        return optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """As the Trainer's, and lowtide's own."""
        return own_optimizer(args, model) if args.optim in NAMES else Trainer.get_optimizer_cls_and_kwargs(args, model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As the Trainer's, with the steps of a decay that is said as a share of all, or as DeepSpeed's config says."""
        theirs = super().create_scheduler
        return self.optimizer_maker.schedule(
            lambda: theirs(num_training_steps, optimizer), num_training_steps, optimizer
        )

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's; ranks that hold the same weights are not wrapped (see `lowtide.ranks.replicas`), a model's
        forward stays its own (`engine.forward` has autocast around it), and states stay where they belong."""
        super().create_accelerator_and_postprocess()
        self.optimizer_maker.leave_states_in_place()
        leave_models_unwrapped(self.accelerator)
        if self.args.sharding.same_rows > 1:
            share_batches(self.accelerator, self.args.sharding.same_rows)

    def get_total_train_batch_size(self, args: Any) -> int:
        """As the Trainer's, which does not know of ranks that hold the same rows."""
        return super().get_total_train_batch_size(args) // args.sharding.same_rows

    def rehearsed_batch(self, rows: Sequence[int]) -> RaggedBatch:
        """What a step is rehearsed on, of some rows of the training set."""
        dataset: Any = self.train_dataset
        return self.drawn(self.as_ragged(self.data_collator([dataset[row] for row in rows])), self.row_order.place[0])

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        with self.step_taker.named():
            return self.runner.clip()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Unknown where gradients are gone before they were all there."""
        with self.step_taker.named():
            return self.runner.gradient_norm() if grad_norm is None else grad_norm

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As the Trainer's; a metric that no evaluation has is for the user to mend."""
        try:
            return super()._determine_best_metric(metrics, trial)
        except KeyError as error:
            raise ValueError(error.args[0]) from error

    def floating_point_ops(self, inputs: RaggedBatch | None) -> int:
        """6 FLOPs a parameter a real token that this rank computes."""
        if inputs is None:
            return 0
        return 6 * self.step_taker.own_tokens(inputs) * self.step_taker.parameters_beside_embeddings

    def _track_num_input_tokens(self, inputs: RaggedBatch | None) -> None:
        if inputs is not None and self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += self.step_taker.tokens_of_all(inputs)

    # -- metrics -----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics since the last log, under TRL's names; a run's summary has those of steps not logged yet."""
        logs = self.run_log.completed(logs)
        super().log(logs, start_time)
        self.logged(logs)

    def logged(self, logs: Mapping[str, Any]) -> None:
        """What follows a log; by default nothing."""

    @property
    def peak_phase(self) -> str:
        """The phase in which the peak so far fell."""
        return self.run_log.mark.phase

    def metrics_of(self, sums: dict[str, float]) -> dict[str, float]:
        """The metrics, under TRL's names, of what was added up."""
        return {name: value for name, value in sums.items() if name not in ("tokens", "scores", "rows")}

    # -- evaluation --------------------------------------------------------------------------------------------------

    def handed_in(self, dataset: Any) -> Any:
        """A dataset that comes after construction, prepared and checked."""
        return dataset

    @public_call("evaluating")
    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the Trainer's; a dataset handed in here may be unprepared."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self.handed_in(eval_dataset)
        return super().evaluate(cast(Any, eval_dataset), *args, **kwargs)

    @public_call("predicting")
    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the dataset may be unprepared. `predictions` are log-probs of targets and `label_ids` the
        targets, [scores]; logits where a loss of one's own needs them."""
        return super().predict(self.handed_in(test_dataset), *args, **kwargs)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The loss of every scored token of a dataset, and the metrics; memory does not grow with it.

        `compute_metrics` gets the log-probs of the targets as `predictions` and the targets as `label_ids`, both
        [scores] over the whole dataset, in its order on one process; these are gathered only if it is there.
        """
        wanted = self.compute_metrics is not None or description == "Prediction"
        with self.batch_maker.evaluating(dataloader):
            return evaluated(self, self._evaluation_model(), dataloader, wanted=wanted, prefix=metric_key_prefix)

    def predictions(self, wanted: bool, model: nn.Module) -> Predictions:
        """What is kept of an evaluation of a model; `wanted` is whether `compute_metrics` gets it."""
        return Predictions(wanted, self.findings(), self.head)

    def findings(self) -> Findings | None:
        """Metrics of an evaluation that need all of its scores at once; None if there are none."""
        return None

    def _evaluation_model(self) -> nn.Module:
        """Unwrapped: ranks need not run equally many batches."""
        if not self.is_in_train and (self.args.bf16_full_eval or self.args.fp16_full_eval):
            self.model.to(torch.bfloat16 if self.args.bf16_full_eval else torch.float16)
        model = self._wrap_model(self.model, training=False) if not self.is_in_train else self.model
        model.eval()
        return model if is_sharded(model) else model.to(self.args.device)  # a DTensor would be copied

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def last_checkpoint(self) -> str | None:
        """The checkpoint that this run wrote last, or resumed from."""
        return self.checkpoint_writer.last

    @property
    def resumption(self) -> Resumption | None:
        """What this training resumes from."""
        return self.resuming.resumption

    @property
    def trained_nothing(self) -> bool:
        """Whether the checkpoint is at the end of the run already."""
        return self.resuming.trained_nothing

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        theirs = super()._save_checkpoint

        def write(folder: str) -> None:
            self._get_output_dir = lambda trial: folder  # type: ignore[method-assign]
            try:
                theirs(model, trial)
            finally:
                del self._get_output_dir

        with self.stopping.saving():
            self.checkpoint_writer.save(Path(self._get_output_dir(trial=trial)), write, super()._push_from_checkpoint)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Not yet: what is pushed is read in the background, and the folder is about to get another name."""

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        theirs, run = super()._finalize_training, Path(self._get_output_dir(trial=trial))
        return self.checkpoint_writer.end(run, lambda: theirs(trial, num_train_samples, start_time))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; what could not be written is said of the folder that it was meant for.

        Raises:
            ValueError: it could not be written; while a checkpoint is, ranks meet first.
        """
        theirs = super().save_model
        with contextlib.nullcontext() if _internal_call else public_call("saving the model"):
            self.checkpoint_writer.save_model(
                output_dir, _internal_call, lambda: theirs(output_dir, _internal_call), lambda *args: self._save(*args)
            )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        theirs = super()._save_optimizer_and_scheduler
        self.checkpoint_writer.save_states(Path(output_dir), lambda: theirs(output_dir))
        for kept in self.kept_beside:
            kept.save(Path(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.resuming.load_weights(resume_from_checkpoint, model, super()._load_from_checkpoint)

    def _load_best_model(self) -> None:
        self.resuming.load_best(super()._load_best_model, self._load_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        theirs = super()._load_optimizer_and_scheduler
        self.resuming.load_states(checkpoint, lambda: theirs(checkpoint))
        if checkpoint is not None:
            for kept in self.kept_beside:
                kept.load(Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.resuming.loads_random_state:
            super()._load_rng_state(checkpoint)

    def run_state(self) -> dict[str, Any]:
        """What steps leave behind beside weights, optimizer and random state; asked of all ranks together."""
        return {"num_tokens": self.run_log.tokens, **self.runner.state_dict(), "place": self.row_order.place}

    def set_run_state(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.run_log.go_on(state["num_tokens"])
        self.runner.load_state_dict(state)

    # -- the hub ---------------------------------------------------------------------------------------------------

    def create_model_card(  # type: ignore[override]
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **metadata: Any,
    ) -> None:
        """Writes `README.md` to the output folder, on the first rank; the arguments are TRL's.

        Args:
            model_name: the title; by default the output folder's name.
            dataset_name: what the model was trained on; a name on the hub is linked.
            tags: further tags.
            metadata: further fields of the card's YAML, such as `license` and `language`.
        """
        if self.is_world_process_zero():
            self.card.set(model_name, dataset_name, tags, **metadata)
            self.card.write(Path(str(self.args.output_dir)))

    # -- what there is not -----------------------------------------------------------------------------------------

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            ValueError: says what to do.
        """
        raise ValueError(
            f"{type(self).__name__}.hyperparameter_search is not built, since options and memory are settled when a "
            "trainer is made: make a trainer for each trial, with its options, in the function that the search calls"
        )
