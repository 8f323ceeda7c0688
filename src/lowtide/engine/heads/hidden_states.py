"""The head that gives the scored hidden states as they are: what a student's head needs to know of its teacher.

It is no entry of `engine.heads.HEADS`: no model has it as its own.
"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from lowtide.engine.heads.head import STATES, ScoreOutput, Scores
from lowtide.engine.heads.head_parts import head_parts
from lowtide.engine.heads.language_model import LanguageModel, met_by_head, reading
from lowtide.engine.heads.own_head import layers_before_head


class HiddenStates(LanguageModel):
    """What a language model's head would read; nothing meets the vocabulary."""

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> ScoreOutput:
        if not layers_before_head(model):  # nothing of the head is read, which may lie elsewhere
            return ScoreOutput(stats={STATES: hidden.index_select(0, scores.index)})
        scores, at_vocabulary = met_by_head(model, hidden, scores)
        return ScoreOutput(stats=at_vocabulary(lambda states: {STATES: states.index_select(0, scores.index)}))


class StatesAndLogprobs(LanguageModel):
    """The same beside the log-probabilities of the tokens that the scores predict."""

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> ScoreOutput:
        scores, at_vocabulary = met_by_head(model, hidden, scores)
        read = reading(model, head_parts(model), scores)
        return ScoreOutput(
            stats=at_vocabulary(lambda states: {**read(states), STATES: states.index_select(0, scores.index)})
        )
