"""What a model does after its body, run on hidden states that are given: its own code, whatever it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from lowtide.engine.heads.head import acting_as, body, language_model_within

VALUE_HEAD = "value_head"
"""The module that gives values, which may stand beside a language model's head (`engine.heads.token_value`)."""


def layers_before_head(model: PreTrainedModel) -> bool:
    """Whether a model has weights between its body and the module that meets the vocabulary.

    A model with an encoder beside its body has none.
    """
    if model.config.is_encoder_decoder:
        return False
    model = language_model_within(model) or model
    ends = (body(model), model.get_output_embeddings(), getattr(model, VALUE_HEAD, None))
    return any(any(True for _ in module.parameters(recurse=False)) for module in _outside(model, ends))


def _outside(module: nn.Module, ends: Sequence[nn.Module | None]) -> Iterator[nn.Module]:
    """All modules within a module, but for some and what is in these."""
    for child in module.children():
        if not any(child is end for end in ends):
            yield child
            yield from _outside(child, ends)


def own_head(model: PreTrainedModel, states: Float[Tensor, "rows 1 hidden"]) -> Any:
    """What a model's own forward gives as its logits, where its body gives these hidden states, a row for each.

    Args:
        states: what the head is to read; to a head that pools, each is the one token of a row.
    """
    model = language_model_within(model) or model
    inner: Any = body(model)

    def given(*_: Any, **__: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        return BaseModelOutputWithPoolingAndCrossAttentions(
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
