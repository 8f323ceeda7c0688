"""The part of a model that lies on one rank of a pipeline, and how a forward enters and leaves it.

The model object stays as it was, and so do the names of its weights. In the place of each layer of another rank stands
an `Elsewhere`, which passes hidden states on; the last of them before a rank's own layers gives what arrived from the
rank before. So a forward runs what any model of the kind does around its layers (positions, masks), and only that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lowtide.engine.heads.head import HIDDEN, ScoreOutput
from lowtide.ranks.pipeline import Pipeline

STAGE = "_lowtide_stage"
"""The attribute of a transformers model in which its stage stands."""


@dataclass(eq=False)
class Stage:
    """What lies on this rank of a pipeline, and what runs through it now."""

    pipeline: Pipeline
    width: int
    """Of hidden states between ranks."""
    dtype: torch.dtype
    """Of hidden states between ranks."""
    whole: nn.Module
    """The whole model, without memory for its weights: checkpoints are read and written by it."""
    tied: nn.Parameter | None = None
    """The weight that is embedding and head, on the ranks that have either."""
    entered: bool = field(default=False, init=False)
    """Whether a forward is run for this stage alone, rather than through all of them."""
    arrived: Tensor | None = field(default=None, init=False)
    """[1, tokens, hidden]: what this rank's layers go on with in the forward that runs now."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Stage:
        """A copy of a model, such as its reference, lies alike; forwards of the two are never within each other."""
        return self

    def room(self, tokens: int, device: torch.device) -> Float[Tensor, "1 tokens hidden"]:
        """Where hidden states, or their gradients, are received."""
        return torch.empty(1, tokens, self.width, dtype=self.dtype, device=device)

    @contextlib.contextmanager
    def enter(self, arrived: Float[Tensor, "1 tokens hidden"] | None) -> Iterator[None]:
        """Around a forward of this stage alone.

        Args:
            arrived: what its layers go on with; None on the first rank.
        """
        before = self.entered, self.arrived
        self.entered, self.arrived = True, arrived
        try:
            yield
        finally:
            self.entered, self.arrived = before

    def run_through(self, forward: Callable[[], ScoreOutput], tokens: int, device: torch.device) -> ScoreOutput:
        """A forward without gradients through all ranks, which call this together; what the last one gives, or of an
        output that stays there what each has itself.

        Args:
            forward: of this stage.
        """
        arrived = None if self.pipeline.is_first else self.room(tokens, device)
        if arrived is not None:
            self.pipeline.exchange(self.pipeline.receiving(arrived, ahead=False))
        with self.enter(arrived):
            output = forward()
        if not self.pipeline.is_last:
            self.pipeline.exchange(self.pipeline.sending(output.stats[HIDDEN], ahead=True))
        tells = self.pipeline.is_last and not output.stays
        told = self.pipeline.told(output.map(Tensor.cpu) if tells else None)
        return output if told is None else told.map(lambda value: value.to(device))


def stage_of(model: nn.Module) -> Stage | None:
    """The stage that a transformers model was cut to; None of a whole one."""
    return vars(model).get(STAGE)


class Elsewhere(nn.Module):
    """In the place of a layer, or of a norm or a head, that lies on another rank: passes hidden states on.

    Args:
        stage: gives what arrived from the rank before, in the place of the last layer before this rank's own.
        facts: what the model reads off its layers, such as the kind of attention.
    """

    stage: Stage | None

    def __init__(self, stage: Stage | None = None, **facts: Any) -> None:
        super().__init__()
        vars(self).update(facts, stage=stage)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        arrived = None if self.stage is None else self.stage.arrived
        return hidden_states if arrived is None else arrived


class NoEmbedding(nn.Module):
    """In the place of an embedding that lies on another rank: zeros of its shape."""

    zero: Tensor

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        weight: Tensor = embedding.weight
        self.vocab, self.hidden = weight.shape
        self.register_buffer("zero", torch.zeros((), dtype=weight.dtype, device=weight.device), persistent=False)

    @property
    def weight(self) -> Float[Tensor, "vocab hidden"]:
        """Takes no memory; has the shape, dtype and device of the weight."""
        return self.zero.expand(self.vocab, self.hidden)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.zero.expand(*input.shape, self.hidden)
