"""Contrastive preference optimization (arXiv 2401.08417), SimPO (2405.14734), and the two together. No reference."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from lowtide.methods.method import Method, RowObjective
from lowtide.methods.shared.options import CompletionOptions, VisionOptions, check_read, flipped_labels, zeros
from lowtide.methods.shared.paper import Paper
from lowtide.methods.shared.preference import ReadPairs, contrasted, pair_objective
from lowtide.methods.shared.rows import Pairs
from lowtide.objectives.outcome import Counts, Outcome
from lowtide.objectives.reference_free import LOSSES, alpha_reward
from lowtide.option import FINITE, NOT_NEGATIVE, PATH, SHARE, option


@dataclass(kw_only=True)
class CPOOptions(CompletionOptions, VisionOptions):
    """The options of contrastive preference optimization, under TRL's names and with its defaults."""

    loss_type: str = option("sigmoid", "The contrast: CPO's, a hinge, IPO's, or SimPO's.", choices=[*LOSSES, PATH])
    beta: float = option(0.1, "Temperature of the contrast.", NOT_NEGATIVE)
    label_smoothing: float = option(0.0, "Share of flipped labels (sigmoid, simpo).", SHARE)
    cpo_alpha: float = option(
        1.0, "Weight of the chosen completions' negative log-likelihood; 0 for plain SimPO.", NOT_NEGATIVE
    )
    simpo_gamma: float = option(0.5, "Target margin of loss_type='simpo'.", NOT_NEGATIVE)
    alpha: float = option(0.0, "Shape of AlphaPO's reward (arXiv 2501.03884); 0 is the log-probability.", FINITE)

    @property
    def advice(self) -> list[str]:
        """What is unwise in these options."""
        return flipped_labels(self)

    def without_gradient(self) -> list[set[str]]:
        """As `TrainingConfig.without_gradient`: the contrast, and the negative log-likelihood."""
        return [zeros(self, "beta"), zeros(self, "cpo_alpha")]

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out."""
        self.check_turns()
        if self.beta == 0 and LOSSES[self.loss_type].divides_by_beta:
            raise ValueError(f"beta=0 must be above 0 for loss_type={self.loss_type!r}, which divides by it")
        check_read(self, ("label_smoothing", "simpo_gamma"), LOSSES, [self.loss_type])


def loss(pairs: ReadPairs, counts: Counts, *, options: CPOOptions) -> Outcome:
    """The contrast, a mean over pairs, and `cpo_alpha` times the negative log-likelihood, a mean over tokens."""
    reward = functools.partial(alpha_reward, alpha=options.alpha)
    variant = LOSSES[options.loss_type]
    return contrasted(pairs, counts, options, variant, likelihood=options.cpo_alpha, reward=reward)


def objective(options: CPOOptions, *, aux_coefficient: float = 0.0) -> RowObjective:
    """The loss of the options over pairs."""
    return pair_objective(loss, options, aux_coefficient)


PAPER = Paper(
    "xu2024contrastive",
    "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation",
    (
        "Haoran Xu",
        "Amr Sharaf",
        "Yunmo Chen",
        "Weiting Tan",
        "Lingfeng Shen",
        "Benjamin Van Durme",
        "Kenton Murray",
        "Young Jin Kim",
    ),
    2024,
    "2401.08417",
)
METHOD = Method("cpo", "contrastive preference optimization", CPOOptions, Pairs(), objective, PAPER)
