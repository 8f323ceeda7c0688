"""Kahneman-Tversky optimization: `KTOConfig` and `KTOTrainer`, with TRL's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowtide.methods.kto import KTO, KTOOptions
from lowtide.objectives.kto import LOSSES
from lowtide.option import option
from lowtide.trainers.completions import CompletionConfig
from lowtide.trainers.unpaired import UnpairedTrainer


@dataclass
class KTOConfig(KTOOptions, CompletionConfig):
    """Options of Kahneman-Tversky optimization: `KTOOptions`, `TrainingConfig` and `TrainingArguments`."""

    train_sampling_strategy: str = option(
        "sequential", "Order of the rows: mismatched completions come from the same batch if it is that of the data."
    )


class KTOTrainer(UnpairedTrainer):
    """Trains a policy on single completions that are desirable or not (arXiv 2402.01306).

    The arguments are those of `ReferenceTrainer`; rows are described in `docs/kto.md`.
    """

    method, config = KTO, KTOConfig

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """The completion, and the mismatched one where the loss has a baseline."""
        args: Any = self.args
        return ("completion_ids", "kl_completion_ids") if LOSSES[args.loss_type].baseline else ("completion_ids",)
