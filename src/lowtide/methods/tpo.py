"""Triple preference optimization (arXiv 2405.16681): pairs, and a third completion whose likelihood is learned beside.

No reference model: what TRL and the paper call the reference is the third completion, a gold answer to the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.methods.method import Method, RowObjective
from lowtide.methods.shared.options import CompletionOptions, VisionOptions, check_read, flipped_labels, zeros
from lowtide.methods.shared.paper import Paper
from lowtide.methods.shared.preference import ReadPairs, contrasted, pair_objective
from lowtide.methods.shared.rows import PairsWithReference
from lowtide.objectives.outcome import Counts, Outcome
from lowtide.objectives.reference_free import TPO_LOSSES
from lowtide.option import NOT_NEGATIVE, PATH, SHARE, option


@dataclass(kw_only=True)
class TPOOptions(CompletionOptions, VisionOptions):
    """The options of triple preference optimization, under TRL's names and with its defaults."""

    learning_rate: float = option(5e-7, "The initial learning rate.")
    loss_type: str = option("sigmoid", "The contrast: TPO's, a hinge, IPO's, or TPO-L's.", choices=[*TPO_LOSSES, PATH])
    beta: float = option(0.01, "Temperature of the contrast.", NOT_NEGATIVE)
    label_smoothing: float = option(0.0, "Share of flipped labels (sigmoid, tpo-l).", SHARE)
    tpo_alpha: float = option(
        1.0, "Weight of the third completions' negative log-likelihood; 0 reads no column `reference`.", NOT_NEGATIVE
    )
    tpo_l_gamma: float = option(0.5, "Target margin of loss_type='tpo-l'.", NOT_NEGATIVE)

    @property
    def advice(self) -> list[str]:
        """What is unwise in these options."""
        return flipped_labels(self)

    def without_gradient(self) -> list[set[str]]:
        """As `TrainingConfig.without_gradient`: the contrast, and the negative log-likelihood."""
        return [zeros(self, "beta"), zeros(self, "tpo_alpha")]

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out."""
        self.check_turns()
        if self.beta == 0 and TPO_LOSSES[self.loss_type].divides_by_beta:
            raise ValueError(f"beta=0 must be above 0 for loss_type={self.loss_type!r}, which divides by it")
        check_read(self, ("label_smoothing", "tpo_l_gamma"), TPO_LOSSES, [self.loss_type])


def loss(pairs: ReadPairs, counts: Counts, *, options: TPOOptions) -> Outcome:
    """The contrast, a mean over pairs, and `tpo_alpha` times the negative log-likelihood of the third completions, a
    mean over their tokens."""
    return contrasted(pairs, counts, options, TPO_LOSSES[options.loss_type], likelihood=options.tpo_alpha)


def objective(options: TPOOptions, *, aux_coefficient: float = 0.0) -> RowObjective:
    """The loss of the options over pairs and their third completions."""
    return pair_objective(loss, options, aux_coefficient)


PAPER = Paper(
    "saeidi2025triple",
    "Triple Preference Optimization: Achieving Better Alignment using a Single Step Optimization",
    ("Amir Saeidi", "Shivanshu Verma", "Aswin RRV", "Kashif Rasul", "Chitta Baral"),
    2025,
    "2405.16681",
)
ROWS = PairsWithReference(learned=lambda options: bool(options.tpo_alpha))
METHOD = Method("tpo", "triple preference optimization", TPOOptions, ROWS, objective, PAPER)
