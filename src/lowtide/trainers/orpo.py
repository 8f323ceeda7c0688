"""Odds ratio preference optimization: `ORPOConfig` and `ORPOTrainer`, with TRL's names."""

from __future__ import annotations

from dataclasses import dataclass, replace

from datasets import Dataset, IterableDataset

from lowtide.methods.orpo import ORPO, ORPOOptions
from lowtide.trainers.completions import CompletionConfig, CompletionTrainer
from lowtide.trainers.method import Prepared


@dataclass
class ORPOConfig(ORPOOptions, CompletionConfig):
    """Options of odds ratio preference optimization: `ORPOOptions`, `TrainingConfig` and `TrainingArguments`."""


class ORPOTrainer(CompletionTrainer):
    """Trains a policy on pairs without a reference (arXiv 2403.07691).

    The arguments are those of `MethodTrainer`; rows are described in `docs/orpo.md`.
    """

    method, config = ORPO, ORPOConfig
    scores_prompt = True

    def prepare(self, dataset: Dataset | IterableDataset, name: str) -> Prepared:
        rows, ledger = super().prepare(dataset, name)
        if ledger is not None:  # all but a row's first token
            ledger = replace(ledger, scored_tokens=ledger.tokens - ledger.rows)
        return rows, ledger
