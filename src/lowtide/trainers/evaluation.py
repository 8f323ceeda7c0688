"""What evaluation gathers beside its sums."""

from __future__ import annotations

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object

from lowtide.engine.head import ScoreOutput
from lowtide.metrics import distributed
from lowtide.ragged import RaggedBatch


def real_rows(accelerator: Accelerator, rows: int, batch_size: int) -> int:
    """How many rows of this rank's batch are its own; the last batch is filled up so that ranks have equally many."""
    state = accelerator.gradient_state
    if not distributed() or not state.end_of_dataloader or state.remainder <= 0:
        return rows
    return max(0, min(rows, state.remainder - accelerator.process_index * batch_size))


class Predictions:
    """Log-probs and targets of all scores, in host memory; for `compute_metrics` alone."""

    def __init__(self) -> None:
        self.logprobs: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []

    def take_in(self, results: list[tuple[RaggedBatch, ScoreOutput]]) -> None:
        for batch, output in results:
            self.logprobs.append(output.logprobs.float().cpu().numpy())
            self.targets.append(batch.score_target.cpu().numpy())

    def gathered(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Those of all ranks, or None where nothing was taken in."""
        logprobs, targets = self.logprobs, self.targets
        if distributed():
            logprobs, targets = gather_object(logprobs), gather_object(targets)
        if not logprobs:
            return None, None
        return np.concatenate(logprobs), np.concatenate(targets)
