"""The one call of a model's forward: a ragged batch in, log-probabilities (or a loss) of its scores out.

`install` prepares a model once, `score` calls it. A model that cannot run ragged runs padded, on the same head and
with the same result; that path is also the reference that the ragged one is tested against.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowtide.compat.peft import under_trained_tokens
from lowtide.compat.transformers import set_attention
from lowtide.engine.attention import NAME, PACKED, pair_inputs, planned_inputs, ragged_inputs
from lowtide.engine.chains import why_not_chains
from lowtide.engine.encoder_decoder import install_pairs, padded_pairs, places_in_targets, share_embedding
from lowtide.engine.heads import head_of
from lowtide.engine.heads.head import ScoreOutput, Scores, body
from lowtide.engine.heads.install import install_head
from lowtide.engine.heads.next_token import READ, NextToken
from lowtide.engine.images import image_inputs, shown_images
from lowtide.engine.layers.adapter_inputs import install_adapter_inputs
from lowtide.engine.layers.dropout import install_dropout
from lowtide.engine.layers.embedding import install_embedding
from lowtide.engine.layers.experts import install_experts
from lowtide.engine.layers.linear import install_linear
from lowtide.engine.layers.mixers import install_mixers, leave_mixers
from lowtide.engine.layers.noise import noisy_embeddings
from lowtide.engine.layers.rotary import Run, install_rotary, rows_of
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.engine.virtual_tokens import leading_states, prompt_config
from lowtide.engine.weights.quantized import keep_trainable
from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.attention.cached_attention import CachedPlan
from lowtide.ragged import SECOND_TEXT, RaggedBatch, Segment, SegmentImage
from lowtide.ranks.group import RankGroup
from lowtide.ranks.sequence import SequenceParallel
from lowtide.ranks.shards import whole_shape
from lowtide.ranks.tensor import TensorParallel

logger = logging.getLogger(__name__)

COMPUTED_IN = "_lowtide_computed_in"
"""The attribute of a model that says in which dtype `score` has autocast take its products."""
FIRST_POSITION = "_lowtide_first_position"
"""The attribute of a model that says which number it gives to the first position of a row."""
READS_MEANS = "_lowtide_reads_means"
"""The attribute of a model that says whether its head reads the mean of a segment's hidden states."""
TELLS_TEXTS_APART = "_lowtide_tells_texts_apart"
"""The attribute of a model that says whether it embeds which text of a pair a token is of."""
SPLIT_OVER = "_lowtide_split_over"
"""The attribute of a model that says which ranks `score` splits the tokens of a batch over."""
TENSOR_PARALLEL = "_lowtide_tensor_parallel"
"""The attribute of a model that says which ranks its layers are split between."""


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside the wrappers of DDP, PEFT and others."""
    while not isinstance(model, PreTrainedModel):
        unwrap = getattr(model, "get_base_model", None)  # PEFT's
        inner = unwrap() if callable(unwrap) else getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            raise ValueError(f"expected a transformers model or a wrapper of one, got {type(model).__name__}")
        model = inner
    return model


def model_beside(model: nn.Module) -> PreTrainedModel | None:
    """The other model that is a module of a model, and trained with it (`Head.beside`); None if there is none."""
    inner = causal_model(model)
    return head_of(inner).beside(inner)


def embedding_weight(model: nn.Module) -> Tensor:
    """[vocab, hidden]: the weight of the input embedding, whose device and dtype are the model's."""
    return under_trained_tokens(causal_model(model).get_input_embeddings()).weight


def direct_weights(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained weights whose gradients may be added in place, past autograd: of a head of its own, complete once the
    head's backward is over; and of the embedding, which may be the head's too, complete at the end."""
    inner: Any = causal_model(model)
    ends = (inner.get_output_embeddings(), inner.get_input_embeddings())
    weights = (getattr(under_trained_tokens(each), "weight", None) for each in ends)
    head, embedding = (p if isinstance(p, nn.Parameter) and p.requires_grad else None for p in weights)
    first = [] if head is None or head is embedding else [head]
    last = [] if embedding is None else [embedding]
    if (other := model_beside(inner)) is not None:  # its backward comes after that of the model's head
        last += [p for part in direct_weights(other) for p in part if p is not embedding]
    return first, last


def vocabulary(model: nn.Module) -> int:
    """Tokens that a model reads, and predicts if it has a head that does, wherever the parts of their rows lie. Some
    have rows for more tokens in the embedding than in the head (Llama with images, Moshi, CPM-Ant), or the reverse."""
    inner = causal_model(model)
    ends = [embedding_weight(model), getattr(under_trained_tokens(inner.get_output_embeddings()), "weight", None)]
    rows = [whole_shape(weight)[0] for weight in ends if isinstance(weight, Tensor)]
    return min([*rows, getattr(inner.config.get_text_config(), "unpadded_vocab_size", None) or rows[0]])


def compute_quantized(inner: nn.Module) -> None:
    """Has what is quantized in a model compute as the dense model that it stands for.

    Raises:
        ValueError: no gradients would pass through it.
    """
    if tensor_parallel_of(inner) is None:  # else it does already, each rank by its part
        keep_trainable(inner)
        install_experts(inner, quantized_alone=True)


def install(model: nn.Module, *, padding_free: bool = True) -> None:
    """Prepares a model for `score`: its head, and the ragged attention if `padding_free`.

    Raises:
        ValueError: the model has no head that is known, or one that cannot be fused; or its quantized weights
            pass no gradients on.
    """
    inner = causal_model(model)
    if stage_of(inner) is not None:
        return  # it was, before it was cut
    if tensor_parallel_of(inner) is None:
        keep_trainable(inner)
        install_experts(inner)
    install_adapter_inputs(inner)
    install_head(inner)
    if inner.config.is_encoder_decoder:
        share_embedding(inner)
    vars(inner)[READS_MEANS] = head_of(inner).means(inner)
    vars(inner)[TELLS_TEXTS_APART] = getattr(inner.config.get_text_config(), "type_vocab_size", 0) > 1
    install_embedding(inner)
    install_dropout(inner)
    install_linear(inner)
    install_rotary(inner)
    if padding_free:
        _keep_no_attentions(inner)
        inner.set_attn_implementation(NAME)
        tower: Any = getattr(body(inner), "visual", None)
        if isinstance(tower, PreTrainedModel):
            set_attention(tower.config, PACKED)
        vars(inner)[FIRST_POSITION] = first_position(inner)
        install_mixers(inner)
        if inner.config.is_encoder_decoder:
            install_pairs(inner)
    else:
        leave_mixers(inner)
    if (other := model_beside(inner)) is not None:
        install(other, padding_free=padding_free)


def _keep_no_attentions(model: Any) -> None:
    """Switches `output_attentions` off: attention never has a weight for each pair of tokens, and a config that asks
    for them could not be saved."""
    for config in (model.config, model.config.get_text_config()):
        if config.output_attentions:
            config.output_attentions = False
            logger.warning("the model's config says output_attentions=True, which has no effect: it is switched off")


def first_position(model: nn.Module) -> int:
    """RoBERTa and its kin count positions from the one after that of padding."""
    counting = (each for each in model.modules() if hasattr(each, "create_position_ids_from_input_ids"))
    return next((int(cast(Any, each).padding_idx) + 1 for each in counting), 0)


def compute_in(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Has `score` run a model in mixed precision, whoever calls it: the policy, a reference that is compared with it
    and an evaluation compute alike.

    Args:
        model: prepared by `install`, wrapped or not; copies of it keep this.
        dtype: what autocast takes matrix products in; None for that of the weights.
    """
    vars(causal_model(model))[COMPUTED_IN] = dtype


def computing(model: nn.Module) -> AbstractContextManager:
    """Autocast, where `compute_in` asks for it.

    With its cache, autocast holds a cast of every weight to the end of forward, 2 bytes a parameter, to spare those a
    second cast that are used twice: none but the tiled MLP's, which has a cache of its own.
    """
    dtype = vars(causal_model(model)).get(COMPUTED_IN)
    if dtype is None:
        return nullcontext()
    return torch.autocast(embedding_weight(model).device.type, dtype, cache_enabled=False)


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Around forwards without gradients and without dropout; afterwards each module is in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        vars(module)["training"] = False  # past a module's `__setattr__`, which looks for parameters
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            vars(module)["training"] = True


def sequence_of(model: nn.Module) -> SequenceParallel | None:
    """The ranks that the tokens of a batch are split over, where `engine.over_ranks.splitting.split_over` says so."""
    return vars(causal_model(model)).get(SPLIT_OVER)


def tensor_parallel_of(model: nn.Module) -> TensorParallel | None:
    """The ranks that the matrices of each layer are split between, where `engine.weights.sharded.split_layers` did
    so."""
    return vars(causal_model(model)).get(TENSOR_PARALLEL)


def same_rows_of(model: nn.Module) -> RankGroup | None:
    """The ranks that hold the same rows and compute a batch together; None where each rank has rows of its own."""
    stage = stage_of(causal_model(model))
    return (sequence_of(model) or tensor_parallel_of(model)) if stage is None else stage.pipeline


def parted_over(model: nn.Module) -> RankGroup | None:
    """The ranks that each have a part of what every token goes through, so that they write all tokens together: ranks
    that split the matrices of each layer, or that have layers of their own."""
    stage = stage_of(causal_model(model))
    return tensor_parallel_of(model) if stage is None else stage.pipeline


def score(
    model: nn.Module,
    batch: RaggedBatch,
    scores: Scores | None = None,
    *,
    padding_free: bool = True,
    **options: Any,
) -> ScoreOutput:
    """Runs the model on a batch, on the device where both are.

    Ranks that split the tokens or the layers (`engine.over_ranks`) call it together, with one batch. With gradients, a
    stage of a pipeline is run by itself (`Stage.enter`).

    Args:
        model: prepared by `install`, wrapped or not.
        batch: what to run and to score.
        scores: how; its index and target are the batch's. By default `Scores` made from `options`.
        padding_free: False runs each segment as a padded row of its own, with its prefix repeated before it.

    Returns:
        statistics in the order of the batch's scores.
    """
    scores = scores or Scores(batch.score_index, batch.score_target, **options)
    inner = causal_model(model)
    if batch.piece is not None and (reason := why_not_chains(model, inner)):
        raise ValueError(
            f"model type {inner.config.model_type} cannot run a row in pieces, since {reason}: raise "
            "`tokens_per_microbatch` to the longest row, or lower `max_length`"
        )
    if vars(inner).get(READS_MEANS):
        scores = replace(scores, lengths=batch.lengths[batch.score_segment])
    types = batch.token_types if vars(inner).get(TELLS_TEXTS_APART) else None
    with computing(model):
        if not padding_free:
            pairs = inner.config.is_encoder_decoder
            inputs, index = padded_pairs(batch) if pairs else pad(batch)
            images = image_inputs(inner, inputs["input_ids"], _padded_images(batch))
            virtual = leading_states(model)
            index = index + virtual * (index // inputs["input_ids"].shape[1] + 1) if virtual else index
            if types is None:
                inputs.pop("token_type_ids", None)
            with noisy_embeddings(inner, batch, inputs["attention_mask"]), rows_of(lambda: _padded_runs(model, batch)):
                return model(**inputs, **images, scores=replace(scores, index=index))
        sequence = sequence_of(model)
        if inner.config.is_encoder_decoder:
            with pair_inputs(batch) as inputs:
                return model(**inputs, scores=replace(scores, index=places_in_targets(batch, scores.index)))
        stage = stage_of(inner)
        own = slice(None) if sequence is None else sequence.runs(batch.tokens)
        with (
            ragged_inputs(batch, sequence, first_position=vars(inner).get(FIRST_POSITION, 0)) as inputs,
            noisy_embeddings(inner, batch, own=own),
            _own_random(sequence if stage is None else stage.pipeline, inner, batch.token_ids.device),
        ):
            inputs |= image_inputs(inner, inputs["input_ids"], chain.from_iterable(batch.images))
            if types is not None:
                inputs["token_type_ids"] = types[None, own]
            if stage is None or stage.entered:
                return model(**inputs, scores=scores)
            return stage.run_through(lambda: model(**inputs, scores=scores), batch.tokens, batch.token_ids.device)


def _padded_runs(model: nn.Module, batch: RaggedBatch) -> list[Run]:
    """The rows of a batch's padded form, each with the virtual tokens before it."""
    prompt = prompt_config(model)
    states, virtual = leading_states(model), 0 if prompt is None else prompt.num_virtual_tokens
    lengths = [sum(part.length for part in _line(batch, number)) for number in padded_segments(batch)]
    return [Run(states + max(lengths), (virtual + length,)) for length in lengths]


def _own_random(group: RankGroup | None, model: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """Random numbers of this rank alone, where ranks split a batch, or a model, that is trained on."""
    return nullcontext() if group is None or not model.training else group.own_random(device)


def score_shared(
    model: nn.Module, batch: RaggedBatch, scores: Scores | None = None, *, padding_free: bool = True
) -> ScoreOutput:
    """As `score`, with each prompt that several rows repeat computed once."""
    shared = batch.share_prefixes()
    if scores is not None:
        scores = replace(scores, index=shared.score_index, target=shared.score_target)
    return score(model, shared, scores, padding_free=padding_free)


def read_next(
    model: nn.Module,
    token_ids: Int[Tensor, " tokens"],
    plan: AttentionPlan | CachedPlan,
    index: Int[Tensor, " rows"],
    read: Callable[[Tensor, slice], Tensor],
    images: Iterable[SegmentImage] = (),
) -> Float[Tensor, "numbers rows"]:
    """What a function reads off the logits of the tokens that follow: one forward of generation.

    Ranks that have layers of their own (`engine.weights.sharded.stages`) call it together, with the same tokens.

    Args:
        model: prepared by `install`, wrapped or not.
        plan: how the tokens attend.
        index: after which of the tokens, one for each row.
        read: see `ops.logits.linear_logprobs.read_logits`.
        images: those among the tokens, in their order.
    """
    axes = plan.axes if isinstance(plan, CachedPlan) else None
    stage, scores = stage_of(causal_model(model)), Scores(index, index, head=NextToken, read=read)
    with computing(model), planned_inputs(token_ids, plan, axes=axes) as inputs:
        inputs |= shown_images(images, token_ids.device)
        if stage is None:
            return model(**inputs, scores=scores).stats[READ]
        return stage.run_through(lambda: model(**inputs, scores=scores), len(token_ids), token_ids.device).stats[READ]


def pad(batch: RaggedBatch) -> tuple[dict[str, Tensor], Tensor]:
    """The padded form: `input_ids` and `attention_mask` [rows, longest], and the scores' places in it, flattened;
    `position_ids` [axes, rows, longest] where positions have several axes, `token_type_ids` of pairs of texts."""
    kept = padded_segments(batch)
    whole = [_line(batch, number) for number in kept]
    lengths = [sum(part.length for part in parts) for parts in whole]
    longest, device = max(lengths), batch.token_ids.device
    input_ids = torch.zeros(len(kept), longest, dtype=torch.long, device=device)
    attention_mask = torch.zeros(len(kept), longest, dtype=torch.long, device=device)
    index = torch.empty_like(batch.score_index)
    axes = batch.axis_positions
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if axes is not None:
        inputs["position_ids"] = axes.new_zeros(len(axes), len(kept), longest)
    for line, parts in enumerate(whole):
        tokens = torch.cat([batch.token_ids[part.start : part.stop] for part in parts])
        input_ids[line, : len(tokens)] = tokens
        if axes is not None:
            own = torch.cat([axes[:, part.start : part.stop] for part in parts], 1)
            inputs["position_ids"][:, line, : len(tokens)] = own
        attention_mask[line, : len(tokens)] = 1
        part = parts[-1]
        at = batch.score_index[part.score_start : part.score_stop]
        own = at - part.start + part.after(batch.segments)
        if part.prefix >= 0:
            own = torch.where(at >= part.start, own, at - parts[0].start)
        index[part.score_start : part.score_stop] = own + line * longest
    if SECOND_TEXT in batch.row_values:
        begins = batch.row_values[SECOND_TEXT][batch.row[kept]]
        inputs["token_type_ids"] = (torch.arange(longest, device=device) >= begins[:, None]).long() * attention_mask
    return inputs, index


def padded_segments(batch: RaggedBatch) -> list[int]:
    """The segments that have a padded row each, behind what they see of their prefixes: those that are no prefix, or
    are scored themselves."""
    shared = {part.prefix for part in batch.segments}
    return [n for n, part in enumerate(batch.segments) if n not in shared or part.score_stop > part.score_start]


def _line(batch: RaggedBatch, number: int) -> list[Segment]:
    """A padded row: a segment behind what it sees of its prefix."""
    part = batch.segments[number]
    before = part.prefix_among(batch.segments)
    return [part] if before is None else [before, part]


def _padded_images(batch: RaggedBatch) -> Iterator[SegmentImage]:
    """The images of a batch in the order of its padded form."""
    for number in padded_segments(batch) if batch.images else ():
        part = batch.segments[number]
        yield from (*part.images_before(batch.segments, batch.images), *batch.images[number])
