"""The heads of a language model that also has a value function: one number at each scored position, from the hidden
states that its log-probability is from.

The value function is a linear layer on the model's trunk, `value_head`, which `attach` adds: it is saved and loaded
with the model's weights, and PEFT trains it whole beside adapters. The trunk is the policy's. Where the value function
has an adapter of its own (`engine.adapters`), it is the base with that adapter, and values are read alone. These heads
are no entries of `engine.heads.HEADS`: who asks names them, and to all others the model stays a language model.
"""

from __future__ import annotations

from typing import Any, cast

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowtide.engine.heads.head import ScoreOutput, Scores, at_least_float32
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.heads.own_head import VALUE_HEAD
from lowtide.engine.heads.value import VALUES
from lowtide.engine.weights.weight_files import saved_module

VALUE_ADAPTER = "value_function"
"""The name of an adapter that the value function has of its own. PEFT finds an adapter's weights by its name anywhere
in theirs, so that a plain `value` would also find those of layers that are called so."""


class WithValues(LanguageModel):
    """Log-probabilities of tokens and, from the same forward, the values before them."""

    added_module = VALUE_HEAD

    @classmethod
    def attach(cls, model: PreTrainedModel, options: Any = None) -> None:
        """Adds the value head: that of the folder which the model came from, or a new one of small random weights."""
        if hasattr(model, VALUE_HEAD):
            return
        hidden = model.config.get_text_config().hidden_size
        like = cast(nn.Embedding, model.get_input_embeddings()).weight
        made = nn.Linear(hidden, 1, device=like.device, dtype=like.dtype)
        nn.init.normal_(made.weight, std=1 / (hidden + 1))
        nn.init.zeros_(made.bias)
        for name, saved in saved_module(model.config.name_or_path or "", VALUE_HEAD).items():
            getattr(made, name).data.copy_(saved)
        model.add_module(VALUE_HEAD, made)

    @classmethod
    def begin_from(cls, model: PreTrainedModel, other: Any) -> None:
        """Takes the weights of a classifier with one label for the value head's start.

        Raises:
            ValueError: it has no such head, or one for another hidden size.
        """
        theirs: Any = getattr(other, "score", None)
        ours = _layer(model)
        if theirs is None or theirs.weight.shape != ours.weight.shape:
            found = "no `score` head" if theirs is None else f"a `score` head of shape {list(theirs.weight.shape)}"
            raise ValueError(
                f"value_model ({type(other).__name__}) has {found}; the value head starts from weights of shape "
                f"{list(ours.weight.shape)}. Pass a classifier with one label of the policy's hidden size, or leave "
                "value_model out"
            )
        ours.weight.data.copy_(theirs.weight.data)
        ours.bias.data.zero_()

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> ScoreOutput:
        found = super().outputs(model, hidden, scores)
        found.stats[VALUES] = values_at(model, hidden, scores)
        return found


class TokenValue(WithValues):
    """The values alone; nothing meets the vocabulary."""

    adapter = VALUE_ADAPTER

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> ScoreOutput:
        return ScoreOutput(stats={VALUES: values_at(model, hidden, scores)})


def values_at(model: PreTrainedModel, hidden: Float[Tensor, "tokens hidden"], scores: Scores) -> Tensor:
    """[scores]: the values before the scored tokens, at least in float32."""
    return at_least_float32(cast(Any, model).value_head(hidden.index_select(0, scores.index)).squeeze(-1))


def _layer(model: Any) -> nn.Linear:
    """The value head that is trained, out of PEFT's wrapper."""
    found = model.value_head
    return found.modules_to_save[found.active_adapters[0]] if hasattr(found, "modules_to_save") else found
