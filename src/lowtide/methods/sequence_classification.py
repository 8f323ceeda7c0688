"""Sequence classification: what a whole text, or a pair of texts, is said to be. One of several classes, any number of
them, or numbers to be predicted, as transformers' `problem_type` names these."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from lowtide.data.batches.values import LABEL
from lowtide.data.formats.labelled import MULTIPLE, PROBLEMS, REGRESSION, SINGLE
from lowtide.engine.heads.classes import LOGITS, SequenceClasses
from lowtide.engine.heads.head import ScoreOutput, Stats
from lowtide.methods.method import Labels, Method, RowObjective
from lowtide.methods.shared.class_weights import WeightedClasses, class_weights
from lowtide.methods.shared.options import TaskLength
from lowtide.methods.shared.rows import LabelledTexts
from lowtide.objectives.classes import binary_nll, label_nll, squared_errors
from lowtide.objectives.outcome import Counts, Outcome, mean_of
from lowtide.option import COUNT, NOT_NEGATIVE, option
from lowtide.ragged import RaggedBatch


@dataclass(kw_only=True)
class SequenceClassificationOptions(WeightedClasses, TaskLength):
    """The options of sequence classification, under the names of transformers' `run_classification.py` where it has
    them."""

    # data
    text_column_names: list[str] | None = option(
        None, "Column of the text, or the two columns of a pair. None: those of GLUE, such as `text` or `premise`."
    )
    label_column_name: str | None = option(None, "Column of the labels. None: `label` or `labels`.")
    class_names: list[str] | None = option(
        None, "All labels, in the order of their numbers. None: as the dataset names them, or as its rows have them."
    )
    dataset_num_proc: int | None = option(None, "Processes that prepare the dataset.", NOT_NEGATIVE)
    max_length: int | None = option(512, "Most tokens of a row, of a pair in all. None is no limit.", COUNT)
    pad_token: str | None = option(
        None, "Token that a trained decoder takes for padding. None: the tokenizer's, or the one that ends a text."
    )
    # objective
    problem_type: str | None = option(
        None,
        "What labels are: one of several classes, any number of them, or numbers. None: as transformers tells them.",
        choices=[*PROBLEMS],
    )
    label_smoothing_factor: float = option(0.0, "Share of the uniform distribution in each target.")

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.take_max_seq_length()
        if self.text_column_names is not None and len(self.text_column_names) not in (1, 2):
            raise ValueError(f"text_column_names={self.text_column_names}: name one column, or the two of a pair")
        if self.class_names is not None and len(set(self.class_names)) < max(len(self.class_names), 2):
            raise ValueError(f"class_names={self.class_names}: name each label once, and at least two")
        if self.problem_type == REGRESSION:
            self.check_regression()
        if self.problem_type == MULTIPLE:
            self.check_multiple()
        self.check_weights()

    def check_regression(self) -> None:
        """Refuses what is of classes."""
        for name in ("class_names", "class_weights"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is of classes, and a regression has none: leave it out")
        self.check_multiple(f"problem_type={REGRESSION!r}")

    def check_multiple(self, problem: str = f"problem_type={MULTIPLE!r}") -> None:
        """Refuses what is of one class among several."""
        if self.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor} smooths the choice of one class, and {problem} "
                "makes none: leave it out"
            )


@dataclass(frozen=True)
class LabelScores:
    """The logits of some texts, and what they are to say."""

    logits: Float[Tensor, "rows labels"]
    target: Tensor
    """[rows]: classes; or [rows, labels]: 1 for those that hold, or the values to be predicted."""


def read_labels(batch: RaggedBatch, stats: Stats, reference: Tensor | None) -> LabelScores:
    """The logits of each row."""
    return LabelScores(stats[LOGITS], batch.row_values[LABEL][batch.row[batch.score_segment]])


Loss = Callable[..., Outcome]


def single_label(scores: LabelScores, counts: Counts, *, weights: Tensor | None, smoothing: float) -> Outcome:
    """The cross-entropy, over the weights of all targets of the whole batch."""
    weights = None if weights is None else weights.to(scores.logits)
    right = scores.logits.detach().argmax(-1) == scores.target
    nll = label_nll(scores.logits, scores.target, weights, smoothing)
    return Outcome(nll / (counts["weights"] or 1.0), {"accuracy": mean_of(right.float())})


def multi_label(scores: LabelScores, counts: Counts, *, weights: Tensor | None, smoothing: float) -> Outcome:
    """The binary cross-entropy of all labels, over the weights of the labels of all rows."""
    weights = None if weights is None else weights.to(scores.logits)
    target = scores.target.to(scores.logits)
    right = ((scores.logits.detach() > 0) == target.bool()).all(-1)
    nll = binary_nll(scores.logits, target, weights)
    return Outcome(nll / (counts["weights"] or 1.0), {"accuracy": mean_of(right.float())})


def regression(scores: LabelScores, counts: Counts, *, weights: Tensor | None, smoothing: float) -> Outcome:
    """The mean squared error."""
    errors = squared_errors(scores.logits, scores.target.to(scores.logits).reshape(scores.logits.shape))
    return Outcome(errors / (counts["weights"] or 1.0))


LOSSES: dict[str, Loss] = {SINGLE: single_label, MULTIPLE: multi_label, REGRESSION: regression}


def counts(batch: RaggedBatch, *, problem: str, labels: int, weights: Tensor | None) -> Counts:
    """The weights of all that a batch is compared in; without weights their number."""
    if problem != SINGLE:
        return {"weights": batch.scores * (labels if weights is None else weights.double().sum().item())}
    if weights is None:
        return {"weights": batch.scores}
    return {"weights": weights.double()[batch.row_values[LABEL].cpu()].sum().item() if batch.scores else 0.0}


def objective(
    options: SequenceClassificationOptions, *, aux_coefficient: float = 0.0, labels: Labels | None = None
) -> RowObjective:
    """The loss of what the labels are, over texts."""
    problem = (labels.problem if labels is not None else options.problem_type) or SINGLE
    if problem == REGRESSION:
        options.check_regression()
    if problem == MULTIPLE:
        options.check_multiple(f"several labels hold at once ({MULTIPLE}), which")
    weights = None if options.class_weights is None or labels is None else class_weights(options.class_weights, labels)
    return RowObjective(
        read=read_labels,
        loss=functools.partial(LOSSES[problem], weights=weights, smoothing=options.label_smoothing_factor),
        counts=functools.partial(
            counts, problem=problem, labels=len(labels.names) if labels is not None else 1, weights=weights
        ),
        aux_coefficient=aux_coefficient,
        mean_over="weights",
        head=SequenceClasses,
    )


@dataclass
class ClassFindings:
    """What is found over all texts of an evaluation: F1 of classes, or how predicted values go with the right ones."""

    problem: str

    def keep(self, batch: RaggedBatch, output: ScoreOutput) -> Mapping[str, np.ndarray]:
        """The classes, or values, of each row, right ones and predicted ones."""
        target, found = batch.row_values[LABEL], output.stats[LOGITS]
        if self.problem == SINGLE:
            found = found.argmax(-1)
        if self.problem == MULTIPLE:
            found = found > 0
        rows = batch.row[batch.score_segment]
        return {"target": target[rows].cpu().numpy(), "found": found.float().cpu().numpy()}

    def metrics(self, kept: Mapping[str, np.ndarray]) -> dict[str, float]:
        """`f1`, the mean over classes; of a regression `mse` and `pearson`, means over the predicted values, the latter
        where it is defined."""
        if not kept:
            return {}
        target, found = kept["target"].astype(np.float64), kept["found"].astype(np.float64)
        if self.problem == REGRESSION:
            target, found = target.reshape(len(target), -1), found.reshape(len(found), -1)
            error, correlation = float(((target - found) ** 2).mean()), pearson(target, found)
            return {"mse": error} if correlation is None else {"mse": error, "pearson": correlation}
        if self.problem == SINGLE:
            classes = np.union1d(target, found)
            target, found = target[:, None] == classes, found[:, None] == classes
        return {"f1": macro_f1(target.astype(bool), found.astype(bool))}


def macro_f1(target: np.ndarray, found: np.ndarray) -> float:
    """The mean over labels of 2 x right / (said + true), 0 for a label that is neither said nor true.

    Args:
        target: [rows, labels], whether a label is true; likewise `found`, whether it is said.
    """
    right, either = (target & found).sum(0), target.sum(0) + found.sum(0)
    return float(np.divide(2 * right, either, out=np.zeros(len(either)), where=either > 0).mean())


def pearson(target: np.ndarray, found: np.ndarray) -> float | None:
    """Pearson's correlation of each column of [rows, values], and the mean of these; None if a column's values are all
    equal, which has none."""
    target, found = target - target.mean(0), found - found.mean(0)
    sizes = np.sqrt((target**2).sum(0) * (found**2).sum(0))
    return float(((target * found).sum(0) / sizes).mean()) if (sizes > 0).all() else None


def findings(options: Any, labels: Labels) -> ClassFindings:
    """What an evaluation finds over all texts."""
    return ClassFindings(labels.problem or SINGLE)


METHOD = Method(
    "sequence-classification",
    "sequence classification",
    SequenceClassificationOptions,
    LabelledTexts(),
    objective,
    head=SequenceClasses,
    findings=findings,
)
