"""Encoder-decoders on ragged pairs: a row is a source, which the encoder reads, and the targets that go on from it.

In a `RaggedBatch` the source is the prefix of its targets, and a target's tokens are what the decoder is given. The
encoder runs all sources end to end, the decoder all targets, and a target attends to its own source. So there are three
attentions: within sources, within targets, and across. Layers tell by their modules which of them they ask for; the
plan of all three travels as `engine.attention` has it.

What such models compute outside of attention depends on places in a row, and transformers counts these in the padded
row: tables of positions (BART, Marian) and biases by distance (T5). Instances of a model are changed to count within
each segment; without a plan they compute what their classes do.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowtide.ops.attention.attention_plan import PLAN, AttentionPlan
from lowtide.ragged import RaggedBatch, Segment


@dataclass(frozen=True)
class PairPlan:
    """Who sees whom in a batch of pairs."""

    source: AttentionPlan
    target: AttentionPlan
    across: AttentionPlan
    """From targets to their sources."""

    @classmethod
    def build(cls, batch: RaggedBatch) -> tuple[PairPlan, Int[Tensor, " source"], Int[Tensor, " target"]]:
        """The plan, and which tokens of the batch are of sources and of targets."""
        number = {old: new for new, old in enumerate(sources(batch))}
        first = [batch.segments[old] for old in number]
        second = [part for part in batch.segments if part.prefix >= 0]
        before, after = _laid(first), _laid([part._replace(prefix=number[part.prefix]) for part in second])
        alone = tuple(part._replace(prefix=-1) for part in after)
        device = batch.token_ids.device
        of_source, of_target = _positions(before).to(device), _positions(after).to(device)
        plan = cls(
            AttentionPlan(before, of_source),
            AttentionPlan(alone, of_target),
            AttentionPlan(after, of_target, others=before),
        )
        return plan, _tokens(first).to(device), _tokens(second).to(device)

    def of(self, module: Any) -> AttentionPlan:
        """Of an attention layer: causal ones are the decoder's own, others are across if they are a decoder's."""
        if getattr(module, "is_causal", False):
            return self.target
        of_decoder = getattr(module, "is_decoder", None)
        if of_decoder is None:
            of_decoder = getattr(module.config, "is_decoder", False)
        return self.across if of_decoder else self.source


def sources(batch: RaggedBatch) -> list[int]:
    """The segments that are sources of others, ascending."""
    return sorted({part.prefix for part in batch.segments if part.prefix >= 0})


def _laid(segments: list[Segment]) -> tuple[Segment, ...]:
    """Segments end to end, without the others between them."""
    laid, start = [], 0
    for part in segments:
        laid.append(part._replace(start=start, stop=start + part.length))
        start += part.length
    return tuple(laid)


def _positions(segments: tuple[Segment, ...]) -> Int[Tensor, " tokens"]:
    return torch.cat([torch.arange(part.length) for part in segments])


def _tokens(segments: list[Segment]) -> Int[Tensor, " tokens"]:
    return torch.cat([torch.arange(part.start, part.stop) for part in segments])


def places_in_targets(batch: RaggedBatch, index: Int[Tensor, " scores"]) -> Int[Tensor, " scores"]:
    """Places in a batch, as places among the tokens of all targets."""
    shift, target = [], 0
    for part in batch.segments:
        shift.append(part.start - target)
        target += part.length if part.prefix >= 0 else 0
    return index - torch.tensor(shift).to(index.device)[batch.score_segment]


# -- the inputs of a forward --------------------------------------------------------------------------------------


_running: ContextVar[PairPlan | None] = ContextVar("running", default=None)


@contextlib.contextmanager
def running(plan: PairPlan) -> Iterator[None]:
    """While it lasts, positions are those of a plan; they are looked up before the first layer, never in backward."""
    token = _running.set(plan)
    try:
        yield
    finally:
        _running.reset(token)


def padded_pairs(batch: RaggedBatch) -> tuple[dict[str, Tensor], Int[Tensor, " scores"]]:
    """The padded form, a line for each target with its source: `input_ids`, `attention_mask` and `decoder_input_ids`
    [targets, longest], and the scores' places in the last, flattened."""
    targets = [number for number, part in enumerate(batch.segments) if part.prefix >= 0]
    parts = [batch.segments[number] for number in targets]
    froms = [batch.segments[part.prefix] for part in parts]
    input_ids, attention_mask = _padded(batch, froms)
    decoder_input_ids, _ = _padded(batch, parts)
    shift = torch.zeros(len(batch.segments), dtype=torch.long)
    for line, number in enumerate(targets):
        shift[number] = line * decoder_input_ids.shape[1] - batch.segments[number].start
    index = batch.score_index + shift.to(batch.score_index.device)[batch.score_segment]
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids}
    return inputs, index


def _padded(batch: RaggedBatch, parts: list[Segment]) -> tuple[Tensor, Tensor]:
    """Tokens, and where they are, [lines, longest]."""
    longest = max(part.length for part in parts)
    tokens = batch.token_ids.new_zeros(len(parts), longest)
    mask = torch.zeros_like(tokens)
    for line, part in enumerate(parts):
        tokens[line, : part.length] = batch.token_ids[part.start : part.stop]
        mask[line, : part.length] = 1
    return tokens, mask


# -- what depends on places in a row ------------------------------------------------------------------------------


def share_embedding(model: PreTrainedModel) -> None:
    """Makes one module of those that embed sources and targets by one weight: what is changed in it, or gathered for
    it, is so for both."""
    inner: Any = model
    own = inner.get_input_embeddings()
    for stack in (inner.get_encoder(), inner.get_decoder()):
        table = getattr(stack, "embed_tokens", None)
        if isinstance(table, nn.Embedding) and table.weight is own.weight and type(table) is type(own):
            stack.embed_tokens = own


def install_pairs(model: PreTrainedModel) -> None:
    """Lets the positions and biases of an encoder-decoder count within segments."""
    inner: Any = model
    for side, stack in (("source", inner.get_encoder()), ("target", inner.get_decoder())):
        for name, module in stack.named_modules():
            if name.endswith("embed_positions"):
                module.forward = types.MethodType(_embed_source if side == "source" else _embed_target, module)
            if hasattr(module, "compute_bias"):
                module.forward = types.MethodType(_attend, module)


def _embed_source(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    plan = _running.get()
    return _embed(self, None if plan is None else plan.source, args, kwargs)


def _embed_target(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    plan = _running.get()
    return _embed(self, None if plan is None else plan.target, args, kwargs)


def _embed(table: Any, plan: AttentionPlan | None, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """What a table of positions gives, which transformers' tables look up by `position_ids`."""
    if plan is not None:
        kwargs["position_ids"] = plan.positions
    return type(table).forward(table, *args, **kwargs)


def _attend(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What `T5Attention.forward` computes, given biases by distance in place of those of each two tokens."""
    plan = kwargs.get(PLAN)
    if isinstance(plan, PairPlan) and kwargs.get("position_bias") is None:
        own = plan.of(self)
        biased = self.has_relative_attention_bias
        kwargs["position_bias"] = (
            biases(self, own.longest) if biased else own.positions.new_zeros((), dtype=torch.float)
        )
    return type(self).forward(self, *args, **kwargs)


def biases(layer: Any, longest: int) -> Tensor:
    """The biases of all distances from query to key, [heads, distances], as `ops.attention.attention_plan.Rules.bias`
    has them. (A check of shapes would be compiled with the layer, which it fails.)"""
    before = layer.compute_bias(longest, 1)[0, :, :, 0]
    after = layer.compute_bias(1, longest)[0, :, 0]
    return torch.cat([before.flip(1)[:, :-1], after], dim=1)
