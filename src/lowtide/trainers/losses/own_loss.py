"""Losses that users write themselves: `compute_loss` in a subclass, `compute_loss_func`, `prediction_step`.

They are written for padded batches with dense logits, so they get those: `inputs` as TRL's collators give them, and
`model(**inputs).logits`. The rest of the step stays: it is cut into micro-batches, each of which goes backward, and the
numbers do not depend on how it is cut. `loss_is_scaled_for_ga` of `transformers.Trainer` says what a loss is: a sum
divided by `num_items_in_batch` (True), or a mean over its micro-batch (False), which is weighted by the micro-batch's
share of the scored tokens, or pairs, of the whole step. Where it is None, a loss is computed once with another
`num_items_in_batch`, to see whether it is read.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any, cast

import torch
from datasets import Dataset
from torch import Tensor, nn

from lowtide.data.batches.collate import ragged_from_collated
from lowtide.data.batches.completion_rounds import has_rounds
from lowtide.engine.forward import causal_model, computing, score_shared
from lowtide.engine.heads.head import ScoreOutput
from lowtide.engine.layers.noise import noisy_embeddings
from lowtide.engine.padded import padded_inputs
from lowtide.memory.allocators.measure import bytes_text
from lowtide.methods.method import Objective, OwnLoss, TokenObjective
from lowtide.objectives.outcome import Counts
from lowtide.ops.logits.linear_logprobs import TokenStats
from lowtide.ragged import WEIGHT, RaggedBatch
from lowtide.step.cut import Part, split
from lowtide.step.metrics import Totals
from lowtide.step.models import scores_of
from lowtide.step.rank_sync import random_state, set_random_state
from lowtide.step_plan import Limits
from lowtide.trainers.evaluation import PaddedPredictions
from lowtide.trainers.losses.micro_batch import MicroBatch, are_whole
from lowtide.users_functions import called_for_user

logger = logging.getLogger(__name__)

OF_TRAINING, OF_EVALUATION = ("compute_loss", "compute_loss_func"), ("prediction_step", "preprocess_logits_for_metrics")
NEVER_CALLED = ("_compute_loss", "concatenated_forward", "dpo_loss", "get_batch_logps", "get_batch_loss_metrics")
"""Methods of TRL's trainers that subclasses override, and that have no part in a step here."""


class OwnLosses:
    """The loss of a trainer where a subclass or a function computes it, and the method's loss of a padded micro-batch.

    Args:
        plain: the class of the trainer's bases that has the method's own `compute_loss` and `prediction_step`.
    """

    def __init__(self, trainer: Any, plain: type) -> None:
        self.trainer, self.plain = trainer, plain
        self._micro: MicroBatch | None = None
        self._is_sum: bool | None = None
        """Whether a loss is divided by `num_items_in_batch`, as far as it is known."""

    @property
    def args(self) -> Any:
        """The options, which a trainer may not have yet when this is made."""
        return self.trainer.args

    @property
    def title(self) -> str:
        """What the trainer is called."""
        return type(self.trainer).__name__

    def parts(self, *names: str) -> list[str]:
        """Those of the methods that a subclass overrides, or of the functions that were passed."""
        kind, methods = type(self.trainer), [name for name in names if hasattr(self.plain, name)]
        return [
            *(name for name in methods if getattr(kind, name) is not getattr(self.plain, name)),
            *(name for name in names if name not in methods and getattr(self.trainer, name, None) is not None),
        ]

    def in_place_of(self, objective: Objective) -> Objective:
        """The objective, or the loss in its place that a subclass or a function computes.

        Raises:
            ValueError: the method has no form in which a loss of one's own can be computed, or something is overridden
                that is not called; says what to override.
        """
        title = self.title
        for name in NEVER_CALLED:
            if hasattr(type(self.trainer), name):
                raise ValueError(
                    f"{title}.{name} would not be called: a step computes log-probabilities without logits. Override "
                    "`make_objective`, which returns the loss of log-probs, or `compute_loss`"
                )
        found = self.parts(*OF_TRAINING, *OF_EVALUATION)
        if not found:
            return objective
        whole = objective.over == "step"
        if self.trainer.plain_completions is None or whole:
            why = "this loss is of the whole batch of a step, over all its micro-batches"
            why = why if whole else "padded batches with logits are for SFTTrainer, DPOTrainer and RewardTrainer"
            raise ValueError(
                f"{title} overrides {found[0]}, and {why}: override `make_objective`, which returns the loss of "
                "log-probs, or drop it"
            )
        if self.args.sharding.pipeline_parallel > 1:
            raise ValueError(
                f"{title} overrides {found[0]}, whose forwards are of a whole model, and pipeline_parallel_size="
                f"{self.args.pipeline_parallel_size} splits it: override `make_objective`, or drop one of them"
            )
        if self.args.memory_budget and self.parts(*OF_TRAINING):
            raise ValueError(
                f"memory_budget={self.args.memory_budget!r} predicts the memory of a step without logits, and {title} "
                f"has a {found[0]} of its own: set per_device_train_batch_size and tokens_per_microbatch instead"
            )
        if not self.parts(*OF_TRAINING):
            return objective
        self._is_sum = getattr(self.trainer, "loss_is_scaled_for_ga", None)
        return OwnLoss(objective.inner, self._own_loss)

    def cost(self) -> str:
        """What padded batches with logits take, in words; empty without a loss of one's own."""
        found = self.parts(*OF_TRAINING)
        lengths = self.trainer.row_lengths() if found else None
        if not found:
            return ""
        text = f"{self.title}.{found[0]} on padded batches, with logits of rows x longest row x vocabulary"
        if lengths is None or not len(lengths):
            return text
        rows = self.args.per_device_train_batch_size * max(self.trainer.plain_completions, 1)
        vocabulary = causal_model(self.trainer.model).get_output_embeddings()
        if vocabulary is None:
            return f"{self.title}.{found[0]} on padded batches"
        size = 4 * rows * int(lengths.max()) * cast(Any, vocabulary).weight.shape[0]
        return f"{text}: up to {bytes_text(size)} in float32, and as much for their gradient"

    def check_rows(self, name: str, dataset: Any) -> None:
        """Refuses prepared rows of which a loss of one's own would not see all; those of a stream as they come.

        Raises:
            ValueError: messages have weights, or completions several turns.
        """
        columns = dataset.column_names or () if isinstance(dataset, Dataset) else ()
        if "loss_weights" in columns:
            raise ValueError(self._no_weights(name))
        if has_rounds(dict.fromkeys(columns, ())):
            raise ValueError(self._no_turns(name))

    def _no_weights(self, name: str) -> str:
        return (
            f"messages of {name} have weights between 0 and 1, which a loss of {self.title}'s own would not see: make "
            "them 0 or 1, or override `make_objective`, whose losses are weighted"
        )

    def _no_turns(self, name: str) -> str:
        return (
            f"completions of {name} have several turns, each with a context of its own, and a loss of {self.title}'s "
            "own would see each in one row: set turns='whole', or override `make_objective`"
        )

    # -- training ----------------------------------------------------------------------------------------------------

    def _own_loss(self, model: nn.Module, part: RaggedBatch, counts: Counts, totals: Totals) -> ScoreOutput:
        """The loss of a micro-batch as its part of the step's."""
        items = int(counts["scores"]) if "scores" in counts else None
        if self._is_sum is None and items not in (None, part.scores):
            self._is_sum = self._reads_items(model, part, counts)
        micro = self._handed_out(part, counts)
        loss = self._called(model, micro, items)
        if micro.outcome is not None:
            totals.take_outcome(micro.outcome)
        output = micro.output or ScoreOutput(stats={})
        output.loss = loss if self._is_sum else loss * micro.share
        self._micro = None
        return output

    def _called(self, model: nn.Module, micro: MicroBatch, items: int | None) -> Tensor:
        """`compute_loss` of a micro-batch; older overrides do not take `num_items_in_batch`.

        Raises:
            ValueError: it returned something else than one number, or a number that nothing can be learned from.
        """
        more: dict[str, Any] = {}
        takes = inspect.signature(self.trainer.compute_loss).parameters
        if "num_items_in_batch" in takes or any(each.kind is each.VAR_KEYWORD for each in takes.values()):
            more["num_items_in_batch"] = None if items is None else torch.tensor(items, device=self.args.device)
        mask = micro.inputs["attention_mask"]
        with computing(model), noisy_embeddings(causal_model(model), micro.batch, mask):
            loss = self.trainer.compute_loss(model, dict(micro.inputs), **more)
        if wrong := _no_loss(loss):
            name, *_ = self.parts(*OF_TRAINING)
            raise ValueError(f"{self.title}.{name} returned {wrong}")
        return loss.reshape(())

    @torch.no_grad()
    def _reads_items(self, model: nn.Module, part: RaggedBatch, counts: Counts) -> bool:
        """Whether the loss changes with `num_items_in_batch`; the random state is put back."""
        before, items = random_state(self.args.device), int(counts["scores"])
        found = []
        for count in (items, 2 * items):
            found.append(self._called(model, self._handed_out(part, counts), count).detach().double())
            set_random_state(before, self.args.device)
        once, twice = found
        if torch.isclose(once, twice, rtol=1e-6, atol=0):
            return False
        if not torch.isclose(once, 2 * twice, rtol=1e-3, atol=0):
            logger.warning(
                f"a part of {self.title}.compute_loss is divided by num_items_in_batch and a part is not, "
                "which is added once for each micro-batch: divide all of it, or set loss_is_scaled_for_ga = False "
                "and return a mean"
            )
        return True

    def _handed_out(self, part: RaggedBatch, counts: Counts) -> MicroBatch:
        trainer = self.trainer
        if WEIGHT in part.score_values:
            raise ValueError(self._no_weights("the dataset"))
        if trainer.plain_completions and not are_whole(part):
            raise ValueError(self._no_turns("the dataset"))
        pad_id = trainer.pad_id if trainer.pad_id is not None else getattr(trainer.tokenizer, "pad_token_id", None)
        self._micro = MicroBatch.of(part, counts, pad_id=pad_id or 0, with_completions=bool(trainer.plain_completions))
        return self._micro

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluates(self, predicts: bool) -> bool:
        """Whether evaluation needs padded batches with logits; `predicts` where predictions are kept."""
        of_predictions = OF_EVALUATION if predicts else OF_EVALUATION[:1]
        return bool(self.parts(*OF_TRAINING, *of_predictions))

    def evaluate(
        self, model: nn.Module, batch: RaggedBatch, totals: Totals, limits: Limits, kept: PaddedPredictions | None
    ) -> None:
        """Adds the loss of a batch to `totals`, and its predictions to what is kept of them."""
        totals.count(batch)
        for part in split(batch, limits, self.args.device):
            micro = self._handed_out(part, self.trainer.inner_objective.counts(part))
            mask = micro.inputs["attention_mask"]
            with computing(model), noisy_embeddings(causal_model(model), part, mask), torch.no_grad():
                loss, logits, labels = self.trainer.prediction_step(model, dict(micro.inputs), kept is None)
            if micro.outcome is not None:
                totals.take_outcome(micro.outcome)
            if loss is not None:
                count = part.scores if "scores" in micro.counts else part.rows
                totals.add_mean("loss", loss.detach().mean() * count, count)
            if kept is not None:
                if (prepare := self.trainer.preprocess_logits_for_metrics) is not None:
                    with called_for_user("preprocess_logits_for_metrics", prepare):
                        logits = prepare(logits, labels)
                kept.take_in(logits, labels, part)
            self._micro = None

    def predicted(self, model: nn.Module, inputs: Any, *, loss_only: bool) -> tuple[Any, Any, Any]:
        """(loss, logits, labels) of a padded micro-batch; the latter two are None with `loss_only`."""
        labels = inputs.get("labels", inputs["input_ids"])
        with torch.no_grad():
            if loss_only:
                return self.trainer.compute_loss(model, inputs), None, None
            loss, outputs = self.trainer.compute_loss(model, inputs, return_outputs=True)
        return loss, outputs["logits"] if isinstance(outputs, Mapping) else outputs[0], labels

    # -- the method's loss ---------------------------------------------------------------------------------------------

    def of_method(self, model: nn.Module, inputs: Any, return_outputs: bool, num_items_in_batch: Any) -> Any:
        """The method's loss; the arguments are those of `compute_loss`.

        Raises:
            ValueError: pairs whose inputs were changed.
        """
        if self.trainer.compute_loss_func is not None:
            outputs = model(**{name: each for name, each in inputs.items() if name in ("input_ids", "attention_mask")})
            loss_func, labels = self.trainer.compute_loss_func, inputs.get("labels")
            with called_for_user("compute_loss_func", loss_func):
                loss = loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
            return (loss, outputs) if return_outputs else loss
        micro = self.micro_of(inputs)
        objective: Any = self.trainer.inner_objective
        outputs, found = self._read(model, micro, return_outputs)
        if isinstance(objective, TokenObjective):
            items = micro.batch.scores if num_items_in_batch is None else num_items_in_batch
            loss = objective.loss(TokenStats(**found.stats)).sum() / items
        else:
            referred = self.trainer.runner.models(model).referred(Part.of(micro.batch), objective)
            micro.outcome = outcome = objective.loss(objective.read(micro.batch, found.stats, referred), micro.counts)
            loss = outcome.loss / micro.share
        stats = {name: value.detach() for name, value in found.stats.items()}
        micro.output = ScoreOutput(loss.detach(), stats, found.aux_loss)
        return (loss, outputs) if return_outputs else loss

    def _read(self, model: nn.Module, micro: MicroBatch, with_logits: bool) -> tuple[Any, ScoreOutput]:
        """(outputs with logits or None, what the method reads, with gradients)."""
        objective, batch = self.trainer.inner_objective, micro.batch
        scores = scores_of(batch, objective, accumulate=False)
        if not with_logits:
            scores = type(scores)(scores.index, scores.target, objective.want, aux_loss=scores.aux_loss)
            padding_free = self.trainer.runner.models(model).padding_free
            return None, score_shared(model, batch, scores, padding_free=padding_free)
        more = {"output_router_logits": True} if scores.aux_loss else {}
        outputs = model(input_ids=micro.inputs["input_ids"], attention_mask=micro.inputs["attention_mask"], **more)
        longest = micro.inputs["input_ids"].shape[1]
        stats = self.trainer.head.dense_stats(outputs.logits, micro.index, batch.score_target, longest, objective.want)
        return outputs, ScoreOutput(stats=stats, aux_loss=getattr(outputs, "aux_loss", None))

    def micro_of(self, inputs: Mapping[str, Any]) -> MicroBatch:
        """The micro-batch that inputs are of.

        Raises:
            ValueError: pairs whose inputs were changed.
        """
        micro = self._micro
        if micro is not None and micro.is_as_given(inputs):
            return micro
        if self.trainer.plain_completions:
            raise ValueError(
                f"{self.title}: super().compute_loss got inputs that were changed, of which the pairs are not "
                "known: pass on those that came"
            )
        batch = ragged_from_collated(inputs).to(self.args.device)
        _, index = padded_inputs(batch)
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        self._micro = MicroBatch(batch, given, index, {} if micro is None else micro.counts)
        return self._micro


def _no_loss(loss: Any) -> str:
    """What is wrong with what should be a loss; empty for one that can be trained by."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, Tensor) else ""
        return f"{type(loss).__name__}{shape}: it must return one number as a tensor"
    if not loss.is_floating_point():
        return f"a tensor of {loss.dtype}: it must return a real number in floating point"
    if torch.is_grad_enabled() and not loss.requires_grad:
        return (
            "a tensor without a gradient, which would train nothing: compute it from the model's outputs by operations "
            "of torch, without detach(), item() and no_grad()"
        )
    return ""
