"""Geometric-mean policy optimization (arXiv 2507.20673): GRPO whose ratio is the geometric mean of a completion's
clipped ratios, so that no single token outweighs the others.

Names and defaults are TRL 1.16's; all but the loss is GRPO's. It deviates in one thing: where vLLM's probabilities are
corrected (`vllm_importance_sampling_correction`), a completion counts by the mean of its corrections; TRL leaves them
out.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.methods.method import Method
from lowtide.methods.online.grpo import ROWS, GRPOOptions, objective
from lowtide.methods.shared.paper import Paper
from lowtide.option import NOT_NEGATIVE, option


@dataclass(kw_only=True)
class GMPOOptions(GRPOOptions):
    """The options of geometric-mean policy optimization, under TRL's names and with its defaults."""

    epsilon: float = option(
        0.4, "How far the log of a ratio may fall below 0, or rise above it, before it is clipped.", NOT_NEGATIVE
    )
    epsilon_high: float | None = option(None, "How far it may rise. None: `epsilon`.", NOT_NEGATIVE)
    loss_type: str = option("gmpo", "The loss: the geometric mean of clipped ratios.", choices=["gmpo"])
    use_bias_correction_kl: bool = option(False, "Weigh the divergence by the ratio; TRL's never is.")


PAPER = Paper(
    "zhao2025geometric",
    "Geometric-Mean Policy Optimization",
    ("Yuzhong Zhao", "Yue Liu", "Junpeng Liu", "Jingye Chen", "Xun Wu", "others"),
    2025,
    "2507.20673",
)
METHOD = Method("gmpo", "geometric-mean policy optimization", GMPOOptions, ROWS, objective, PAPER)
