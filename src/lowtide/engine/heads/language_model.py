"""The head that gives log-probabilities of target tokens, and other statistics, without the logits.

What a model does between its hidden states and its logits (scaling, soft-capping, an adapter on the head) is read from
its config and modules here, and proved against the model's own logits by `engine.probe`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from lowtide.compat.torch import unread_in_backward
from lowtide.engine.heads.head import Head, ScoreOutput, Scores, body, is_one_of, own_call
from lowtide.engine.weights.quantized import is_quantized
from lowtide.engine.weights.split_vocabulary import split_of
from lowtide.ops.linear_logprobs import (
    NOTHING_MORE,
    Projection,
    Term,
    TokenStats,
    Want,
    chunk_rows,
    linear_logprobs,
    linear_loss,
)

WITH_IMAGES = {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES} - {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
"""Model types whose language model is a part of a vision-language model."""
MASKED = frozenset(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())


@dataclass
class TokenOutput(ScoreOutput):
    """What a language model's head gives."""

    logprobs: Tensor
    """[scores]"""
    loss: Tensor | None = None
    entropies: Tensor | None = None
    mean_logprobs: Tensor | None = None
    """[scores]"""
    top1: Tensor | None = None
    collisions: Tensor | None = None
    """[scores]"""
    aux_loss: Tensor | None = None

    @property
    def scored(self) -> Tensor:
        return self.logprobs

    @property
    def stats(self) -> TokenStats:
        return TokenStats(self.logprobs, self.entropies, self.mean_logprobs, self.top1, self.collisions)


class LanguageModel(Head):
    """Log-probabilities over a vocabulary, of the token that follows."""

    numbers = "log-probs"
    number = "log-probability in nats"
    unit = " nats"
    models = "language models"
    auto_class = AutoModelForCausalLM
    task_type = "CAUSAL_LM"
    pipeline = "text-generation"

    @classmethod
    def loader(cls, config: PretrainedConfig | None) -> Any:
        kind = getattr(config, "model_type", None)
        return AutoModelForImageTextToText if kind in WITH_IMAGES else cls.auto_class

    @classmethod
    def why_not(cls, model: nn.Module) -> str | None:
        inner: Any = model
        if is_masked(inner):
            return "is a masked language model, which does not predict the token that follows"
        if body(inner) is not inner and inner.get_output_embeddings() is not None:
            return None
        return "has no language-modelling head, so that it gives no log-probabilities"

    @classmethod
    def check(cls, model: PreTrainedModel) -> None:
        head_parts(model)

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> TokenOutput:
        parts = head_parts(model)
        names, fused = reading(model, parts, scores)
        return TokenOutput(**dict(zip(names, within(parts.modules, fused, hidden), strict=True)))

    @classmethod
    def dense_stats(
        cls,
        logits: Float[Tensor, "lines longest vocab"],
        index: Int[Tensor, " scores"],
        target: Int[Tensor, " scores"],
        longest: int,
        want: Want = NOTHING_MORE,
    ) -> TokenStats:
        """With gradients, but for `top1` and `collisions`."""
        chosen = logits[:, -longest:].flatten(0, 1).index_select(0, index).float()
        logprobs = torch.log_softmax(chosen, -1)
        own = logprobs.gather(-1, target[:, None])[:, 0]
        given: dict[str, Any] = {}
        if want.entropies:
            given["entropies"] = -(logprobs.exp() * logprobs).sum(-1)
        if want.mean_logprobs:
            given["mean_logprobs"] = logprobs.mean(-1)
        if want.top1:
            given["top1"] = own >= logprobs.amax(-1)
        if want.collisions:
            given["collisions"] = torch.logsumexp(2 * logprobs.detach(), -1)
        return TokenStats(own, **given)

    @classmethod
    def output_of(cls, stats: TokenStats, **more: Tensor | None) -> TokenOutput:
        return TokenOutput(
            logprobs=stats.logprobs,
            entropies=stats.entropies,
            mean_logprobs=stats.mean_logprobs,
            top1=stats.top1,
            collisions=stats.collisions,
            **more,
        )

    @classmethod
    def chunk_rows(cls, config: PretrainedConfig, dtype: torch.dtype, device: str) -> int:
        return chunk_rows(config.get_text_config().vocab_size, dtype, device)

    @classmethod
    def packed_elements(cls, config: PretrainedConfig) -> int:
        text = config.get_text_config()
        return text.vocab_size * text.hidden_size

    @classmethod
    def usage(cls, where: str) -> list[str]:
        return [
            f'writer = pipeline("{cls.pipeline}", model="{where}")',
            'talk = [{"role": "user", "content": "What is 2 + 2?"}]',
            'print(writer(talk, max_new_tokens=128, return_full_text=False)[0]["generated_text"])',
        ]


def is_masked(model: nn.Module) -> bool:
    """Whether a model predicts tokens that are masked, from both sides."""
    return is_one_of(model, MASKED)


def projection_of(config: PretrainedConfig) -> Projection:
    """What a model type does to its logits, from its config."""
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale *= getattr(config, name, None) or 1.0
    scaling = getattr(config, "logits_scaling", None) or 1.0
    # Granite and MiniCPM divide by it; HyperCLOVA X, alone, multiplies.
    scale = scale * scaling if config.model_type == "hyperclovax" else scale / scaling
    return Projection(scale, getattr(config, "final_logit_softcapping", None))


@dataclass(frozen=True)
class HeadParts:
    """The modules that a head is made of."""

    base: nn.Linear
    lora: Any = None
    """PEFT's layer around it, where it has adapters that are on."""
    adapters: Sequence[str] = ()
    wrappers: Sequence[nn.Module] = ()
    """What stands around `base`, from the outermost inwards."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """All whose weights meet the vocabulary, with what stands around them, from the outermost inwards."""
        return [*self.wrappers, *(self.lora.lora_B[name] for name in self.adapters), self.base]


def head_parts(model: PreTrainedModel) -> HeadParts:
    """The modules of the output head.

    Raises:
        ValueError: they make logits in a way that is not known.
    """
    head: Any = model.get_output_embeddings()
    wrappers = []
    if hasattr(head, "modules_to_save"):  # PEFT trains a copy of the whole head
        wrappers.append(head)
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
    lora, adapters, base = None, [], head
    if hasattr(head, "lora_A"):
        wrappers.append(head)
        base = head.get_base_layer()
        variants = [type(head.lora_variant[a]).__name__ for a in head.active_adapters if a in head.lora_variant]
        if variants:
            raise ValueError(
                f"{variants[0]} on the output head ({type(model).__name__}) is more than a product and cannot be "
                "fused: leave the head out of `target_modules`, use plain LoRA on it, or put it into `modules_to_save`"
            )
        if not (head.disable_adapters or head.merged):
            lora, adapters = head, [a for a in head.active_adapters if a in head.lora_A]
    # asked of the module by name outside of its own call, ZeRO-3 would gather it for all of the model's forward
    if not isinstance(base, nn.Linear) or is_quantized(next(base.parameters(recurse=False))):
        raise ValueError(
            f"the output head of {type(model).__name__} is a {type(base).__module__}.{type(base).__name__} with "
            f"weights of type {type(getattr(base, 'weight', None)).__name__}, which lowtide cannot fuse: keep the head "
            "in full precision and untouched (`llm_int8_skip_modules`, `modules_to_not_convert`), or adapt it with LoRA"
        )
    return HeadParts(base, lora, adapters, wrappers)


def reading(
    model: PreTrainedModel, parts: HeadParts, scores: Scores
) -> tuple[list[str], Callable[[Tensor], tuple[Tensor, ...]]]:
    """A function that reads scores off what the head's module is called with, and the names of what it returns."""
    names = ["logprobs", *(name for name in Want._fields if getattr(scores.want, name))]
    if scores.loss is not None:
        names.append("loss")
    projection = projection_of(model.config.get_text_config())._replace(temperature=scores.temperature)

    def fused(hidden: Tensor) -> tuple[Tensor, ...]:
        loss, stats = _fused(parts, hidden, scores, projection)
        found: dict[str, Any] = {**vars(stats), "loss": loss}
        return tuple(found[name] for name in names)

    return names, fused


def within(modules: Sequence[nn.Module], function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """A function of the hidden states, run within the own calls of modules, each inside the one before."""
    first, *rest = modules
    return own_call(first, (lambda x: within(rest, function, x)) if rest else function, hidden)


def _fused(
    parts: HeadParts, hidden: Tensor, scores: Scores, projection: Projection
) -> tuple[Tensor | None, TokenStats]:
    """The loss, where it is known score by score, and the statistics."""
    terms, bias = head_terms(parts, hidden)
    split = split_of(parts.base.weight)
    shared: dict[str, Any] = {"bias": bias, "projection": projection, "want": scores.want, "split": split}
    shared["accumulate"] = scores.accumulate
    unread_in_backward(parts.base, scores.loss is not None)
    if scores.loss is None:
        return None, linear_logprobs(terms, scores.index, scores.target, **shared)
    shared |= {"factor": scores.factor, "grad_scale": scores.grad_scale}
    return linear_loss(terms, scores.index, scores.target, scores.loss, **shared)


def head_terms(parts: HeadParts, hidden: Tensor) -> tuple[list[Term], Tensor | None]:
    """The products that make the logits, and the bias."""
    terms, bias, lora = [Term(hidden, parts.base.weight)], parts.base.bias, parts.lora
    for name in parts.adapters:
        down, up = lora.lora_A[name], lora.lora_B[name]
        low: Tensor = down(lora.lora_dropout[name](hidden.to(down.weight.dtype))) * lora.scaling[name]
        terms.append(Term(low, up.weight))
        if up.bias is not None:
            own = up.bias * lora.scaling[name]
            bias = own if bias is None else bias + own
    return terms, bias
