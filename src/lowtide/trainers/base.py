"""The one trainer: `transformers.Trainer` with lowtide's step in it. The trainers of the methods are thin ends of this.

From the Trainer come callbacks, logging, schedulers, checkpoints and the hub. Replaced are the step (the whole batch
of an optimizer step at once, accumulation folded in), evaluation (no logits, flat memory), and saving (a checkpoint
appears whole or not at all).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from lowtide.data.batches.collate import ragged_from_collated
from lowtide.engine.diagnose import find_nonfinite
from lowtide.engine.forward import causal_model
from lowtide.engine.noise import set_noise
from lowtide.memory.optimizers.narrow_step import unwrap_optimizer
from lowtide.methods import Objective
from lowtide.methods.method import Scorer
from lowtide.ragged import RaggedBatch
from lowtide.ranks.replicas import averaging, broadcast_weights
from lowtide.ranks.world import distributed
from lowtide.step.heaviest import row_lengths
from lowtide.step.metrics import Totals
from lowtide.step.microbatches import Models
from lowtide.step.phases import HighWater, Phases
from lowtide.step.rank_sync import NotFinite, RankSync, check_finite
from lowtide.step.recovery import StepSnapshot, surviving_optimizer_step, surviving_step
from lowtide.step.train_step import BackwardPlan, Limits, evaluate_batch
from lowtide.trainers.checkpoints.resuming import ResumableRuns
from lowtide.trainers.checkpoints.stopping import StoppableRuns
from lowtide.trainers.config import TrainingConfig
from lowtide.trainers.edge import TO_DO
from lowtide.trainers.evaluation import PaddedPredictions, Predictions, real_rows
from lowtide.trainers.memory_log import MemoryLog, Prediction
from lowtide.trainers.model_card import ModelCards
from lowtide.trainers.optimizers import InBackward, OwnOptimizers
from lowtide.trainers.order import RepeatableOrder
from lowtide.trainers.own_loss import OwnLosses
from lowtide.trainers.progress import RichProgress
from lowtide.trainers.rehearsal import rehearse

logger = logging.getLogger(__name__)
REMEDIES = "Lower `learning_rate`, set `max_grad_norm`, or train in bfloat16 or float32 rather than float16"


class LowtideTrainer(OwnLosses, StoppableRuns, ResumableRuns, OwnOptimizers, RepeatableOrder, ModelCards):
    """`transformers.Trainer` over ragged batches.

    Subclasses load models and data; this class runs them.
    """

    args: TrainingConfig
    model: Any
    optimizer: Any

    def __init__(
        self,
        *,
        objective: Objective,
        padding_free: bool,
        reference: Scorer | None = None,
        callbacks: list | None = None,
        **kwargs: Any,
    ):
        self.objective = self.with_own_loss(objective)
        self.padding_free = padding_free
        self.reference = reference
        self._train_totals = Totals()
        self._tokens_seen = 0.0
        self._token_budget: int | None = None
        self.rehearsed_bytes: int | None = None
        self.room: list[Tensor] = []
        """Held by a rehearsal in the place of the optimizer's states, until these are made."""
        self.predicted_bytes: int | None = None
        self.phases = Phases()
        self._begun = False
        """Whether this training has come to its first step."""
        self._undo: list[Callable[[], object]] = []
        """What gives back, after training, what was changed for it."""
        self._in_backward: InBackward | None = None
        self._around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self.seconds_in_steps = 0.0
        self.tokens_in_steps = 0
        super().__init__(callbacks=callbacks, **kwargs)
        self.neftune_noise_alpha = None  # the Trainer's hook would scale by the whole batch; `engine.noise` does not
        self.check_optimizer()
        self._mark = HighWater(self.args.device)
        self._memory_log = MemoryLog(self._mark)
        self.phases.listeners.append(self._mark)
        if not self.args.disable_tqdm:
            RichProgress.replace_in(self)

    # -- data --------------------------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = ["input_ids", "labels", "seq_lengths", "attention_mask", "position_ids"]

    def as_ragged(self, inputs: Any) -> RaggedBatch:
        batch = inputs if isinstance(inputs, RaggedBatch) else ragged_from_collated(inputs)
        return batch.to(self.args.device, non_blocking=True)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, None]:
        """The batches of one optimizer step as one; the Trainer's places for the earlier ones stay empty."""
        batches = [self.as_ragged(inputs) for _, inputs in zip(range(num_batches), epoch_iterator, strict=False)]
        self.place = self.place[0], self.place[1] + len(batches)
        if not batches:
            return [], None
        return [None] * (len(batches) - 1) + [RaggedBatch.concat(batches)], None

    # -- the step ----------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; what is changed for the time of training is undone afterwards."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._begun = False
            while self._undo:
                self._undo.pop()()

    @property
    def limits(self) -> Limits:
        """The caps on a micro-batch; the token budget is smaller than the option's after an out-of-memory."""
        return Limits(self._train_batch_size, self._token_budget or self.args.tokens_per_microbatch)

    def limits_of(self, batch: RaggedBatch) -> Limits:
        """The caps for a batch: a budget that an out-of-memory made smaller still has room for the batch's longest row,
        as one of the batch that failed had."""
        limits = self.limits
        if self._token_budget is None:
            return limits
        longest = min(max(batch.row_tokens), self.args.tokens_per_microbatch or math.inf)
        return Limits(limits.rows, int(max(self._token_budget, longest)))

    def row_lengths(self, dataset: Any = None) -> np.ndarray | None:
        """[rows]: the tokens of each row of a dataset, by default the training set, as its batches have them; None for
        a stream."""
        return row_lengths(
            self.train_dataset if dataset is None else dataset, getattr(self.data_collator, "prompts_per_row", 1)
        )

    def models(self, model: nn.Module) -> Models:
        """What a step runs."""
        return Models(model, self.reference, self.padding_free, self._forward)

    @contextlib.contextmanager
    def _forward(self) -> Iterator[None]:
        with self.phases.during("forward"), self._around():
            yield

    def _backward(self, loss: Tensor) -> None:
        with self.phases.during("backward"):
            self.accelerator.backward(loss)

    def _backward_of_finite(self, loss: Tensor) -> None:
        """For a backward that steps: once it has run, the weights no longer tell where a NaN came from."""
        check_finite(loss)
        self._backward(loss)

    def backward_plan(self, model: nn.Module) -> BackwardPlan:
        """How a step goes backward and meets the other ranks."""
        scaler = self.accelerator.scaler
        return BackwardPlan(
            backward=self._backward,
            grad_scale=1.0 if scaler is None else scaler.get_scale(),
            exchange=functools.partial(averaging, model) if distributed() else None,
            finite=True,
        )

    def rehearsal_plan(self, model: nn.Module) -> BackwardPlan:
        """The same for a rehearsal, in which nothing is stepped."""
        freed = {} if self._in_backward is None else {"around_last": self._in_backward.steps.norm_pass}
        return replace(self.backward_plan(model), finite=False, **freed)

    def training_step(self, model: nn.Module, inputs: RaggedBatch | None, num_items_in_batch: Any = None) -> Tensor:
        """The gradients of one optimizer step; nothing at the places that accumulation leaves empty."""
        if inputs is None:
            return torch.zeros((), device=self.args.device)
        start = time.perf_counter()
        model.train()  # a loaded model is not yet, and neither checkpoints nor drops anything
        if not self._begun:
            self._before_first_step(model)
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers
        try:
            with self.compute_loss_context_manager():
                loss = self._gradients(model, inputs)
        except NotFinite as error:
            raise self._nonfinite(model, inputs, str(error), own=error.loss is not None) from None
        scaler = self.accelerator.scaler
        if scaler is not None and scaler.get_scale() < 1:
            raise self._nonfinite(model, inputs, "gradients overflow at a loss scale below 1")
        every = self.args.torch_empty_cache_steps
        if every and self.state.global_step % every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.seconds_in_steps += time.perf_counter() - start
        self.tokens_in_steps += inputs.tokens
        return loss

    def _gradients(self, model: nn.Module, batch: RaggedBatch) -> Tensor:
        """The gradients of one optimizer step, or the step itself where it is taken in backward; returns the loss."""

        def step(totals: Totals, **more: Any) -> Tensor:
            given, plan = self.limits_of(batch), replace(self.backward_plan(model), **more)
            loss, limits = surviving_step(
                self.models(model), batch, self.objective, limits=given, totals=totals, plan=plan
            )
            if limits != given:
                self._token_budget = limits.tokens
            return loss

        in_backward, limits = self._in_backward, self.limits_of(batch)
        if in_backward is None or len(batch.plan_split(limits.tokens, limits.rows)) > 1:
            return step(self._train_totals)
        if in_backward.max_grad_norm:
            before = StepSnapshot(self.objective, self.args.device)
            step(Totals(), around_last=in_backward.steps.norm_pass, backward=self._backward_of_finite)
            before.put_back()
            self._check_norm(in_backward.steps.total_norm, {})
        return step(self._train_totals, around_last=in_backward.stepping, backward=self._backward_of_finite)

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's; ranks that hold the same weights are not wrapped (see `lowtide.ranks.replicas`), and a
        model's forward stays its own: `engine.forward` has autocast around it."""
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        prepare_model = accelerator.prepare_model

        def prepared(model: nn.Module, **options: Any) -> nn.Module:
            mixed, accelerator.native_amp = accelerator.native_amp, False
            try:
                return prepare_model(model, **{**options, "evaluation_mode": True})
            finally:
                accelerator.native_amp = mixed

        accelerator.prepare_model = prepared
        accelerator.state.dynamo_plugin.backend = DynamoBackend.NO  # layers are compiled, not the model

    def _before_first_step(self, model: nn.Module) -> None:
        """Ranks start equal; the optimizer survives an out-of-memory that comes before it changes anything."""
        self._mark.note("loading")
        if cost := self.plain_cost():
            logger.warning(f"{cost}; a loss of log-probs, from `make_objective`, needs none of them")
        if distributed():
            broadcast_weights(model)
        if self.args.neftune_noise_alpha:
            set_noise(causal_model(model), self.args.neftune_noise_alpha)
            self._undo.append(functools.partial(set_noise, causal_model(model), None))
        inner = unwrap_optimizer(self.optimizer)
        step = self.optimizer.step

        @functools.wraps(step)
        def surviving(*args: Any) -> Any:
            self.room.clear()
            with self.phases.during("optimizer"):
                return surviving_optimizer_step(inner, step, *args)

        self.optimizer.step = surviving
        self._undo.append(functools.partial(setattr, self.optimizer, "step", step))
        self._begun = True
        if self.args.optimizer_in_backward:
            self._in_backward = InBackward(self.optimizer, model, self.args.max_grad_norm)
        if self.args.rehearsal:
            with self.compute_loss_context_manager():
                self._token_budget = rehearse(self, model).tokens

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self._in_backward is not None and self._in_backward.norm is not None:
            norm, self._in_backward.norm = self._in_backward.norm, None
            return norm
        return self._checked_norm(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Unknown where gradients are gone before they were all there."""
        if grad_norm is None and any(p.grad is not None for p in model.parameters()):
            return self._checked_norm(model)
        return grad_norm

    def _checked_norm(self, model: nn.Module, clip_at: float | None = None) -> Tensor:
        """The norm of the gradients, which are looked at before they are clipped."""
        self.accelerator.unscale_gradients()
        trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
        gradients = {name: cast(Tensor, p.grad) for name, p in trained.items()}
        norm = nn.utils.get_total_norm(gradients.values())
        self._check_norm(norm, gradients)
        if clip_at is not None:
            nn.utils.clip_grads_with_norm_(trained.values(), clip_at, norm)
        return norm

    def _check_norm(self, norm: Tensor, gradients: Mapping[str, Tensor]) -> None:
        """Refuses to step along gradients that are no numbers; where a loss scaler does, by skipping a step.

        Raises:
            ValueError: the norm is none, though the loss is; names the first such gradient of those that are there.
        """
        if self.accelerator.scaler is not None or math.isfinite(norm.item()):
            return
        worst = next((name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()), None)
        what = f"the gradient of {worst}" if worst else "the norm of all gradients"
        raise ValueError(f"step {self.state.global_step + 1}: the loss is finite, {what} is not. {REMEDIES}")

    def _nonfinite(self, model: nn.Module, batch: RaggedBatch, what: str, own: bool = True) -> ValueError:
        """What stops a run: this rank says where it comes from, unless it is another's."""
        model.zero_grad()
        found = self._find_nonfinite(model, batch) if own else "That rank says where it comes from"
        return ValueError(f"step {self.state.global_step + 1}: {what}. {found}. {REMEDIES}")

    def _find_nonfinite(self, model: nn.Module, batch: RaggedBatch) -> str:
        limits = self.limits_of(batch)
        parts = batch.split(limits.tokens, limits.rows)
        findings = (find_nonfinite(model, part, padding_free=self.padding_free) for part in parts)
        nothing = "a second forward of it is finite" + (", and another rank's may not be" if distributed() else "")
        number, found = next(((n, f) for n, f in enumerate(findings) if f), (0, nothing))
        return f"Micro-batch {number}: {found}"

    def floating_point_ops(self, inputs: RaggedBatch | None) -> int:
        """6 FLOPs a parameter a real token."""
        return 0 if inputs is None else 6 * inputs.tokens * self.model.num_parameters(exclude_embeddings=True)

    def _track_num_input_tokens(self, inputs: RaggedBatch | None) -> None:
        if inputs is not None and self.args.include_num_input_tokens_seen != "no":
            tokens = torch.tensor(inputs.tokens, device=self.args.device)
            self.state.num_input_tokens_seen += int(cast(Tensor, self.accelerator.reduce(tokens, "sum")).item())

    # -- metrics -----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics since the last log, under TRL's names."""
        if "loss" in logs:
            sums = self._train_totals.read(self.args.device)
            self._train_totals = Totals()
            self._tokens_seen += sums.get("tokens", 0)
            logs.update(self.metrics_of(sums), num_tokens=self._tokens_seen)
            logs.update(cast(Any, self._memory_log.metrics(self.prediction)))
        super().log(logs, start_time)

    @property
    def peak_phase(self) -> str:
        """The phase in which the peak so far fell."""
        return self._mark.phase

    @property
    def prediction(self) -> Prediction | None:
        """Of the peak: the estimate where one was made, else what was rehearsed."""
        if self.predicted_bytes is not None:
            return Prediction.estimated(self.predicted_bytes, self.args.device.type)
        return None if self.rehearsed_bytes is None else Prediction.rehearsed(self.rehearsed_bytes)

    def metrics_of(self, sums: dict[str, float]) -> dict[str, float]:
        """The metrics, under TRL's names, of what was added up."""
        return {name: value for name, value in sums.items() if name not in ("tokens", "scores", "rows")}

    # -- evaluation --------------------------------------------------------------------------------------------------

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
        models = Models(self._evaluation_model(), self.reference, self.padding_free, self._around)
        totals, rows, sync = Totals(), 0, RankSync("evaluation", remedy=TO_DO["evaluating"])
        wanted = self.compute_metrics is not None or description == "Prediction"
        kept = PaddedPredictions() if self.evaluates_plainly(wanted) else Predictions()
        for number, inputs in enumerate(dataloader):
            self.leave_evaluation_if_stopped()
            batch = self.as_ragged(inputs)
            count = real_rows(self.accelerator, batch.rows, self.args.eval_batch_size)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            if count == 0 or sync.failed:  # ranks take equally many batches, and meet after the last
                continue
            batch = batch if count == batch.rows else batch.select_rows(range(count))
            sync.micro_batch, sync.part = number, batch
            with sync.local(), self.phases.during("evaluation"), self.compute_loss_context_manager():
                if isinstance(kept, PaddedPredictions):
                    own = kept if wanted else None
                    self.evaluate_plainly(models.policy, batch, totals, self._eval_limits, own)
                else:
                    results = evaluate_batch(models, batch, self.inner_objective, totals, limits=self._eval_limits)
                    if wanted:
                        kept.take_in(results)
                rows += batch.rows
            if not distributed():
                sync.meet(self.args.device)
        sync.meet(self.args.device)
        totals.add(rows=rows)
        sums = totals.read(self.args.device)
        metrics: dict[str, Any] = self.metrics_of(sums)
        metrics["loss"] = sums.get("loss", 0.0) + self.objective.aux_coefficient * metrics.get("aux_loss", 0.0)
        logprobs, targets = cast(Any, kept.gathered())
        if self.compute_metrics is not None:
            metrics.update(self.compute_metrics(EvalPrediction(predictions=logprobs, label_ids=targets)))
        plain: Any = denumpify_detensorize(metrics)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in plain.items()}
        return EvalLoopOutput(logprobs, targets, metrics, int(sums.get("rows", 0)))

    @property
    def _eval_limits(self) -> Limits:
        return Limits(self.args.per_device_eval_batch_size, self.args.tokens_per_microbatch)

    def _evaluation_model(self) -> nn.Module:
        """Unwrapped: ranks need not run equally many batches."""
        if not self.is_in_train and (self.args.bf16_full_eval or self.args.fp16_full_eval):
            self.model.to(torch.bfloat16 if self.args.bf16_full_eval else torch.float16)
        model = self._wrap_model(self.model, training=False) if not self.is_in_train else self.model
        model.eval()
        return model.to(self.args.device)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def run_state(self) -> dict[str, Any]:
        """What steps leave behind beside weights, optimizer and random state; asked of all ranks together."""
        unlogged = self._train_totals.read(self.args.device).get("tokens", 0)
        smaller = self._token_budget != self.args.tokens_per_microbatch
        running = getattr(self.objective, "running", None)
        return {
            "num_tokens": self._tokens_seen + unlogged,
            "token_budget": self._token_budget if smaller else None,
            "running": {} if running is None else vars(running),
            "place": self.place,
        }

    def set_run_state(self, state: dict[str, Any]) -> None:
        """Goes on from there; an option that is smaller than the budget by now is the cap."""
        self._train_totals, self._tokens_seen = Totals(), state["num_tokens"]
        if state["token_budget"] is not None:
            self._token_budget = int(min(state["token_budget"], self.args.tokens_per_microbatch or math.inf))
        if state["running"]:
            vars(cast(Any, self.objective).running).update(state["running"])
