"""Which tokens a step learns from, where only those of highest entropy are wanted (arXiv 2506.01939)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.data.batches.values import KEPT
from lowtide.engine.forward import score_shared
from lowtide.engine.heads.head import Scores
from lowtide.ops.logits.logit_rows import Want
from lowtide.ragged import RaggedBatch
from lowtide.ranks.world import objects_of_all_ranks
from lowtide.step.rank_sync import RankSync
from lowtide.step.runner import StepRunner


def kept_tokens(runner: StepRunner, batch: RaggedBatch, args: Any) -> RaggedBatch:
    """The batch, with the tokens of highest entropy marked: the share `top_entropy_quantile` of those of all ranks.

    Their entropies are those under the weights before the step, from a pass of its own without gradients.
    """
    share = getattr(args, "top_entropy_quantile", 1.0)
    if share >= 1.0:
        return batch
    sync, entropies = RankSync("entropy", part=batch), torch.zeros(0)
    with sync.local(waited_for=runner.waited_for):
        entropies = _entropies(runner, batch, args.temperature)
    sync.meet(runner.device)
    own = entropies.float().cpu()
    everyones = of_all_ranks(own, runner.models().copies)
    least = torch.quantile(everyones.double(), 1 - share).float() if everyones.numel() else torch.zeros(())
    return replace(batch, score_values={**batch.score_values, KEPT: own >= least})


@torch.no_grad()
def _entropies(runner: StepRunner, batch: RaggedBatch, temperature: float) -> Tensor:
    if not batch.scores:
        return torch.zeros(0, device=runner.device)

    def entropies(part: RaggedBatch) -> Tensor:
        scores = Scores(part.score_index, part.score_target, want=Want(entropies=True), temperature=temperature)
        return score_shared(runner.model, part, scores, padding_free=runner.padding_free).stats["entropies"]

    return runner.scored(batch, entropies)


def of_all_ranks(values: Tensor, copies: int = 1) -> Tensor:
    """Values of all ranks, which need not have as many; `copies` neighbouring ones have the same, which count once."""
    return torch.cat(objects_of_all_ranks(values, copies))
