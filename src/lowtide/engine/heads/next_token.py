"""The head that generation asks of a language model: what a function reads off the logits of the token that follows.

The logits are made as by `LanguageModel`, from the same modules and with the same projection, a chunk of rows at a
time; the function draws from them. It is no entry of `engine.heads.HEADS`: no model has it as its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from lowtide.engine.heads.head import ScoreOutput, Scores
from lowtide.engine.heads.head_parts import head_parts, head_terms, projection_of
from lowtide.engine.heads.language_model import LanguageModel, met_by_head
from lowtide.engine.weights.split_vocabulary import split_of
from lowtide.ops.linear_logprobs import read_logits


@dataclass
class ReadOutput(ScoreOutput):
    """What was read off the logits."""

    read: Tensor
    """[numbers, scores]"""
    loss: Tensor | None = None
    entropies: Tensor | None = None
    top1: Tensor | None = None
    aux_loss: Tensor | None = None


class NextToken(LanguageModel):
    """What `Scores.read` makes of the logits."""

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> ReadOutput:  # type: ignore[override]
        read, parts = scores.read, head_parts(model)
        assert read is not None, "the head of next tokens is asked with a function that reads them"
        projection = projection_of(model.config)
        scores, at_vocabulary = met_by_head(model, hidden, scores)

        def reading(hidden: Tensor) -> Tensor:
            terms, bias = head_terms(parts, hidden)
            split = split_of(parts.base.weight)
            return read_logits(terms, scores.index, read, bias=bias, projection=projection, split=split)

        return ReadOutput(at_vocabulary(reading))
