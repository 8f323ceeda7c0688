"""An evaluation of a trainer, and what it gathers beside its sums."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_concat, nested_detach, nested_numpify
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from lowtide.data.batches.masking import EVALUATION
from lowtide.data.batches.values import LABEL, NUMBER
from lowtide.engine.heads.head import Head, ScoreOutput
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.methods.method import Findings
from lowtide.ragged import RaggedBatch
from lowtide.ranks.world import distributed
from lowtide.run.edge import TO_DO
from lowtide.score_rules import IGNORE
from lowtide.step.metrics import Totals
from lowtide.step.rank_sync import RankSync
from lowtide.users_functions import called_for_user


class Predictions:
    """What is kept of an evaluation, in host memory.

    Args:
        wanted: whether the numbers (log-probs, values, or likeliest labels) and the targets of all scores are, for
            `compute_metrics`.
        findings: the method's metrics that need all scores at once; None if it has none.
        head: what was read.
    """

    def __init__(self, wanted: bool, findings: Findings | None = None, head: type[Head] = LanguageModel) -> None:
        self.wanted, self.findings, self.head = wanted, findings, head
        self.scored: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self.found: list[Mapping[str, np.ndarray]] = []
        self.numbers: list[np.ndarray] = []
        """The rows' numbers in their dataset, of rows with a label each."""

    def take_in(self, results: list[tuple[RaggedBatch, ScoreOutput]]) -> None:
        for batch, output in results:
            if self.findings is not None:
                self.found.append(self.findings.keep(batch, output))
            if self.wanted:
                self.scored.append(self.head.predictions(output).cpu().numpy())
                self.targets.append(batch.row_values.get(LABEL, batch.score_target).cpu().numpy())
                if LABEL in batch.row_values:
                    self.numbers.append(batch.row_values[NUMBER].cpu().numpy())

    def metrics(self) -> dict[str, float]:
        """The method's metrics that need all scores, those of all ranks."""
        if self.findings is None:
            return {}
        found = [each for each in (gather_object(self.found) if distributed() else self.found) if each]
        return self.findings.metrics(
            {name: np.concatenate([each[name] for each in found]) for name in found[0]} if found else {}
        )

    def gathered(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Those of all ranks, or None where nothing was taken in; of rows with a label each in the dataset's order."""
        parts = (self.scored, self.targets, self.numbers)
        if distributed():
            parts = tuple(map(gather_object, parts))
        if not parts[0]:
            return None, None
        scored, targets = (np.concatenate(each) for each in parts[:2])
        if not parts[2]:
            return scored, targets
        order = np.argsort(np.concatenate(parts[2]), kind="stable")
        return scored[order], targets[order]


class PaddedPredictions:
    """Logits, or what was made of them, and labels of padded batches, in host memory; for `compute_metrics` alone.

    Batches are padded with -100 to the longest, as `transformers.Trainer` does.
    """

    def metrics(self) -> dict[str, float]:
        """None beside those that are added up."""
        return {}

    def __init__(self) -> None:
        self.predictions: list[Any] = []
        self.labels: list[Any] = []

    def take_in(self, predictions: Any, labels: Any) -> None:
        for held, value in ((self.predictions, predictions), (self.labels, labels)):
            if value is not None:
                held.append(nested_numpify(nested_detach(value)))

    def gathered(self) -> tuple[Any, Any]:
        """Those of all ranks, [lines, longest, ...], or None where nothing was taken in."""
        found = []
        for held in (self.predictions, self.labels):
            whole = gather_object(held) if distributed() else held
            found.append(
                functools.reduce(lambda a, b: nested_concat(a, b, padding_index=IGNORE), whole) if whole else None
            )
        return found[0], found[1]


def evaluated(trainer: Any, model: nn.Module, loader: DataLoader, *, wanted: bool, prefix: str) -> EvalLoopOutput:
    """The loss of every scored token of a dataset, and the metrics; memory does not grow with it.

    Args:
        wanted: whether predictions are kept.
        prefix: of the metrics' names.
    """
    runner, device, own_loss = trainer.runner, trainer.args.device, trainer.own_loss
    leads = runner.models(model).leads
    totals, rows, sync = Totals(), 0, RankSync("evaluation", remedy=TO_DO["evaluating"])
    kept = PaddedPredictions() if own_loss.evaluates(wanted) else trainer.predictions(wanted, model)
    for number, inputs in enumerate(loader):
        trainer.stopping.leave_evaluation()
        batch = trainer.drawn(trainer.as_ragged(inputs), EVALUATION)
        count = trainer.batch_maker.own_rows(batch)
        trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
        if count == 0 or sync.failed:  # ranks take equally many batches, and meet after the last
            runner.accompany(batch, model)
            continue
        batch = batch if count == batch.rows else batch.select_rows(range(count))
        sync.micro_batch, sync.part = number, batch
        local = sync.local(waited_for=runner.waited_for)
        with local, trainer.phases.during("evaluation"), trainer.compute_loss_context_manager():
            if isinstance(kept, PaddedPredictions):
                own, seen = kept if wanted and leads else None, totals if leads else Totals()
                own_loss.evaluate(model, batch, seen, runner.evaluation_limits, own)
            else:
                results = runner.evaluate(batch, totals, model)
                if leads:
                    kept.take_in(results)
            rows += batch.rows if leads else 0
        if not distributed():
            sync.meet(device)
    sync.meet(device)
    totals.add(rows=rows)
    sums = totals.read(device)
    metrics: dict[str, Any] = trainer.metrics_of(sums) | kept.metrics()
    metrics["loss"] = sums.get("loss", 0.0) + trainer.objective.aux_coefficient * metrics.get("aux_loss", 0.0)
    predictions, targets = kept.gathered()
    if trainer.compute_metrics is not None:
        metrics |= _users_metrics(trainer.compute_metrics, EvalPrediction(predictions=predictions, label_ids=targets))
    plain: Any = denumpify_detensorize(metrics)
    metrics = {f"{prefix}_{name}": value for name, value in plain.items()}
    return EvalLoopOutput(predictions, targets, metrics, int(sums.get("rows", 0)))


def _users_metrics(compute_metrics: Any, of: EvalPrediction) -> Mapping[str, Any]:
    """What `compute_metrics` returns.

    Raises:
        ValueError: it is no mapping.
    """
    with called_for_user("compute_metrics", compute_metrics):
        found = compute_metrics(of)
    if not isinstance(found, Mapping):
        raise ValueError(
            f"compute_metrics returned {type(found).__name__}: it must return a mapping from names to numbers"
        )
    return found
