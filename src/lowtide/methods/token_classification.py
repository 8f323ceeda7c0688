"""Token classification: a label for each word, read at its tokens."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.data.batches.values import DOCUMENT, WORDS
from lowtide.engine.heads.classes import LOGITS, TokenClasses
from lowtide.engine.heads.head import ScoreOutput, Stats
from lowtide.methods.method import Labels, Method, RowObjective
from lowtide.methods.shared.class_weights import WeightedClasses, class_weights
from lowtide.methods.shared.options import TaskLength
from lowtide.methods.shared.rows import Tags
from lowtide.objectives.classes import label_nll
from lowtide.objectives.entities import PREFIXES, entity_scores
from lowtide.objectives.outcome import Counts, Outcome, mean_of
from lowtide.option import COUNT, NOT_NEGATIVE, option
from lowtide.ragged import RaggedBatch

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TokenClassificationOptions(WeightedClasses, TaskLength):
    """The options of token classification, under the names of transformers' `run_ner.py` where it has them."""

    # data
    text_column_name: str | None = option(None, "Column of the words. None: `tokens`, `words`, or `input_ids`.")
    label_column_name: str | None = option(None, "Column of the labels. None: `ner_tags`, `tags` or `labels`.")
    tag_names: list[str] | None = option(
        None, "All labels, in the order of their numbers. None: as the dataset names them, or as its rows have them."
    )
    dataset_num_proc: int | None = option(None, "Processes that prepare the dataset.", NOT_NEGATIVE)
    label_all_tokens: bool = option(
        False, "Score all tokens of a word, with I- in place of B- after the first. False scores the first alone."
    )
    max_length: int | None = option(512, "Most tokens of a row, or of a window of one. None is no limit.", COUNT)
    long_rows: str = option(
        "windows",
        "What becomes of longer rows: windows that overlap, each token scored in one of them; or cut.",
        choices=["windows", "cut"],
    )
    stride: int | None = option(
        None, "Tokens that neighbouring windows of a long row share. None: a quarter of a window.", NOT_NEGATIVE
    )
    # objective
    label_smoothing_factor: float = option(0.0, "Share of the uniform distribution in each target.")
    return_entity_level_metrics: bool = option(
        False, "Also log precision, recall and F1 of each type of entity in evaluation."
    )

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.take_max_seq_length()
        if self.stride is not None and (self.long_rows == "cut" or self.max_length is None):
            why = "long_rows='cut'" if self.long_rows == "cut" else "max_length=None"
            raise ValueError(f"stride={self.stride} is of windows, and {why} makes none: leave stride out")
        if self.tag_names is not None and len(set(self.tag_names)) < max(len(self.tag_names), 1):
            raise ValueError(f"tag_names={self.tag_names}: name each label once")
        self.check_weights()


@dataclass(frozen=True)
class TagScores:
    """The logits at some tokens, and the labels there."""

    logits: Float[Tensor, "scores labels"]
    target: Int[Tensor, " scores"]


def read_tags(batch: RaggedBatch, stats: Stats, reference: Tensor | None) -> TagScores:
    """The logits of labels at the scored tokens."""
    return TagScores(stats[LOGITS], batch.score_target)


def loss(scores: TagScores, counts: Counts, *, weights: Tensor | None, smoothing: float) -> Outcome:
    """The cross-entropy, over the weights of all targets of the whole batch."""
    weights = None if weights is None else weights.to(scores.logits)
    right = scores.logits.detach().argmax(-1) == scores.target
    nll = label_nll(scores.logits, scores.target, weights, smoothing)
    return Outcome(nll / (counts["weights"] or 1.0), {"accuracy": mean_of(right.float())})


def counts(batch: RaggedBatch, *, weights: Tensor | None) -> Counts:
    """The weights of all targets of a batch; without weights their number."""
    if weights is None:
        return {"weights": batch.scores}
    return {"weights": weights.double()[batch.score_target.cpu()].sum().item()}


def objective(
    options: TokenClassificationOptions, *, aux_coefficient: float = 0.0, labels: Labels | None = None
) -> RowObjective:
    """The loss of the options over scored tokens."""
    weights = None if options.class_weights is None or labels is None else class_weights(options.class_weights, labels)
    return RowObjective(
        read=read_tags,
        loss=functools.partial(loss, weights=weights, smoothing=options.label_smoothing_factor),
        counts=functools.partial(counts, weights=weights),
        aux_coefficient=aux_coefficient,
        mean_over="weights",
    )


@dataclass
class EntityFindings:
    """Precision, recall and F1 of entities, over documents whose windows are put together again."""

    names: Sequence[str]
    of_types: bool

    def keep(self, batch: RaggedBatch, output: ScoreOutput) -> Mapping[str, np.ndarray]:
        """The document, the word, the label and the likeliest label of each score that stands for a word; nothing of a
        batch that does not know its words."""
        if WORDS not in batch.score_values:
            return {}
        document = batch.row_values[DOCUMENT][batch.row[batch.score_segment]]
        word = batch.score_values[WORDS]
        first = word >= 0
        columns = {
            "document": document,
            "word": word,
            "target": batch.score_target,
            "found": TokenClasses.predictions(output),
        }
        return {name: each[first].cpu().numpy().astype(np.int32) for name, each in columns.items()}

    def metrics(self, kept: Mapping[str, np.ndarray]) -> dict[str, float]:
        """`precision`, `recall` and `f1`; of labels that begin with B-, I-, E- or S-, as those of entities do."""
        if not kept or not any(name.startswith(PREFIXES) for name in self.names):
            return {}
        names = np.array(self.names, dtype=object)
        order = np.lexsort((kept["word"], kept["document"]))
        bounds = np.flatnonzero(np.diff(kept["document"][order])) + 1
        parts = (np.split(names[kept[column][order]], bounds) for column in ("target", "found"))
        scores = entity_scores((truth.tolist(), guess.tolist()) for truth, guess in zip(*parts, strict=True))
        whole = scores.pop("")
        found = {name: whole[name] for name in ("precision", "recall", "f1")}
        if self.of_types:
            found |= {f"{kind}_{name}": value for kind, own in scores.items() for name, value in own.items()}
        return found


def findings(options: Any, labels: Labels) -> EntityFindings:
    """What an evaluation finds of entities."""
    if options.return_entity_level_metrics and not any(name.startswith(PREFIXES) for name in labels.names):
        logger.warning(
            "return_entity_level_metrics=True has no effect: none of the labels begins with B-, I-, E- or S-, as those "
            f"of entities do ({', '.join(labels.names[:12])})"
        )
    return EntityFindings(labels.names, options.return_entity_level_metrics)


METHOD = Method(
    "token-classification",
    "token classification",
    TokenClassificationOptions,
    Tags(),
    objective,
    head=TokenClasses,
    findings=findings,
)
