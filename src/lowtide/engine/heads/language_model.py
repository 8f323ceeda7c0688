"""The head that gives log-probabilities of target tokens, and other statistics, without the logits.

Beside a teacher's hidden states it also gives how far the two distributions are apart; the teacher's head is read then
too. Of a teacher that named some tokens with their log-probabilities nothing else is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from lowtide.engine.heads.head import (
    Head,
    ScoreOutput,
    Scores,
    Stats,
    acting_as,
    body,
    is_one_of,
    language_model_within,
    own_call,
)
from lowtide.engine.heads.head_parts import HeadParts, head_parts, head_terms, projection_of, teacher_terms
from lowtide.engine.heads.own_head import layers_before_head, own_head
from lowtide.engine.weights.sharded.split_vocabulary import split_of
from lowtide.ops.logits.linear_logprobs import (
    NOTHING_MORE,
    Teacher,
    TokenStats,
    chunk_rows,
    forms_in_forward,
    linear_logprobs,
    linear_loss,
)
from lowtide.ops.logits.logit_rows import Projection, Want

WITH_IMAGES = {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES} - {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
"""Model types whose language model is a part of a vision-language model."""
Reads = Callable[[Callable[[Tensor], Stats]], Stats]
"""Calls a function with hidden states, and returns what it reads off them."""
MASKED = frozenset(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())


class LanguageModel(Head):
    """Log-probabilities over a vocabulary, of the token that follows."""

    numbers = "log-probs"
    statistic = "logprobs"
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
        if inner.config.is_encoder_decoder:
            return "is an encoder-decoder, which predicts a target from a source"
        if is_masked(inner):
            return "is a masked language model, which does not predict the token that follows"
        if is_encoder(inner.config):
            return "is an encoder, whose tokens see those after them (is_decoder is False in its config)"
        has_body = body(inner) is not inner or language_model_within(inner) is not None
        if has_body and inner.get_output_embeddings() is not None:
            return None
        return "has no language-modelling head, so that it gives no log-probabilities"

    @classmethod
    def check(cls, model: PreTrainedModel) -> None:
        head_parts(model)

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> ScoreOutput:
        scores, at_vocabulary = met_by_head(model, hidden, scores)
        found = at_vocabulary(reading(model, head_parts(model), scores))
        return ScoreOutput(found.pop("loss", None), found)

    @classmethod
    def dense_stats(
        cls,
        logits: Float[Tensor, "lines longest vocab"],
        index: Int[Tensor, " scores"],
        target: Int[Tensor, " scores"],
        longest: int,
        want: Want = NOTHING_MORE,
    ) -> Stats:
        """With gradients, but for `top1` and `collisions`."""
        chosen = logits[:, -longest:].flatten(0, 1).index_select(0, index).float()
        logprobs = torch.log_softmax(chosen, -1)
        own = logprobs.gather(-1, target[:, None])[:, 0]
        given: Stats = {"logprobs": own}
        if want.entropies:
            given["entropies"] = -(logprobs.exp() * logprobs).sum(-1)
        if want.mean_logprobs:
            given["mean_logprobs"] = logprobs.mean(-1)
        if want.top1:
            given["top1"] = own >= logprobs.amax(-1)
        if want.collisions:
            given["collisions"] = torch.logsumexp(2 * logprobs.detach(), -1)
        return given

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


def is_encoder(config: Any) -> bool:
    """Whether a type of encoders is not told to be a decoder, so that its tokens see those after them."""
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(config, "is_decoder", None) is False


def is_masked(model: nn.Module) -> bool:
    """Whether a model predicts tokens that are masked, from both sides."""
    return is_one_of(model, MASKED)


def reading(model: PreTrainedModel, parts: HeadParts, scores: Scores) -> Callable[[Tensor], Stats]:
    """A function that reads statistics, and a loss that is formed here, off what the head's module is called with."""
    projection = projection_of(model.config)._replace(temperature=scores.temperature)

    def fused(hidden: Tensor) -> Stats:
        loss, stats = _fused(parts, hidden, scores, projection)
        return {name: value for name, value in {**vars(stats), "loss": loss}.items() if value is not None}

    return fused


def met_by_head(model: PreTrainedModel, hidden: Tensor, scores: Scores) -> tuple[Scores, Reads]:
    """The scores with their places among what the head's module is called with, and what runs a function of that within
    the module's own call.

    Where layers stand before the module, only the scored hidden states go through them, by the model's own code.
    """
    first, *rest = head_parts(model).modules
    if not layers_before_head(model):
        return scores, functools.partial(_by_name, lambda function: within([first, *rest], function, hidden))

    def run(function: Callable[[Tensor], Any]) -> Any:
        with acting_as(first, lambda x: within(rest, function, x.flatten(0, -2))):
            return own_head(model, hidden.index_select(0, scores.index)[:, None])

    own = replace(scores, index=torch.arange(len(scores.index), device=scores.index.device))
    return own, functools.partial(_by_name, run)


def _by_name(run: Callable[[Callable[[Tensor], Any]], Any], function: Callable[[Tensor], Stats]) -> Stats:
    """What a function reads within the calls of modules, which pass on a tuple of tensors, as their hooks expect."""
    names: list[str] = []

    def values(hidden: Tensor) -> tuple[Tensor, ...]:
        found = function(hidden)
        names.extend(found)
        return tuple(found.values())

    found = run(values)
    return dict(zip(names, found, strict=True))


def within(modules: Sequence[nn.Module], function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """A function of the hidden states, run within the own calls of modules, each inside the one before."""
    if not modules:
        return function(hidden)
    first, *rest = modules
    return own_call(first, lambda x: within(rest, function, x), hidden)


def _fused(
    parts: HeadParts, hidden: Tensor, scores: Scores, projection: Projection
) -> tuple[Tensor | None, TokenStats]:
    """The loss, where it is known score by score, and the statistics."""
    terms, bias = head_terms(parts, hidden)
    split = split_of(parts.base.weight)
    shared: dict[str, Any] = {"bias": bias, "projection": projection, "want": scores.want, "split": split}
    shared["accumulate"] = scores.accumulate
    unread = (scores.loss is not None and scores.spans is None) or forms_in_forward(terms, bias, scores.want, split)
    unread_in_backward(parts.base, unread)
    if scores.loss is None:
        return None, linear_logprobs(terms, scores.index, scores.target, **shared)
    shared |= {"factor": scores.factor, "grad_scale": scores.grad_scale}
    if scores.old is not None:
        shared["old"] = scores.old
    if scores.weights is not None:
        shared["factor"] *= scores.weights.to(torch.promote_types(hidden.dtype, torch.float32))
    target, loss, taught = scores.target, scores.loss, scores.teacher
    if scores.named is not None:
        named = Teacher((), beta=scores.beta, support=scores.support, named=scores.named)
        return linear_loss(terms, scores.index, target, loss, teacher=named, **shared)
    if taught is None:
        return linear_loss(terms, scores.index, target, loss, **shared)

    def beside(states: Tensor) -> tuple[Tensor, TokenStats]:
        with torch.no_grad():
            of_teacher, their_bias = teacher_terms(taught.parts, states)
        across, their_split = scores.across, split_of(taught.parts[0].base.weight)
        their_projection = taught.projection._replace(
            temperature=scores.temperature if across is None else across.temperature
        )
        compared = scores.beta, their_split, scores.support, across, scores.counted_spans
        teacher = Teacher(of_teacher, their_bias, their_projection, *compared)
        return linear_loss(terms, scores.index, target, loss, teacher=teacher, **shared)

    # where a policy without its adapters teaches, both read the same modules, whose call this is already
    theirs = [each for part in taught.parts for each in part.modules if each not in parts.modules]
    return within(theirs, beside, taught.states)
