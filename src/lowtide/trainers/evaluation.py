"""What evaluation gathers beside its sums."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from transformers.trainer_pt_utils import nested_concat, nested_detach, nested_numpify

from lowtide.data.batches.values import LABEL, NUMBER
from lowtide.engine.heads.head import ScoreOutput
from lowtide.methods.method import Findings
from lowtide.ragged import RaggedBatch
from lowtide.ranks.world import distributed
from lowtide.score_rules import IGNORE


class Predictions:
    """What is kept of an evaluation, in host memory.

    Args:
        wanted: whether the numbers (log-probs, values, or likeliest labels) and the targets of all scores are, for
            `compute_metrics`.
        findings: the method's metrics that need all scores at once; None if it has none.
    """

    def __init__(self, wanted: bool, findings: Findings | None = None) -> None:
        self.wanted, self.findings = wanted, findings
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
                self.scored.append(output.predictions.cpu().numpy())
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
