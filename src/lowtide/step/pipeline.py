"""A step on the stages of a pipeline: micro-batches forward and backward in the order 1F1B (PipeDream-Flush, arXiv
2104.04473), by torch's `Schedule1F1B`. The pieces of a long row are micro-batches too, the last of them first: that is
the order in which they go backward on each stage.

torch's own stage sends hidden states of one shape, and holds room for those of all micro-batches of a step. Ragged
micro-batches have different numbers of tokens, which all ranks know. So `RaggedStage` makes room for each as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lowtide.engine.heads.head import HIDDEN, ScoreOutput
from lowtide.engine.over_ranks.stage import Stage
from lowtide.step.execute import Backward, Execution, schedules
from lowtide.step_plan import IDLE, Act, RowSizes, Train


def run_through_stages(execution: Execution, acts: Sequence[Act], backward: Backward) -> None:
    """Runs acts on all ranks of a pipeline, which call this together: those with gradients that follow one another as
    one schedule."""
    for group in schedules(acts):
        if trains := [act for act in group if type(act) is Train]:
            _scheduled(execution, trains, backward.backward)
        else:
            execution.score(group, backward)


def _scheduled(execution: Execution, acts: Sequence[Train], backward: Callable[[Tensor], object]) -> None:
    """Some acts of one loss, of which a schedule needs as many as there are ranks; the sum of their losses is told to
    all."""
    models = execution.losses[0].models
    stage = models.stage
    assert stage is not None
    acts = [*acts, *[Train(IDLE, 0, acts[0].term)] * (stage.pipeline.size - len(acts))]
    losses: list[Tensor] = []
    loss = execution.losses[acts[0].term]
    with models.adapter_of(loss.objective):
        ragged = RaggedStage(stage, models.policy, execution, acts, backward)
        schedule = Schedule1F1B(ragged, len(acts), loss_fn=lambda output, target: output, scale_grads=False)
        schedule.step(target=torch.arange(len(acts)), losses=losses, return_outputs=False)
    total = torch.stack([each.detach() for each in losses]).sum().cpu() if losses else torch.zeros(())
    execution.add(acts[0], stage.pipeline.told(total).to(ragged.device))
    for number, act in enumerate(acts):
        execution.end(act, ragged.outputs.get(number))


class RaggedStage(PipelineStage):
    """One rank's stage in one step, for torch's schedules: what it receives, runs and sends of each micro-batch.

    Only what `torch.distributed.pipelining` calls of a stage by public names is replaced. What else it prepares has one
    element.
    """

    def __init__(
        self,
        stage: Stage,
        model: nn.Module,
        execution: Execution,
        acts: Sequence[Train],
        backward: Callable[[Tensor], object],
    ) -> None:
        pipeline, device = stage.pipeline, execution.device
        unused = torch.empty(1, device=device)
        super().__init__(model, pipeline.rank, pipeline.size, device, unused, unused, group=pipeline.group)
        self.stage, self.execution, self.acts, self.backward = stage, execution, acts, backward
        self.outputs: dict[int, ScoreOutput] = {}
        """What the last rank's head gave of each act, without its graph."""
        self.arrived: dict[int, Tensor] = {}
        """[1, tokens, hidden]: hidden states from the rank before, whose gradients are to go there."""
        self.left: dict[int, Tensor] = {}
        """[1, tokens, hidden]: hidden states for the next rank, whose gradients are to come; on the last, a loss."""
        self.gradients: dict[int, Tensor] = {}

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Tensor:
        act, arrived = self.acts[fwd_chunk_id], self.arrived.get(fwd_chunk_id)
        with self.stage.enter(None if arrived is None else arrived.requires_grad_()):
            output = self.execution.forward(act)
        if not self.is_last:
            hidden = self.left[fwd_chunk_id] = output.stats[HIDDEN]
            return hidden
        loss = self.left[fwd_chunk_id] = self.execution.loss_of(act, output)
        self.outputs[fwd_chunk_id] = output.map(Tensor.detach)
        return loss

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.execution.begin_backward(self.acts[bwd_chunk_id])
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
        sizes = RowSizes(self.execution.batch(self.acts[chunk]).segments)
        return self.stage.room(sizes.tokens_of(range(len(sizes.tokens))), self.device)
