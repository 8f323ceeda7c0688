"""The head that gives the scored hidden states as they are: what a student's head needs to know of its teacher.

It is no entry of `engine.heads.HEADS`: no model has it as its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from lowtide.engine.heads.head import ScoreOutput, Scores
from lowtide.engine.heads.language_model import LanguageModel, met_by_head
from lowtide.engine.heads.own_head import layers_before_head


@dataclass
class StatesOutput(ScoreOutput):
    """Hidden states before the head."""

    stays: ClassVar[bool] = True
    states: Tensor
    """[scores, hidden]; where ranks split the tokens, of the scores that are read here; of layers that are split over
    ranks, on the last of these."""
    loss: Tensor | None = None
    entropies: Tensor | None = None
    top1: Tensor | None = None
    aux_loss: Tensor | None = None


class HiddenStates(LanguageModel):
    """What a language model's head would read; nothing meets the vocabulary."""

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> StatesOutput:  # type: ignore[override]
        if not layers_before_head(model):  # nothing of the head is read, which may lie elsewhere
            return StatesOutput(hidden.index_select(0, scores.index))
        scores, at_vocabulary = met_by_head(model, hidden, scores)
        return StatesOutput(at_vocabulary(lambda states: states.index_select(0, scores.index)))
