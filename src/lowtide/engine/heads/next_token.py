"""The head that generation asks of a language model: what a function reads off the logits of the token that follows.

The logits are made as by `LanguageModel`, from the same modules and with the same projection, a chunk of rows at a
time; the function draws from them. It is no entry of `engine.heads.HEADS`: no model has it as its own.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from lowtide.engine.heads.head import ScoreOutput, Scores
from lowtide.engine.heads.head_parts import HeadParts, head_parts, head_terms, projection_of
from lowtide.engine.heads.language_model import LanguageModel, met_by_head
from lowtide.engine.weights.sharded.split_vocabulary import split_of
from lowtide.ops.logits.linear_logprobs import read_logits

READ = "read"
"""The statistic of what was read off the logits, [numbers, scores]."""


class NextToken(LanguageModel):
    """What `Scores.read` makes of the logits."""

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> ScoreOutput:
        read, parts = scores.read, head_parts(model)
        assert read is not None, "the head of next tokens is asked with a function that reads them"
        scores, at_vocabulary = met_by_head(model, hidden, scores)
        return ScoreOutput(stats=at_vocabulary(lambda x: {READ: read_off(model, parts, x, scores.index, read)}))


def read_off(
    model: PreTrainedModel,
    parts: HeadParts,
    hidden: Tensor,
    index: Int[Tensor, " scores"],
    read: Callable[[Tensor, slice], Tensor],
) -> Shaped[Tensor, "numbers scores"]:
    """What a function reads off the logits (see `ops.logits.linear_logprobs.read_logits`), within the head's own
    call."""
    terms, bias = head_terms(parts, hidden)
    split = split_of(parts.base.weight)
    return read_logits(terms, index, read, bias=bias, projection=projection_of(model.config), split=split)
