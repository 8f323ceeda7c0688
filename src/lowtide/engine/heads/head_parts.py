"""The modules that make the logits of a language model, and what they do: products, a bias, and a projection.

What a model does between its hidden states and its logits (scaling, soft-capping, an adapter on the head) is read from
its config and modules here, and proved against the model's own logits by `engine.probe`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from lowtide.compat.peft import rows_of_tokens, tokens_switched_on, trained_tokens
from lowtide.engine.weights.quantized import is_quantized
from lowtide.ops.logits.linear_logprobs import Term
from lowtide.ops.logits.logit_rows import Projection

SCALED_WHERE_TIED = frozenset({"umt5", "switch_transformers"})
"""Model types that scale hidden states as T5 where the head is the embedding, without a word of it in their config."""

UNSCALED = frozenset({"aya_vision", "cohere2_vision"})
"""Vision-language models that leave out the scaling of the language model inside."""

# Names by which configs tell what is done to the logits, each of which a config has at most once.
FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def projection_of(whole: PretrainedConfig) -> Projection:
    """What a model type does to its logits, from the config of the whole model."""
    if whole.model_type in UNSCALED:
        return Projection()
    config = whole.get_text_config()
    scale = math.prod(getattr(config, name, None) or 1.0 for name in FACTORS)
    tied = config.model_type in SCALED_WHERE_TIED and config.tie_word_embeddings
    if tied or getattr(config, "scale_decoder_outputs", False):
        scale *= config.d_model**-0.5
    scaling = math.prod(getattr(config, name, None) or 1.0 for name in DIVISORS)
    # Granite, MiniCPM and Inkling divide by it; HyperCLOVA X, alone, multiplies.
    scale = scale * scaling if config.model_type == "hyperclovax" else scale / scaling
    return Projection(scale, next((cap for name in CAPS if (cap := getattr(config, name, None))), None))


@dataclass(frozen=True)
class HeadParts:
    """The modules that a head is made of."""

    base: nn.Linear
    lora: Any = None
    """PEFT's layer around it, where it has adapters that are on."""
    adapters: Sequence[str] = ()
    wrappers: Sequence[nn.Module] = ()
    """What stands around `base`, from the outermost inwards."""
    tokens: Any = None
    """PEFT's layer that trains the rows of some tokens of a head which is the embedding too, where it is on."""
    rows: int | None = None
    """How many of the rows of its weights are of tokens, where those beyond make no logits (Inkling); None for all."""
    constant: Float[Tensor, "1 vocab"] | None = None
    """What is added to the logits and not trained (BART)."""

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
    tokens = trained_tokens(base)
    if tokens is not None:
        wrappers += [base] if base is tokens else [base, tokens]
        base = tokens.get_base_layer()
        tokens = tokens if tokens_switched_on(tokens) else None
    # asked of the module by name outside of its own call, ZeRO-3 would gather it for all of the model's forward
    if not isinstance(base, nn.Linear) or is_quantized(next(base.parameters(recurse=False))):
        raise ValueError(
            f"the output head of {type(model).__name__} is a {type(base).__module__}.{type(base).__name__} with "
            f"weights of type {type(getattr(base, 'weight', None)).__name__}, which lowtide cannot fuse: keep the head "
            "in full precision and untouched (`llm_int8_skip_modules`, `modules_to_not_convert`), or adapt it with LoRA"
        )
    rows = getattr(model.config.get_text_config(), "unpadded_vocab_size", None)
    rows = rows if rows is not None and rows < base.out_features else None
    return HeadParts(base, lora, adapters, wrappers, tokens, rows, getattr(model, "final_logits_bias", None))


def head_terms(parts: HeadParts, hidden: Tensor) -> tuple[list[Term], Tensor | None]:
    """The products that make the logits, and the bias."""
    terms, bias, lora = [Term(hidden, parts.base.weight)], parts.base.bias, parts.lora
    if parts.constant is not None:
        bias = parts.constant[0] if bias is None else bias + parts.constant[0]
    for name in parts.adapters:
        down, up = lora.lora_A[name], lora.lora_B[name]
        low: Tensor = down(lora.lora_dropout[name](hidden.to(down.weight.dtype))) * lora.scaling[name]
        terms.append(Term(low, up.weight))
        if up.bias is not None:
            own = up.bias * lora.scaling[name]
            bias = own if bias is None else bias + own
    if parts.tokens is not None:
        terms += _of_trained_tokens(parts.tokens, parts.base.weight, hidden)
    if parts.rows is None:
        return terms, bias
    if isinstance(parts.base.weight, DTensor):
        raise ValueError(
            f"ranks hold rows of the vocabulary, of which only the first {parts.rows:,} make logits "
            "(`unpadded_vocab_size` of the model's config): set fsdp_split_vocabulary=False"
        )
    # a part of a parameter that is taken without gradients would still say that it needs one
    of_tokens = [(w if torch.is_grad_enabled() else w.detach())[: parts.rows] for _, w in terms]
    return [Term(x, w) for (x, _), w in zip(terms, of_tokens, strict=True)], None if bias is None else bias[
        : parts.rows
    ]


def teacher_terms(heads: Sequence[HeadParts], states: Tensor) -> tuple[list[Term], Tensor | None]:
    """The same of a teacher; of several without biases, on the tokens that all have."""
    if len(heads) == 1:
        return head_terms(heads[0], states)
    rows = min(len(each.base.weight) for each in heads)
    parts = zip(heads, states.split([each.base.weight.shape[1] for each in heads], -1), strict=True)
    terms = [term for each, own in parts for term in head_terms(each, own)[0]]
    return [Term(x, weight[:rows]) for x, weight in terms], None


def _of_trained_tokens(layer: Any, weight: Tensor, hidden: Tensor) -> list[Term]:
    """What trained rows change in the logits of their tokens, and of no others: the product with the difference to the
    base's rows. No whole matrix with the rows in it is made."""
    terms = []
    for name in tokens_switched_on(layer):
        tokens, rows = rows_of_tokens(layer, name)
        index = torch.tensor(tokens, device=weight.device)
        change = rows.to(weight.dtype) - weight.detach().index_select(0, index)
        place = weight.new_zeros(weight.shape[0], len(tokens))
        place[index, torch.arange(len(tokens), device=weight.device)] = 1
        terms.append(Term(hidden @ change.T, place))
    return terms
