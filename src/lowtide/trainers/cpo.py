"""Contrastive preference optimization and SimPO: `CPOConfig` and `CPOTrainer`, with TRL's names."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.methods.cpo import CPO, CPOOptions
from lowtide.trainers.completions import CompletionConfig, CompletionTrainer


@dataclass
class CPOConfig(CPOOptions, CompletionConfig):
    """Options of contrastive preference optimization: `CPOOptions`, `TrainingConfig` and `TrainingArguments`."""


class CPOTrainer(CompletionTrainer):
    """Trains a policy on pairs without a reference (arXiv 2401.08417; SimPO, arXiv 2405.14734).

    The arguments are those of `MethodTrainer`; rows are described in `docs/cpo.md`.
    """

    method, config = CPO, CPOConfig
