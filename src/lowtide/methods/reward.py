"""Reward modelling: one value a row, read at its end, higher for the chosen answer than for the rejected."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.engine.heads.head import Stats
from lowtide.engine.heads.value import VALUES, Value
from lowtide.methods.method import Method, RowObjective
from lowtide.methods.shared.completions import completion_sums
from lowtide.methods.shared.options import TurnOptions, VisionOptions
from lowtide.methods.shared.paper import Paper
from lowtide.methods.shared.rows import Pairs
from lowtide.objectives.outcome import Counts, Outcome, mean_of
from lowtide.objectives.reward import bradley_terry
from lowtide.option import COUNT, NOT_NEGATIVE, option
from lowtide.ragged import RaggedBatch

MARGIN = "margin"
"""Row value: by how much the chosen answer is to be better."""


@dataclass(kw_only=True)
class RewardOptions(TurnOptions, VisionOptions):
    """The options of reward modelling, under TRL's names and with its defaults."""

    learning_rate: float = option(1e-4, "The initial learning rate.")
    dataset_num_proc: int | None = option(None, "Processes that prepare the dataset.", NOT_NEGATIVE)
    chat_template_path: str | None = option(
        None,
        "Chat template: a Jinja file, a tokenizer's folder or hub name, or a built-in one, such as chatml.",
    )
    eos_token: str | None = option(None, "Token that ends a text, in place of the tokenizer's own.")
    pad_token: str | None = option(
        None, "Token that the trained model takes for padding. None: the tokenizer's, or the one that ends a text."
    )
    max_length: int | None = option(
        1024, "Pairs with a longer side are left out, and counted. None is no limit.", COUNT
    )
    prefix_sharing: bool = option(
        True, "Compute what both sides begin with once. False repeats it; the numbers are equal."
    )
    disable_dropout: bool = option(True, "Train without dropout.")
    center_rewards_coefficient: float | None = option(
        None, "Coefficient that keeps rewards around zero (arXiv 2312.09244); the paper takes 0.01.", NOT_NEGATIVE
    )

    def check(self) -> None:
        """Refuses what cannot work."""
        self.check_turns()


@dataclass(frozen=True)
class Rewards:
    """The values of some pairs, [pairs] each."""

    chosen: Float[Tensor, " pairs"]
    rejected: Float[Tensor, " pairs"]
    margin: Float[Tensor, " pairs"] | None


def read_rewards(batch: RaggedBatch, stats: Stats, reference: Tensor | None) -> Rewards:
    """The values of the two completions of each row."""
    chosen, rejected = completion_sums(stats[VALUES], batch).unbind(1)
    return Rewards(chosen, rejected, batch.row_values.get(MARGIN))


def loss(rewards: Rewards, counts: Counts, *, options: RewardOptions) -> Outcome:
    """The Bradley-Terry loss, over the pairs of the whole batch."""
    chosen, rejected = rewards.chosen, rewards.rejected
    losses = bradley_terry(chosen, rejected, rewards.margin, options.center_rewards_coefficient)
    everything = torch.cat([chosen, rejected]).detach()
    return Outcome(
        losses.sum() / counts["pairs"],
        {
            "accuracy": mean_of((chosen > rejected).float()),
            "margin": mean_of(chosen - rejected),
            "mean_reward": mean_of(everything),
        },
        lows={"min_reward": everything.min()},
        highs={"max_reward": everything.max()},
    )


def counts(batch: RaggedBatch) -> Counts:
    """The pairs of a batch."""
    return {"pairs": batch.rows}


def objective(options: RewardOptions, *, aux_coefficient: float = 0.0) -> RowObjective:
    """The loss of the options over pairs of values."""
    return RowObjective(read=read_rewards, loss=functools.partial(loss, options=options), counts=counts)


PAPER = Paper(
    "ouyang2022training",
    "Training language models to follow instructions with human feedback",
    ("Long Ouyang", "Jeff Wu", "Xu Jiang", "Diogo Almeida", "Carroll L. Wainwright", "others"),
    2022,
    "2203.02155",
)
METHOD = Method(
    "reward", "reward modelling", RewardOptions, Pairs(at_end=True), objective, PAPER, head=Value, own_loss=True
)
