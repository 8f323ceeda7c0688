"""Replaced-token detection (ELECTRA, arXiv 2003.10555): a generator writes tokens in the place of masked ones, and a
discriminator learns to tell which these are.

The loss is that of the paper: the generator's mean over the masked tokens, and `discriminator_weight` times the
discriminator's mean over all tokens of the texts, special ones too, as in the authors' code and in transformers'
`ElectraForPreTraining`. The generator's draws carry no gradient. It deviates in whence a draw comes: each follows from
the seed, the epoch, the row and the place in it, so that a run that resumes draws the same.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.images import ImageReader
from lowtide.data.batches.masking import Masking
from lowtide.engine.heads.head import Stats
from lowtide.engine.heads.replaced_tokens import ReplacedTokens
from lowtide.methods.masked_lm import MaskedLMOptions, MaskedTexts
from lowtide.methods.method import Method, RowObjective
from lowtide.methods.shared.paper import Paper
from lowtide.methods.shared.rows import Preparation, Prepared
from lowtide.objectives.outcome import Counts, Mean, Outcome
from lowtide.objectives.replaced import detection_nll
from lowtide.ops.float64 import to_float64
from lowtide.option import NOT_NEGATIVE, SHARE, Range, option
from lowtide.ragged import RaggedBatch


@dataclass(kw_only=True)
class ReplacedTokenDetectionOptions(MaskedLMOptions):
    """The options of replaced-token detection: those of masked language modelling, and of the generator."""

    mask_replace_prob: float = option(0.85, "Share of the masked tokens that the mask token replaces.", SHARE)
    random_replace_prob: float = option(0.0, "Share that random tokens replace. The others stay.", SHARE)
    generator_model_name_or_path: str | None = option(
        None, "A masked language model that the generator begins from. None: the model's own, or a new one."
    )
    generator_size: float | None = option(
        None,
        "Width of a new generator as a share of the discriminator's, which is as deep. None: 0.25.",
        Range(above=0, most=1),
    )
    share_embeddings: bool = option(True, "The generator embeds tokens by the weights of the discriminator.")
    discriminator_weight: float = option(
        50.0, "Weight of the discriminator's loss beside the generator's.", NOT_NEGATIVE
    )
    token_metrics: bool = option(True, "Log how often the discriminator is right; off, it costs nothing.")


class ReplacedTexts(MaskedTexts):
    """Texts of which tokens are masked, and drawn anew by a generator."""

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        if "labels" in (dataset.column_names or ()):
            raise ValueError(
                f"the {name} dataset has the column 'labels', of tokens that are masked already, and a generator draws "
                "tokens in the place of those that are masked here: leave 'labels' out, and give unmasked 'input_ids'"
            )
        return super().prepare(dataset, how, name)

    def drawing(
        self,
        options: Any,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        reader: ImageReader | None = None,
    ) -> Masking:
        return dataclasses.replace(super().drawing(options, tokenizer, vocab_size), generated=True)


@dataclass(frozen=True)
class Detections:
    """What generator and discriminator lose on some rows; a position is a token, or padding."""

    generator: Float[Tensor, " scores"]
    discriminator: Float[Tensor, " positions"]
    """0 at padding."""
    right: Bool[Tensor, " positions"]
    """Where the discriminator tells rightly whether a token was replaced."""
    replaced: Bool[Tensor, " positions"]
    present: Bool[Tensor, " positions"]


def read_detections(batch: RaggedBatch, stats: Stats, reference: Tensor | None) -> Detections:
    """The losses of each masked token, and of each token."""
    logits, replaced, present = stats["all_logits"], stats["replaced"], stats["present"]
    lost = detection_nll(logits, replaced).masked_fill(~present, 0)
    right = ((logits > 0) == replaced) & present
    return Detections(-stats["logprobs"], lost, right, replaced, present)


def loss(found: Detections, counts: Counts, *, weight: float, metrics: bool) -> Outcome:
    """Both losses as means over the whole batch of an optimizer step, the discriminator's with its weight."""
    generator, discriminator = found.generator.sum(), found.discriminator.sum()
    total = generator / max(counts["masked"], 1) + weight * discriminator / max(counts["tokens"], 1)
    tokens = to_float64(found.present.sum())
    means = {
        "generator_loss": Mean(to_float64(generator.detach()), float(len(found.generator))),
        "discriminator_loss": Mean(to_float64(discriminator.detach()), tokens),
    }
    if metrics:
        seen, replaced = to_float64((found.right & found.replaced).sum()), to_float64(found.replaced.sum())
        means["discriminator_accuracy"] = Mean(to_float64(found.right.sum()), tokens)
        means["discriminator_recall"] = Mean(seen, replaced)
        means["generator_accuracy"] = Mean(len(found.generator) - replaced, float(len(found.generator)))
    return Outcome(total, means)


def counts(batch: RaggedBatch) -> Counts:
    """The denominators of the two losses."""
    return {"masked": batch.scores, "tokens": batch.tokens}


def objective(options: ReplacedTokenDetectionOptions, *, aux_coefficient: float = 0.0) -> RowObjective:
    """The sum of both losses."""
    return RowObjective(
        read=read_detections,
        loss=functools.partial(loss, weight=options.discriminator_weight, metrics=options.token_metrics),
        counts=counts,
        aux_coefficient=aux_coefficient,
        mean_over="tokens",
        beyond_scores=True,
    )


PAPER = Paper(
    "clark2020electra",
    "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators",
    ("Kevin Clark", "Minh-Thang Luong", "Quoc V. Le", "Christopher D. Manning"),
    2020,
    "2003.10555",
)
METHOD = Method(
    "replaced-token-detection",
    "replaced-token detection",
    ReplacedTokenDetectionOptions,
    ReplacedTexts(),
    objective,
    PAPER,
    head=ReplacedTokens,
)
