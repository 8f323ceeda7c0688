"""A model's own forward, which returns log-probabilities, or a reward model's values, when it is given scores.

Wrappers such as DDP see one ordinary forward call; nothing outside has to reach into the model. What the model does
between its hidden states and its logits (scaling, soft-capping, an adapter on the head) is read from its config and
modules here, and proved against the model's own logits by `engine.probe`.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from lowtide.compat.transformers import load_balancing_loss
from lowtide.engine.weights.quantized import is_quantized
from lowtide.ops.linear_logprobs import (
    NOTHING_MORE,
    Projection,
    ScoreLoss,
    Term,
    TokenStats,
    Want,
    linear_logprobs,
    linear_loss,
)


@dataclass(frozen=True)
class Scores:
    """What to ask of a model's forward: which tokens to score, and how."""

    index: Tensor
    """[scores]: place of the predicting hidden state in the flattened batch."""
    target: Tensor
    """[scores]: the token predicted there."""
    want: Want = NOTHING_MORE
    loss: ScoreLoss | None = None
    """A loss that is known score by score: its gradients are formed in forward, and `ScoreOutput.loss` is set."""
    factor: float = 1.0
    """Factor of that loss."""
    grad_scale: float = 1.0
    """What `backward` multiplies the loss by (see `ops.linear_logprobs.linear_loss`)."""
    temperature: float = 1.0
    accumulate: bool = False
    """The head's weight takes its gradient straight into `.grad` (see `ops.linear_logprobs`)."""
    aux_loss: bool = False
    """Also the load-balancing loss of a mixture of experts."""


@dataclass
class ScoreOutput(ModelOutput):
    """What the forward of a model with the fused head returns when it is given scores."""

    logprobs: Tensor
    """[scores]; a reward model's values, which are no log-probabilities, stand here too."""
    loss: Tensor | None = None
    """[]: `factor` times the sum of the losses, where `Scores.loss` is known score by score."""
    entropies: Tensor | None = None
    """[scores]"""
    mean_logprobs: Tensor | None = None
    """[scores]"""
    top1: Tensor | None = None
    """[scores], bool"""
    collisions: Tensor | None = None
    """[scores]"""
    aux_loss: Tensor | None = None
    """[]"""

    @property
    def stats(self) -> TokenStats:
        return TokenStats(self.logprobs, self.entropies, self.mean_logprobs, self.top1, self.collisions)


def install_head(model: PreTrainedModel) -> None:
    """Lets `model(..., scores=Scores(...))` return a `ScoreOutput`; without scores nothing changes.

    Args:
        model: a causal language model or a reward model, not wrapped by PEFT or others (adapters inside are fine).

    Raises:
        ValueError: the model has no head to speak of, or one that cannot be fused; names the model type.
    """
    if body(model) is model or (model.get_output_embeddings() is None and not is_reward_model(model)):
        raise ValueError(
            f"{type(model).__name__} (model type {model.config.model_type}) has no language-modelling head: "
            "load it with AutoModelForCausalLM"
        )
    if not is_reward_model(model):
        _head_terms(model, None)
    if "scores" not in getattr(model.forward, "__lowtide__", ()):
        inner = model.forward
        # Unbound, so that a copy of the model calls its own.
        plain = inner.__func__ if getattr(inner, "__self__", None) is model else lambda _, *a, **k: inner(*a, **k)

        @functools.wraps(inner)
        def forward(self: PreTrainedModel, *args: Any, scores: Scores | None = None, **kwargs: Any) -> Any:
            return plain(self, *args, **kwargs) if scores is None else _forward_scores(self, scores, args, kwargs)

        forward.__lowtide__ = ("scores",)  # type: ignore[attr-defined]
        model.forward = types.MethodType(forward, model)


def is_reward_model(model: nn.Module) -> bool:
    """Whether a model reads one value off its hidden states: sequence classification with one label."""
    return hasattr(model, "score") and getattr(getattr(model, "config", None), "num_labels", None) == 1


def pad_id(model: PreTrainedModel) -> int | None:
    """The token that a reward model's own forward passes over at the end of a row, before it reads the value."""
    return model.config.get_text_config().pad_token_id


def _forward_scores(model: PreTrainedModel, scores: Scores, args: tuple, kwargs: dict[str, Any]) -> ScoreOutput:
    if scores.aux_loss:
        kwargs["output_router_logits"] = True
    kwargs = {name: value for name, value in kwargs.items() if value is not None}  # PEFT passes all that it knows
    outputs = body(model)(*args, **kwargs, use_cache=False)
    hidden = outputs[0].flatten(0, -2)
    if is_reward_model(model):
        values = cast(Any, model).score(hidden.index_select(0, scores.index)).squeeze(-1)
        return ScoreOutput(values.to(torch.promote_types(values.dtype, torch.float32)))
    terms, bias = _head_terms(model, hidden)
    shared = {
        "bias": bias,
        "projection": projection_of(model.config.get_text_config(), scores.temperature),
        "want": scores.want,
        "accumulate": scores.accumulate,
    }
    if scores.loss is None:
        loss, stats = None, linear_logprobs(terms, scores.index, scores.target, **shared)
    else:
        shared |= {"factor": scores.factor, "grad_scale": scores.grad_scale}
        loss, stats = linear_loss(terms, scores.index, scores.target, scores.loss, **shared)
    aux = _load_balancing_loss(model, outputs, kwargs.get("attention_mask")) if scores.aux_loss else None
    return ScoreOutput(stats.logprobs, loss, stats.entropies, stats.mean_logprobs, stats.top1, stats.collisions, aux)


def body(model: PreTrainedModel) -> nn.Module:
    """All of the model but its head; Llama 4 names a prefix that it has no attribute for."""
    return model.base_model if model.base_model is not model else getattr(model, "model", model)


def projection_of(config: PretrainedConfig, temperature: float = 1.0) -> Projection:
    """What a model type does to its logits, from its config."""
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale *= getattr(config, name, None) or 1.0
    scaling = getattr(config, "logits_scaling", None) or 1.0
    # Granite and MiniCPM divide by it; HyperCLOVA X, alone, multiplies.
    scale = scale * scaling if config.model_type == "hyperclovax" else scale / scaling
    return Projection(scale, getattr(config, "final_logit_softcapping", None), temperature)


def _head_terms(model: PreTrainedModel, hidden: Tensor | None) -> tuple[list[Term], Tensor | None]:
    """The products that make the logits, and the bias; with `hidden` None it only checks that they are known."""
    head: Any = model.get_output_embeddings()
    if hasattr(head, "modules_to_save"):  # PEFT trains a copy of the whole head
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
    if hasattr(head, "lora_A"):
        base: Any = head.get_base_layer()
        variants = [type(head.lora_variant[a]).__name__ for a in head.active_adapters if a in head.lora_variant]
        if variants:
            raise ValueError(
                f"{variants[0]} on the output head ({type(model).__name__}) is more than a product and cannot be "
                "fused: leave the head out of `target_modules`, use plain LoRA on it, or put it into `modules_to_save`"
            )
        adapters = [] if head.disable_adapters or head.merged else [a for a in head.active_adapters if a in head.lora_A]
    else:
        base, adapters = head, []
    if not isinstance(base, nn.Linear) or is_quantized(base.weight):
        raise ValueError(
            f"the output head of {type(model).__name__} is a {type(base).__module__}.{type(base).__name__} with "
            f"weights of type {type(getattr(base, 'weight', None)).__name__}, which lowtide cannot fuse: keep the head "
            "in full precision and untouched (`llm_int8_skip_modules`, `modules_to_not_convert`), or adapt it with LoRA"
        )
    if hidden is None:
        return [], None
    terms, bias = [Term(hidden, base.weight)], base.bias
    for name in adapters:
        down, up = head.lora_A[name], head.lora_B[name]
        low: Tensor = down(head.lora_dropout[name](hidden.to(down.weight.dtype))) * head.scaling[name]
        terms.append(Term(low, up.weight))
        if up.bias is not None:
            own = up.bias * head.scaling[name]
            bias = own if bias is None else bias + own
    return terms, bias


def _load_balancing_loss(model: PreTrainedModel, outputs: Any, attention_mask: Tensor | None) -> Tensor:
    """The model family's own auxiliary loss, over the real tokens of this forward."""
    config = model.config.get_text_config()
    experts = getattr(model, "num_experts", None) or getattr(config, "num_experts", None) or config.num_local_experts
    chosen = getattr(model, "num_experts_per_tok", None) or config.num_experts_per_tok
    return load_balancing_loss(model, outputs.router_logits, experts, chosen, attention_mask)
