"""An evaluation of a trainer, and what it gathers beside its sums."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_concat, nested_detach, nested_numpify
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from lowtide.compat.torch import tree_leaves, tree_map
from lowtide.data.batches.masking import EVALUATION
from lowtide.data.batches.values import LABEL, NUMBER, PLACE
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

logger = logging.getLogger(__name__)


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
        self.places: list[np.ndarray] = []
        """The order of their rows."""

    def take_in(self, results: list[tuple[RaggedBatch, ScoreOutput]]) -> None:
        for batch, output in results:
            if self.findings is not None:
                self.found.append(self.findings.keep(batch, output))
            if self.wanted:
                self.scored.append(self.head.predictions(output).cpu().numpy())
                self.targets.append(batch.row_values.get(LABEL, batch.score_target).cpu().numpy())
                of_rows = LABEL in batch.row_values
                places = batch.row_values[NUMBER if of_rows and NUMBER in batch.row_values else PLACE]
                places = places if of_rows else places[batch.row[batch.score_segment]]
                self.places.append(places.cpu().numpy())

    def metrics(self) -> dict[str, float]:
        """The method's metrics that need all scores, those of all ranks."""
        if self.findings is None:
            return {}
        found = [each for each in of_all_ranks(self.found) if each]
        return self.findings.metrics(
            {name: np.concatenate([each[name] for each in found]) for name in found[0]} if found else {}
        )

    def gathered(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Those of all ranks in the order of their rows, or None where nothing was taken in."""
        parts = of_all_ranks(self.scored), of_all_ranks(self.targets), of_all_ranks(self.places)
        if not parts[0]:
            return None, None
        scored, targets, places = map(np.concatenate, parts)
        order = np.argsort(places, kind="stable")
        return scored[order], targets[order]


def of_all_ranks(held: list[Any]) -> list[Any]:
    """What all ranks keep, the first rank's first."""
    return gather_object(held) if distributed() else held


class PaddedPredictions:
    """Logits, or what was made of them, and labels of padded batches, in host memory; for `compute_metrics` alone.

    Batches are padded with -100 to the longest, as `transformers.Trainer` does.
    """

    def metrics(self) -> dict[str, float]:
        """None beside those that are added up."""
        return {}

    def __init__(self) -> None:
        self.parts: list[tuple[np.ndarray, Any, Any]] = []
        """Of each micro-batch the places of its rows, predictions and labels."""

    def take_in(self, predictions: Any, labels: Any, batch: RaggedBatch) -> None:
        """Those of a micro-batch, None where there are none."""
        made, targets = (
            None if each is None else nested_numpify(nested_detach(each)) for each in (predictions, labels)
        )
        self.parts.append((batch.row_values[PLACE].cpu().numpy(), made, targets))

    def gathered(self) -> tuple[Any, Any]:
        """Those of all ranks, [lines, longest, ...], or None where nothing was taken in: in the order of their rows, or
        of micro-batches where lines are no rows."""
        parts = sorted(of_all_ranks(self.parts), key=lambda part: part[0].min())
        predictions, labels = (_in_order([(part[0], part[kind]) for part in parts]) for kind in (1, 2))
        return predictions, labels


def _in_order(parts: list[tuple[np.ndarray, Any]]) -> Any:
    """What some micro-batches have, end to end, in the order of their rows if each line is of one."""
    parts = [(places, values) for places, values in parts if values is not None]
    if not parts:
        return None
    joined = functools.reduce(lambda a, b: nested_concat(a, b, padding_index=IGNORE), [values for _, values in parts])
    if any(np.ndim(leaf) == 0 or len(leaf) != len(places) for places, values in parts for leaf in tree_leaves(values)):
        return joined
    order = np.argsort(np.concatenate([places for places, _ in parts]), kind="stable")
    return tree_map(lambda values: values[order], joined)


def _placed(batch: RaggedBatch, number: int) -> RaggedBatch:
    """This rank's batch of that number, whose rows know their order: batches are dealt out to ranks in turn."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if distributed() else (0, 1)
    first = (number * ranks + rank) << 32
    places = torch.arange(first, first + batch.rows, device=batch.token_ids.device)
    return replace(batch, row_values={**batch.row_values, PLACE: places})


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
            runner.evaluate(replace(batch, stands_in=True), Totals(), model)
            continue
        batch = _placed(batch if count == batch.rows else batch.select_rows(range(count)), number)
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
    if not sums.get("rows"):
        raise ValueError(
            f"eval_dataset gave no batch, so that `{prefix}_loss` has no value: it has no rows with something to "
            "predict. Pass other rows, or longer ones (max_length)"
        )
    metrics: dict[str, Any] = trainer.metrics_of(sums) | kept.metrics()
    metrics["loss"] = sums.get("loss", 0.0) + trainer.objective.aux_coefficient * metrics.get("aux_loss", 0.0)
    predictions, targets = kept.gathered()
    metrics = _prefixed(metrics, prefix)
    if trainer.compute_metrics is not None:
        found = _users_metrics(trainer.compute_metrics, EvalPrediction(predictions=predictions, label_ids=targets))
        users = _prefixed(found, prefix)
        _warn_of_replaced(*sorted(users.keys() & metrics.keys()))
        metrics |= users
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


def _prefixed(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """As plain numbers under the names that are logged; one that begins with the prefix stays, as transformers does."""
    plain: Any = denumpify_detensorize(dict(metrics))
    return {name if str(name).startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in plain.items()}


@functools.cache
def _warn_of_replaced(*names: str) -> None:
    """Says once which of the evaluation's own metrics are a function's."""
    if names:
        logger.warning(
            f"compute_metrics returned {', '.join(names)}, which take the place of what the evaluation measured by "
            "these names, also where the best checkpoint is chosen: give them other names to have both"
        )
