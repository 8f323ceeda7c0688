"""Odds ratio preference optimization (arXiv 2403.07691): likelihood of the chosen side, and its odds against the
rejected one. No reference.

The likelihood is a mean over the tokens of prompts and chosen completions, as in TRL; the odds are of mean
log-probabilities a token. Places of images are scored nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F

from lowtide.methods.method import Method, RowObjective
from lowtide.methods.shared.options import CompletionOptions, VisionOptions
from lowtide.methods.shared.paper import Paper
from lowtide.methods.shared.preference import ReadPairs, pair_metrics, pair_objective, per_token
from lowtide.methods.shared.rows import Pairs
from lowtide.objectives.outcome import Counts, Mean, Outcome, mean_of
from lowtide.objectives.reference_free import log_odds_ratio
from lowtide.option import NOT_NEGATIVE, option


@dataclass(kw_only=True)
class ORPOOptions(CompletionOptions, VisionOptions):
    """The options of odds ratio preference optimization, under TRL's names and with its defaults."""

    beta: float = option(0.1, "Weight of the odds ratio; lambda in the paper.", NOT_NEGATIVE)

    def check(self) -> None:
        """Refuses what cannot work."""
        self.check_turns()


def loss(pairs: ReadPairs, counts: Counts, *, options: ORPOOptions) -> Outcome:
    """Negative log-likelihood a token, less beta times the log-sigmoid of the log odds ratio."""
    pairs = per_token(pairs)
    odds = log_odds_ratio(pairs.chosen, pairs.rejected)
    ratio = F.logsigmoid(odds)
    nll = pairs.nll.sum() / counts["nll_tokens"]
    means = {
        **pair_metrics(pairs, options.beta * pairs.chosen, options.beta * pairs.rejected),
        "nll_loss": Mean(pairs.nll.detach().sum(), pairs.nll_tokens.sum()),
        "log_odds_ratio": mean_of(ratio),
        "log_odds_chosen": mean_of(odds),
    }
    return Outcome(nll - options.beta * ratio.sum() / counts["pairs"], means)


def objective(options: ORPOOptions, *, aux_coefficient: float = 0.0) -> RowObjective:
    """The loss of the options over pairs."""
    return pair_objective(loss, options, aux_coefficient)


PAPER = Paper(
    "hong2024orpo",
    "ORPO: Monolithic Preference Optimization without Reference Model",
    ("Jiwoo Hong", "Noah Lee", "James Thorne"),
    2024,
    "2403.07691",
)
METHOD = Method("orpo", "odds ratio preference optimization", ORPOOptions, Pairs(scores_prompt=True), objective, PAPER)
