"""What a model does after its body, run on hidden states that are given: its own code, whatever it is made of."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from lowtide.engine.heads.head import acting_as, body


def own_head(model: PreTrainedModel, states: Float[Tensor, "rows 1 hidden"]) -> Any:
    """What a model's own forward gives as its logits, where its body gives these hidden states, a row for each.

    Args:
        states: what the head is to read; to a head that pools, each is the one token of a row.
    """
    inner: Any = body(model)

    def given(*_: Any, **__: Any) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(
            last_hidden_state=states,  # type: ignore[arg-type]
            pooler_output=_pooled(inner, states),
        )

    with acting_as(inner, given):
        mask = states.new_ones(states.shape[:2])
        return type(model).forward(model, inputs_embeds=states, attention_mask=mask, return_dict=True).logits


def _pooled(inner: Any, states: Float[Tensor, "rows 1 hidden"]) -> Any:
    """[rows, hidden]: what a body's pooler makes of its first tokens; None of a body without one. ALBERT's is a layer
    and, apart from it, an activation."""
    pooler = getattr(inner, "pooler", None)
    if pooler is None:
        return None
    activation = getattr(inner, "pooler_activation", None)
    return pooler(states) if activation is None else activation(pooler(states[:, 0]))
