"""A step on the stages of a pipeline: micro-batches forward and backward in the order 1F1B (PipeDream-Flush, arXiv
2104.04473), by torch's `Schedule1F1B`. The pieces of a long row are micro-batches too, the last of them first: that is
the order in which they go backward on each stage.

torch's own stage sends hidden states of one shape, and holds room for those of all micro-batches of a step. Ragged
micro-batches have different numbers of tokens, which all ranks know. So `RaggedStage` makes room for each as it comes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lowtide.engine.heads.head import ScoreOutput
from lowtide.engine.stage import HiddenOutput, Stage
from lowtide.ragged import RaggedBatch
from lowtide.step.chains import Chain, Slopes
from lowtide.step.metrics import Totals
from lowtide.step.microbatches import MicrobatchRun
from lowtide.step.pieces import LongRow
from lowtide.step.rank_sync import RankSync


@dataclass(frozen=True)
class Passage:
    """One micro-batch, or one piece of a long row, forward and backward through the stages."""

    number: int
    """Of the micro-batch in the step."""
    part: RaggedBatch
    forward: Callable[[], ScoreOutput]
    """What this rank's stage gives, with gradients."""
    loss_of: Callable[[ScoreOutput], Tensor]
    """What goes backward, on the last rank."""
    begin_backward: Callable[[], object]

    @classmethod
    def of_part(cls, run: MicrobatchRun, number: int, part: RaggedBatch) -> Passage:
        return cls(
            number,
            part,
            functools.partial(run.forward, number, part),
            functools.partial(run.loss_of, number, part),
            lambda: None,
        )

    @classmethod
    def of_pieces(cls, run: MicrobatchRun, number: int, chain: Chain, slopes: Slopes | None) -> list[Passage]:
        """Those of a long row after its first pass.

        Args:
            slopes: the gradient of the loss at each score; None where each piece has a loss of its own.
        """
        return [
            cls(
                number,
                chain.batch(piece),
                functools.partial(run.piece_forward, number, chain, piece),
                functools.partial(run.piece_loss, number, chain, piece, slopes),
                functools.partial(chain.forget_values, piece),
            )
            for piece in reversed(range(len(chain.keys)))
        ]


def forward_and_backward(
    run: MicrobatchRun,
    parts: Sequence[RaggedBatch | LongRow],
    idle: RaggedBatch,
    backward: Callable[[Tensor], object],
    sync: RankSync,
    totals: Totals,
) -> Tensor:
    """The loss of a batch, told to all ranks of a pipeline, which call this together; adds gradients to each stage. The
    micro-batches go first, and then each long row by itself.

    Args:
        idle: an empty micro-batch, which fills up where there are fewer than ranks.
        backward: called with the loss of each micro-batch, and before the last rank with the product of hidden states
            and their gradients.
    """
    whole = [(number, part) for number, part in enumerate(parts) if isinstance(part, RaggedBatch)]
    rows = [(number, part) for number, part in enumerate(parts) if isinstance(part, LongRow)]
    scheduled = functools.partial(_scheduled, run, Passage.of_part(run, len(parts), idle), backward, sync, totals)
    losses = [scheduled([Passage.of_part(run, *each) for each in whole])] if whole else []
    for number, row in rows:
        sync.micro_batch, sync.part, sync.phase = number, row.batch, "forward"
        chain = Chain(row, run.models.place())
        slopes, known = run.slopes_of(number, chain)
        found = scheduled(Passage.of_pieces(run, number, chain, slopes))
        losses.append(found if known is None else known.to(found))
    return run.reported(torch.stack(losses).sum())


def _scheduled(
    run: MicrobatchRun,
    idle: Passage,
    backward: Callable[[Tensor], object],
    sync: RankSync,
    totals: Totals,
    passages: Sequence[Passage],
) -> Tensor:
    """The sum of the losses of some passages, of which a schedule needs as many as there are ranks."""
    stage = run.models.stage
    assert stage is not None
    passages = [*passages, *[idle] * (stage.pipeline.size - len(passages))]
    ragged, losses = RaggedStage(stage, run.models.policy, passages, backward, sync, totals), []
    schedule = Schedule1F1B(ragged, len(passages), loss_fn=lambda output, target: output, scale_grads=False)
    schedule.step(target=torch.arange(len(passages)), losses=losses, return_outputs=False)
    total = torch.stack([loss.detach() for loss in losses]).sum().cpu() if losses else torch.zeros(())
    return stage.pipeline.told(total).to(ragged.device)


class RaggedStage(PipelineStage):
    """One rank's stage in one step, for torch's schedules: what it receives, runs and sends of each micro-batch.

    Only what `torch.distributed.pipelining` calls of a stage by public names is replaced. What else it prepares has one
    element.
    """

    def __init__(
        self,
        stage: Stage,
        model: nn.Module,
        passages: Sequence[Passage],
        backward: Callable[[Tensor], object],
        sync: RankSync,
        totals: Totals,
    ) -> None:
        pipeline, device = stage.pipeline, passages[0].part.token_ids.device
        unused = torch.empty(1, device=device)
        super().__init__(model, pipeline.rank, pipeline.size, device, unused, unused, group=pipeline.group)
        self.stage, self.passages, self.backward, self.sync, self.totals = stage, passages, backward, sync, totals
        self.arrived: dict[int, Tensor] = {}
        """[1, tokens, hidden]: hidden states from the rank before, whose gradients are to go there."""
        self.left: dict[int, Tensor] = {}
        """[1, tokens, hidden]: hidden states for the next rank, whose gradients are to come; on the last, a loss."""
        self.gradients: dict[int, Tensor] = {}

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Tensor:
        passage, arrived = self.passages[fwd_chunk_id], self.arrived.get(fwd_chunk_id)
        self.sync.phase, self.sync.micro_batch, self.sync.part = "forward", passage.number, passage.part
        with self.stage.enter(None if arrived is None else arrived.requires_grad_()):
            output = passage.forward()
        if isinstance(output, HiddenOutput):
            self.left[fwd_chunk_id] = output.hidden
            return output.hidden
        loss = self.left[fwd_chunk_id] = passage.loss_of(output)
        self.totals.take_in(output, passage.part)
        return loss

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        passage = self.passages[bwd_chunk_id]
        self.sync.phase, self.sync.micro_batch = "backward", passage.number
        passage.begin_backward()
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
        part = self.passages[chunk].part
        return self.stage.room(part.tokens_of(range(part.rows)), self.device)
