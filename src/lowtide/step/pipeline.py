"""A step on the stages of a pipeline: micro-batches forward and backward in the order 1F1B (PipeDream-Flush, arXiv
2104.04473), by torch's `Schedule1F1B`.

torch's own stage sends hidden states of one shape, and holds room for those of all micro-batches of a step. Ragged
micro-batches have different numbers of tokens, which all ranks know. So `RaggedStage` makes room for each as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lowtide.engine.stage import HiddenOutput, Stage
from lowtide.ragged import RaggedBatch
from lowtide.step.metrics import Totals
from lowtide.step.microbatches import MicrobatchRun
from lowtide.step.rank_sync import RankSync


def forward_and_backward(
    run: MicrobatchRun,
    parts: Sequence[RaggedBatch],
    backward: Callable[[Tensor], object],
    sync: RankSync,
    totals: Totals,
) -> Tensor:
    """The loss of a batch, told to all ranks of a pipeline, which call this together; adds gradients to each stage.

    Args:
        parts: the micro-batches, at least as many as ranks.
        backward: called with the loss of each micro-batch, and before the last rank with the product of hidden states
            and their gradients.
    """
    stage = run.models.stage
    assert stage is not None
    ragged, losses = RaggedStage(stage, run, parts, backward, sync, totals), []
    schedule = Schedule1F1B(ragged, len(parts), loss_fn=lambda output, target: output, scale_grads=False)
    schedule.step(target=torch.arange(len(parts)), losses=losses, return_outputs=False)
    total = torch.stack([loss.detach() for loss in losses]).sum().cpu() if losses else torch.zeros(())
    return run.reported(stage.pipeline.told(total).to(parts[0].token_ids.device))


class RaggedStage(PipelineStage):
    """One rank's stage in one step, for torch's schedules: what it receives, runs and sends of each micro-batch.

    Only what `torch.distributed.pipelining` calls of a stage by public names is replaced. What else it prepares has one
    element.
    """

    def __init__(
        self,
        stage: Stage,
        run: MicrobatchRun,
        parts: Sequence[RaggedBatch],
        backward: Callable[[Tensor], object],
        sync: RankSync,
        totals: Totals,
    ) -> None:
        pipeline, device = stage.pipeline, parts[0].token_ids.device
        unused = torch.empty(1, device=device)
        super().__init__(run.models.policy, pipeline.rank, pipeline.size, device, unused, unused, group=pipeline.group)
        self.stage, self.run, self.parts, self.backward, self.sync, self.totals = (
            stage, run, parts, backward, sync, totals
        )  # fmt: skip
        self.arrived: dict[int, Tensor] = {}
        """[1, tokens, hidden]: hidden states from the rank before, whose gradients are to go there."""
        self.left: dict[int, Tensor] = {}
        """[1, tokens, hidden]: hidden states for the next rank, whose gradients are to come; on the last, a loss."""
        self.gradients: dict[int, Tensor] = {}

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Tensor:
        part, arrived = self.parts[fwd_chunk_id], self.arrived.get(fwd_chunk_id)
        self.sync.phase, self.sync.micro_batch, self.sync.part = "forward", fwd_chunk_id, part
        with self.stage.enter(None if arrived is None else arrived.requires_grad_()):
            output = self.run.forward(fwd_chunk_id, part)
        if isinstance(output, HiddenOutput):
            self.left[fwd_chunk_id] = output.hidden
            return output.hidden
        loss = self.left[fwd_chunk_id] = self.run.loss_of(fwd_chunk_id, part, output)
        self.totals.take_in(output, part)
        return loss

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.sync.phase, self.sync.micro_batch = "backward", bwd_chunk_id
        left = self.left.pop(bwd_chunk_id)
        self.backward(left if self.is_last else (left * self.gradients.pop(bwd_chunk_id)).sum())

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        room = self.arrived[fwd_chunk_id] = self._room(fwd_chunk_id)
        return [self.stage.pipeline.receiving(room, ahead=False)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self.is_last else [self.stage.pipeline.sending(self.left[fwd_chunk_id], ahead=True)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        room = self.gradients[bwd_chunk_id] = self._room(bwd_chunk_id)
        return [self.stage.pipeline.receiving(room, ahead=True)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        gradient = self.arrived.pop(bwd_chunk_id).grad
        assert gradient is not None
        return [self.stage.pipeline.sending(gradient, ahead=False)]

    def _room(self, chunk: int) -> Tensor:
        part = self.parts[chunk]
        return self.stage.room(part.tokens_of(range(part.rows)), self.device)
