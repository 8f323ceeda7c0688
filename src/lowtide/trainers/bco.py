"""Binary classifier optimization: `BCOConfig` and `BCOTrainer`, with the names that TRL had for it."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.methods.bco import BCO, BCOOptions
from lowtide.trainers.completions import CompletionConfig
from lowtide.trainers.unpaired import UnpairedTrainer


@dataclass
class BCOConfig(BCOOptions, CompletionConfig):
    """Options of binary classifier optimization: `BCOOptions`, `TrainingConfig` and `TrainingArguments`."""


class BCOTrainer(UnpairedTrainer):
    """Trains a policy on single completions that are desirable or not (arXiv 2404.04656).

    The arguments are those of `ReferenceTrainer`; rows are described in `docs/bco.md`.
    """

    method, config = BCO, BCOConfig
