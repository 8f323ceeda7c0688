"""Binary classifier optimization: `BCOConfig` and `BCOTrainer`, with the names that TRL had for it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.methods.bco import BCO, BCOOptions, RunningMean
from lowtide.methods.method import Objective
from lowtide.trainers.completions import CompletionConfig
from lowtide.trainers.unpaired import UnpairedTrainer

RUNNING = "running_mean.json"
"""The file of a checkpoint in which the running mean of rewards is kept."""


@dataclass
class BCOConfig(BCOOptions, CompletionConfig):
    """Options of binary classifier optimization: `BCOOptions`, `TrainingConfig` and `TrainingArguments`."""


class BCOTrainer(UnpairedTrainer):
    """Trains a policy on single completions that are desirable or not (arXiv 2404.04656).

    The arguments are those of `ReferenceTrainer`; rows are described in `docs/bco.md`.
    """

    method, config = BCO, BCOConfig

    def make_objective(self, args: Any, aux_coefficient: float) -> Objective:
        self._running = RunningMean()
        return BCO.objective(args, aux_coefficient=aux_coefficient, running=self._running)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            Path(output_dir, RUNNING).write_text(json.dumps(dataclasses.asdict(self._running)))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and Path(checkpoint, RUNNING).exists():
            for name, value in json.loads(Path(checkpoint, RUNNING).read_text()).items():
                setattr(self._running, name, value)
