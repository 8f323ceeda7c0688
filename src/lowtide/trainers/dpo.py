"""Direct preference optimization: `DPOConfig` and `DPOTrainer`, with TRL's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowtide.methods.dpo import DPO, DPOOptions
from lowtide.trainers.completions import CompletionConfig
from lowtide.trainers.reference import ReferenceTrainer


@dataclass
class DPOConfig(DPOOptions, CompletionConfig):
    """Options of direct preference optimization: `DPOOptions`, `TrainingConfig` and `TrainingArguments`."""


class DPOTrainer(ReferenceTrainer):
    """Trains a policy on pairs of a chosen and a rejected completion, against a reference (arXiv 2305.18290).

    The arguments are those of `ReferenceTrainer`; rows are described in `docs/dpo.md`.
    """

    method, config = DPO, DPOConfig
    plain_completions = 2

    @property
    def loss_types(self) -> list[str]:
        """The losses whose weighted sum is taken."""
        options: Any = self.args
        return options.loss_types
