"""One optimizer step of a run as an object: what runs, within which limits, and who steps.

A Trainer, the planner (on tensors without memory), the rehearsal, precomputation and plain loops drive it through its
methods; it knows of none of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowtide.compat.torch import modules_of
from lowtide.engine.diagnose import find_nonfinite
from lowtide.engine.forward import causal_model
from lowtide.engine.heads.head import ScoreOutput, body
from lowtide.engine.layers.noise import set_noise
from lowtide.engine.vision import stop_at_frozen_tower
from lowtide.memory.kernels.fused_layers import unfused
from lowtide.memory.table import ActiveTechniques
from lowtide.methods.method import Objective, Scorer
from lowtide.ops.attention.piece_keys import KeyPlace, OnDevice
from lowtide.ragged import RaggedBatch
from lowtide.ranks.shards import is_gathered
from lowtide.ranks.world import distributed
from lowtide.step.chains import Chain
from lowtide.step.cut import parts_of
from lowtide.step.evaluate import evaluate_batch
from lowtide.step.execute import Backward
from lowtide.step.metrics import Totals
from lowtide.step.models import Models
from lowtide.step.phases import Phases
from lowtide.step.rank_sync import NotFinite, check_finite
from lowtide.step.recovery import StepSnapshot, surviving_scores, surviving_step
from lowtide.step.train_step import Step
from lowtide.step.updaters.in_backward import InBackward
from lowtide.step.updaters.updater import REMEDIES, NotFiniteStep, Updater, updater_of
from lowtide.step_plan import LEAST, Limits


@dataclass
class StepOptions:
    """What a step reads of a run's options, under their names; a trainer's config has them all."""

    per_device_train_batch_size: int | None = None
    """Rows of a micro-batch at most; a rehearsal needs it."""
    gradient_accumulation_steps: int = 1
    """Batches of so many rows that a step takes together, which a rehearsal reads."""
    per_device_eval_batch_size: int | None = None
    tokens_per_microbatch: int | None = None
    max_grad_norm: float = 0.0
    """0 does not clip."""
    optimizer_in_backward: bool | str = False
    neftune_noise_alpha: float | None = None


class StepRunner:
    """The optimizer steps of a run.

    Args:
        model: prepared by `engine.forward.install`.
        objective: the loss.
        options: a trainer's config, or `StepOptions`.
        reference: of a micro-batch, for an objective that compares with one.
        padding_free: False runs the padded path.
        updater: who goes backward and steps.
        techniques: the memory techniques that are on.
        place: makes the place where the keys of a long row wait.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        options: Any = None,
        *,
        reference: Scorer | None = None,
        padding_free: bool = True,
        updater: Updater | None = None,
        techniques: ActiveTechniques | None = None,
        place: Callable[[], KeyPlace] = OnDevice,
    ) -> None:
        self.model, self.objective, self.reference, self.padding_free = model, objective, reference, padding_free
        self.options = StepOptions() if options is None else options
        self.together = is_gathered(model)
        """Weights lie in shards, so that each forward is one of all ranks."""
        self.updater = updater or updater_of(model)
        self.techniques = techniques
        self.phases = Phases()
        self.totals = Totals()
        """The sums behind the metrics since they were last read."""
        self.token_budget: int | None = None
        """A smaller budget than the option's, found by an out-of-memory or a rehearsal."""
        self.rehearsed_bytes: int | None = None
        self.optimizer_name = ""
        """The optimizer's states are those of the one that `optim` calls so; empty where they are not known."""
        self.reserved: list[Tensor] = []
        """Memory held in the place of the optimizer's states, until these are made."""
        self.begun = False
        """Whether what precedes the first step is done."""
        self.not_reached: list[str] | None = None
        """The weights that are trained and had no gradient in the first step, by name; None before it."""
        self.in_backward: InBackward | None = None
        self._unchecked: tuple[Tensor, RaggedBatch] | None = None
        """The loss of a step of one rank, which nobody has looked at, and its batch."""
        self._around = contextlib.nullcontext if techniques is None else techniques.around()
        self.place = place
        self._undo = contextlib.ExitStack()

    @property
    def device(self) -> torch.device:
        """Where the policy runs."""
        return getattr(self.options, "device", None) or next(self.model.parameters()).device

    @property
    def method_objective(self) -> Objective:
        """The method's own objective, beneath a loss that is the caller's."""
        return self.objective.inner

    # -- limits ------------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """The caps on a micro-batch; the token budget is smaller than the option's after an out-of-memory."""
        options = self.options
        budget = self.token_budget or options.tokens_per_microbatch
        return Limits(options.per_device_train_batch_size, budget)

    @property
    def evaluation_limits(self) -> Limits:
        return Limits(self.options.per_device_eval_batch_size, self.options.tokens_per_microbatch)

    def limits_of(self, batch: RaggedBatch) -> Limits:
        """The caps for a batch: where rows cannot be run in pieces, a budget that an out-of-memory made smaller still
        holds the batch's longest row, as one of the batch that failed did."""
        limits = self.limits
        longest = min(max(batch.row_tokens), self.options.tokens_per_microbatch or math.inf)
        if self.token_budget is None or longest <= self.token_budget:
            return limits
        if self.token_budget >= LEAST and self.cuts_rows:
            return limits
        return replace(limits, tokens=int(max(self.token_budget, longest)))

    @property
    def cuts_rows(self) -> bool:
        """Whether a row above the token budget is run in pieces."""
        return self.models().why_not_chains(self.objective) is None

    # -- begin and end -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """What precedes the first step: ranks start equal, techniques take hold, the optimizer's step is this one's."""
        model, inner = self.model, causal_model(self.model)
        self._undo.callback(self.phases.split_forward(body(inner)))
        for undo in [] if self.techniques is None else reversed(self.techniques.begin()):
            self._undo.callback(undo)
        stop_at_frozen_tower(model)
        self.updater.start(model)
        if self.options.neftune_noise_alpha:
            set_noise(inner, self.options.neftune_noise_alpha)
            self._undo.callback(set_noise, inner, None)
        self._undo.callback(self.updater.take_over(self.optimizer_step))
        if self.options.optimizer_in_backward:
            self.in_backward = InBackward(self.updater.optimizer, model, self.options.max_grad_norm)
        self.begun = True

    def end(self) -> None:
        """Undoes what was done for the time of training."""
        self.begun = False
        self._undo.close()

    # -- a step ------------------------------------------------------------------------------------------------------

    @property
    def waited_for(self) -> bool:
        """Whether other ranks wait for this one within a forward."""
        return self.models().waited_for

    @property
    def stages(self) -> int:
        """Ranks that the layers of the model are split between."""
        return self.models().stages

    def models(self, model: nn.Module | None = None) -> Models:
        """What a micro-batch runs through; `model` in place of the policy, a wrapper of it say."""
        policy = self.model if model is None else model
        return Models(policy, self.reference, self.padding_free, self._forward, self.together, self.place, self.device)

    def gradients(self, batch: RaggedBatch) -> Tensor:
        """The gradients of one optimizer step, or the step itself where it is taken in backward.

        Args:
            batch: the whole local batch; it is cut to the limits, to smaller ones after an out-of-memory.

        Returns:
            the loss, whose mean over ranks is that of the whole batch.

        Raises:
            NotFiniteStep: a loss or a gradient of one of several ranks is no number; says where it comes from. On one
                rank `clip` and `optimizer_step` raise it: the device is not waited for until all of the step runs.
            OutOfMemory: one row alone does not fit.
        """
        if not all(module.training for module in modules_of(self.model)):
            self.model.train()  # a loaded model is not yet, and neither checkpoints nor drops anything
        self.updater.train()
        try:
            loss = self._take(batch, in_backward=self.in_backward is not None)
        except NotFinite as error:
            raise self._nonfinite(batch, str(error), own=error.loss is not None) from None
        self._unchecked = None if distributed() else (loss, batch)
        if self.updater.scaler is not None and self.updater.grad_scale < 1:
            raise self._nonfinite(batch, "gradients overflow at a loss scale below 1")
        return loss

    def accumulate(self, batch: RaggedBatch) -> Tensor:
        """The gradients of one of several micro-batches of a step: they are added up, and nothing is stepped."""
        loss = self._take(batch)
        self._unchecked = None if distributed() else (loss, batch)
        return loss

    def rehearsal(self, batch: RaggedBatch) -> None:
        """A batch forward and backward as a step would run it; gradients are dropped, and the token budget is lowered
        to what fits."""
        self.model.train()
        freed = {} if self.in_backward is None else {"around_last": self.in_backward.steps.norm_pass}
        with self.updater.rehearsing(self.model) as quietly:
            backward = replace(self._plain_backward(), finite=False, **freed, **quietly)
            models, limits = replace(self.models(), together=self.together and not quietly), self.limits
            _, limits = surviving_step(models, batch, self.objective, limits=limits, totals=Totals(), backward=backward)
        if limits != self.limits:
            self.token_budget = limits.tokens
        self.updater.zero_grad(self.model)

    def optimizer_step(self, *args: Any) -> Any:
        """Steps the optimizer along the gradients that are there."""
        self._check_loss()
        if self.not_reached is None:
            self.not_reached = self.updater.not_reached(self.model)
        self.reserved.clear()
        with self.phases.during("optimizer"):
            return self.updater.step(*args)

    def clip(self) -> Tensor:
        """Clips the gradients to `max_grad_norm`, and returns the norm that they had; 0 leaves them as they are."""
        if self.in_backward is not None and self.in_backward.norm is not None:
            norm, self.in_backward.norm = self.in_backward.norm, None
            return norm
        return self._norm(self.options.max_grad_norm or None)

    def gradient_norm(self) -> Tensor | None:
        """The norm of the gradients; None where they are gone before they were all there."""
        return self._norm() if self.updater.has_gradients(self.model) else None

    def _norm(self, clip_at: float | None = None) -> Tensor:
        try:
            norm = self.updater.norm(self.model, clip_at)
        except NotFiniteStep:
            self._check_loss()  # whence a gradient that is no number comes as a rule
            raise
        self._check_loss()
        return norm

    def _check_loss(self) -> None:
        """Looks at the loss of a step, once all of it runs.

        Raises:
            NotFiniteStep: it is no number.
        """
        if self._unchecked is None:
            return
        (loss, batch), self._unchecked = self._unchecked, None
        try:
            check_finite(loss)
        except NotFinite as error:
            raise self._nonfinite(batch, str(error)) from None

    # -- other forwards ----------------------------------------------------------------------------------------------

    def evaluate(
        self, batch: RaggedBatch, totals: Totals, model: nn.Module | None = None
    ) -> list[tuple[RaggedBatch, ScoreOutput]]:
        """Adds the loss and the metrics of a batch to `totals`; what each micro-batch gave, with no logits."""
        models = replace(self.models(model), around=self._around)
        with self.phases.during("evaluation"):
            return evaluate_batch(models, batch, self.method_objective, totals, limits=self.evaluation_limits)

    def reference_logprobs(self, batch: RaggedBatch, limits: Limits) -> Tensor:
        """[scores]: the reference's log-probabilities of a batch, in micro-batches within the limits."""
        assert self.reference is not None, "there is no reference"
        return self.scored(batch, self.reference, limits)

    def scored(self, batch: RaggedBatch, scorer: Scorer, limits: Limits | None = None) -> Tensor:
        """[scores]: what a forward without gradients gives, in micro-batches within the limits of a step, or others."""
        limits, models = self.limits_of(batch) if limits is None else limits, self.models()
        return surviving_scores(models, batch, limits, scorer, why_whole_rows=models.why_not_chains(self.objective))

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What steps leave behind beside weights, optimizer and random state."""
        smaller = self.token_budget != self.options.tokens_per_microbatch
        running = getattr(self.objective, "running", None)
        return {
            "token_budget": self.token_budget if smaller else None,
            "running": {} if running is None else vars(running),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there; an option that is smaller than the budget by now is the cap."""
        if state["token_budget"] is not None:
            self.token_budget = int(min(state["token_budget"], self.options.tokens_per_microbatch or math.inf))
        if state["running"]:
            vars(cast(Any, self.objective).running).update(state["running"])

    # -- inside ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _forward(self) -> Iterator[None]:
        with self.phases.during("forward"), self._around():
            yield

    def _backward(self, loss: Tensor) -> None:
        with self.phases.during("backward"):
            self.updater.backward(loss)

    def _backward_of_finite(self, loss: Tensor) -> None:
        """For a backward that steps: once it has run, the weights no longer tell where a NaN came from."""
        check_finite(loss)
        self._backward(loss)

    def _plain_backward(self) -> Backward:
        """How a step goes backward and meets the other ranks."""
        found = Backward(
            backward=self._backward,
            grad_scale=self.updater.grad_scale,
            no_sync=self.updater.accumulating,
            finite=distributed(),
            abandon=functools.partial(self.updater.abandon, self.model),
        )
        exchange = self.updater.exchange(self.model)
        if exchange is None:
            return found
        return replace(found, exchange=exchange.complete, overlap=exchange.overlap, forgo=exchange.forgo)

    def _take(self, batch: RaggedBatch, *, in_backward: bool = False) -> Tensor:
        requested = self.limits_of(batch)
        loss, limits = surviving_step(
            self.models(self.updater.policy(self.model)),
            batch,
            self.objective,
            limits=requested,
            totals=self.totals,
            backward=self._plain_backward(),
            **{"of_one_forward": self._stepping} if in_backward else {},
        )
        if limits != requested:
            self.token_budget = limits.tokens
        return loss

    def _stepping(self, step: Step, backward: Backward, totals: Totals) -> Tensor:
        """A step of one forward, which steps the optimizer in its backward; where gradients are clipped, in a second
        one, since their norm is known after the first."""
        found = self.in_backward
        assert found is not None, "the optimizer steps after backward"
        backward = replace(backward, backward=self._backward_of_finite)
        if found.max_grad_norm:
            before = StepSnapshot(self.objective, self.device)
            step.run(replace(backward, around_last=found.steps.norm_pass), Totals())
            before.put_back()
            self.updater.check_norm(found.steps.total_norm, self.model)
        return step.run(replace(backward, around_last=found.stepping), totals)

    def _nonfinite(self, batch: RaggedBatch, what: str, own: bool = True) -> NotFiniteStep:
        """What stops a run: this rank says where it comes from, unless it is another's."""
        self.updater.zero_grad(self.model)
        found = "That rank says where it comes from"
        if self.waited_for:  # a forward of this rank alone would wait for the others
            found = "Train with whole weights and sequences on each rank, or on one rank, to hear where it comes from"
        elif own:
            found = self._find_nonfinite(batch)
        return NotFiniteStep(f"{what}. {found}. {REMEDIES}")

    def _find_nonfinite(self, batch: RaggedBatch) -> str:
        find = functools.partial(find_nonfinite, self.model, padding_free=self.padding_free)
        parts = parts_of(batch, self.limits_of(batch), self.device)
        findings = ("; ".join(filter(None, Chain(part).scores(find))) for part in parts)
        nothing = "a second forward of it is finite" + (", and another rank's may not be" if distributed() else "")
        with unfused(self.model):
            number, found = next(((n, f) for n, f in enumerate(findings) if f), (0, nothing))
        return f"Micro-batch {number}: {found}"
